"""Placements by optimisation: an integer program over the ways in which each op of a program can be split.

`space` says what each op may take and give, `graph` which op uses what, `prices` how long each way takes as the
simulator has it, `memory` how much is needed, `integer_program` and `highs` which ways together are fastest, and
`lay_out` makes the program of them.
"""

from distir_relax.autosharding.autoshard import PlaceBySearch

__all__ = ["PlaceBySearch"]
