"""Programs whose ops start without Python: a CPU backend binds a small one after some calls.

Its ops are then a list of native calls with prepared arguments (`runtime.backends.bound_calls`). Others run op by op,
and each op takes Python's time, too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from distir_relax.cost.profile import Profile
from distir_relax.ir import Module


def as_started(profile: Profile, module: Module, updates: bool) -> Profile:
    """Return the machine on which the ops of a program take the time of Python if the program is not bound.

    `updates` is whether an op of the distributed program updates its operand in place: those are not bound.
    """
    if not profile.python or (not updates and result_bytes(module) <= profile.bound):
        return profile
    return replace(
        profile,
        overhead=profile.overhead + profile.python,
        collective_overhead=profile.collective_overhead + profile.python_collective,
    )


def result_bytes(module: Module) -> int:
    """Return the bytes of the results of all ops of a distributed program, in all calls, on one device."""

    @cache
    def of(name: str) -> int:
        return sum(
            of(op.callee) if op.callee else sum(v.placed.local(0).bytes for v in op.results)
            for op in module.function(name).ops
        )

    return of(module.main.name)
