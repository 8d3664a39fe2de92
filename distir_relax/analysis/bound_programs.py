"""Programs whose ops start without Python: a CPU backend binds a small one after some calls.

Its ops are then a list of native calls with prepared arguments (`runtime.backends.bound_calls`). Others run op by op,
and each op takes Python's time, too, as do those of a bound program that have no native kernel.
"""

from __future__ import annotations

from dataclasses import replace

from distir_relax.cost.profile import Profile
from distir_relax.ir import Module, callees_first


def as_started(profile: Profile, module: Module, updates: bool, is_bound: bool | None = None) -> Profile:
    """Return the machine with the fact whether a program is bound, and the time of Python in collectives if it is not.

    `updates` is whether an op of the distributed program updates its operand in place: those are not bound. Others are
    by their size, unless `is_bound` tells.
    """
    if not profile.bound or profile.binds:
        return profile
    if is_bound is None:
        is_bound = not updates and result_bytes(module) <= profile.bound
    if is_bound:
        return replace(profile, binds=True)
    collective = profile.collective_overhead + profile.python_collective
    return replace(profile, collective_overhead=collective, python_collective=0.0)


def result_bytes(module: Module) -> int:
    """Return the bytes of the results of all ops of a distributed program, in all calls, on one device."""

    totals: dict[str, int] = {}
    # The entry is called by none.
    for function in callees_first(module):
        totals[function.name] = sum(
            totals[op.callee] if op.callee else sum(v.placed.local(0).bytes for v in op.results) for op in function.ops
        )
    return totals[module.main.name]
