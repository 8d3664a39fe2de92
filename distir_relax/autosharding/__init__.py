"""Autosharding: choose how each op of a program is split, by an integer program.

`op_strategies` enumerates the strategies of each op, `graph` connects the ops, `costs` takes seconds from the
simulator, `memory` counts the live bytes, `integer_program` and `solver` choose the strategies, and `apply_solution`
writes the sharded program.
"""

from distir_relax.autosharding.autoshard import PlaceBySearch

__all__ = ["PlaceBySearch"]
