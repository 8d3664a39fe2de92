"""Measuring a machine: microbenchmarks of ops and collectives, the profile fitted to them, predictions against runs."""
