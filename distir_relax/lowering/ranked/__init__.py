"""Passes over ranked programs."""
