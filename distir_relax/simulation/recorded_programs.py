"""Programs whose ops start without Python: a CPU backend records a small one after some calls.

Its ops are then a list of native calls with prepared arguments (`runtime.backends.recorded_calls`). Others run op by
op, and each op takes Python's time, too, as do those of a recorded program that have no native kernel.
"""

from __future__ import annotations

from dataclasses import replace

from distir_relax.cost.profile import Profile
from distir_relax.ir import Module, callees_first


def as_started(profile: Profile, module: Module, updates: bool, is_recorded: bool | None = None) -> Profile:
    """Return the machine with the fact whether a program is recorded, and if not the time of Python in collectives.

    `updates` is whether an op of the distributed program updates its operand in place: those are not recorded. Others
    are by their size, unless `is_recorded` tells.
    """
    if not profile.recorded or profile.is_recorded:
        return profile
    if is_recorded is None:
        is_recorded = not updates and result_bytes(module) <= profile.recorded
    if is_recorded:
        return replace(profile, is_recorded=True)
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
