"""Check that the ranks of a communication execute the same one.

Programs have no data-dependent control flow: ranks that matched in one run match in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.errors import RunError
from distir_relax.runtime.progress import Point

NUMBERS = 3
"""Length of the result of `as_numbers`."""
_KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "resplit", "send", "recv", "barrier", "rows_to_groups",
    "rows_from_groups",
)  # fmt: skip
_PEER_KIND = {_KINDS.index("recv"): _KINDS.index("send")}


def as_numbers(point: Point) -> list[int]:
    """Encode a communication of a program's step as numbers that ranks can exchange."""
    assert isinstance(point.step, int)
    return [point.step, _KINDS.index(point.kind), point.time]


def check_peer_step(rank: int, mine: Sequence[int], peer: int, theirs: Sequence[int]) -> None:
    """Raise RunError unless the communication of `peer` matches that of `rank`."""
    step, kind, time = mine
    if list(theirs) != [step, _PEER_KIND.get(kind, kind), time]:
        raise RunError(
            f"the programs of the ranks do not match: rank {rank} is at {_text(*mine)}, rank {peer} at "
            f"{_text(*theirs)}",
            hint="compile the model again; distir show --stage ranked prints the programs",
        )


def _text(step: int, kind: int, time: int) -> str:
    return f"step #{step}, {_KINDS[kind]}" + (f", for time {time + 1}" if time else "")
