"""Passes over the programs of single ranks."""
