"""Calibration of a machine: microbenchmarks, the profile fitted to them, and validation of predictions."""
