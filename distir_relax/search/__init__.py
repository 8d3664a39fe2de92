"""The best placements for a program on a machine, by optimisation."""
