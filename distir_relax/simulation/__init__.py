"""The simulator: time and memory of a distributed program on a machine."""
