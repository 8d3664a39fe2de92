"""Schedules as torch's pipelining reads and writes them: a line for each rank, its actions with commas between.

``torch.distributed.pipelining`` has this as the format ``compute_only`` of `_PipelineScheduleRuntime._load_csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from distir_relax.errors import DistIRError
from distir_relax.schedules.task import Kind, Order, Task
from distir_relax.schedules.validate import check

_TASK = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# What moves weights and adds up gradients; what goes between stages stands in torch's lowered format alone.
_NO_TASK = re.compile(r"[0-9]{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9}")
_MOST_ACTIONS = 10_000_000


def to_csv(order: Order) -> str:
    """The order as text that torch reads: ``0F0,0F1,0B0,0B1`` and a line for each further rank."""
    return "".join(",".join(map(str, tasks)) + "\r\n" for tasks in order.tasks)


def from_csv(text: str, rank_of: Sequence[int] = (), where: str = "schedule") -> Order:
    """The order in a text of torch's: stage, kind and microbatch, ``2F0``; an empty field is a step without a task.

    A stage is on the rank in whose line it stands, or as `rank_of` says. A forward and a backward that overlap
    (``(0F4;7B0)OVERLAP_F_B``) are read as one after the other. What is said of weights (``0UNSHARD``, ``0RESHARD``,
    ``0REDUCE_GRAD``) is passed over. Raises `DistIRError`, with the line and the field, for any other text, and for an
    order that is not valid; `where` names the file.
    """
    if text.count(",") + text.count(";") + text.count("\n") > _MOST_ACTIONS:
        raise DistIRError(f"expected a schedule of up to {_MOST_ACTIONS:,} actions", where)
    # Lines end as in CSV, and not at the other characters that `splitlines` knows.
    lines = re.split(r"\r\n|\r|\n", text)
    while lines and not lines[-1].strip():
        lines.pop()
    tasks = tuple(
        tuple(task for i, field in enumerate(line.split(","), 1) for task in _tasks(field, f"{where}:{number}:{i}"))
        for number, line in enumerate(lines, 1)
    )
    order = Order(tasks, tuple(rank_of) or _ranks(tasks, where))
    try:
        check(order)
    except DistIRError as error:
        raise DistIRError(error.message, f"{where}: {error.where}" if error.where else where, error.hint) from None
    return order


def _tasks(field: str, where: str) -> Iterator[Task]:
    """The tasks that a field stands for."""
    # csv.writer quotes what has a comma or a quote in it: no action has.
    action = field.strip().removeprefix('"').removesuffix('"').strip()
    if overlapped := _OVERLAPPED.fullmatch(action):
        for part in overlapped[1].split(";"):
            yield _task(part.strip(), where)
    elif action and not _NO_TASK.fullmatch(action):
        yield _task(action, where)


def _task(action: str, where: str) -> Task:
    found = _TASK.fullmatch(action)
    if not found:
        expected = "expected an action: stage, F, B, I or W, microbatch, such as 2F0"
        lowered = re.search("SEND|RECV", action)
        hint = "take the schedule as it was before torch put sends into it: compute_only" if lowered else ""
        raise DistIRError(f"{expected}, found {action[:40]!r}", where, hint)
    kind: Kind = found[2]  # type: ignore[assignment]
    return Task(kind, int(found[1]), int(found[3]))


def _ranks(tasks: tuple[tuple[Task, ...], ...], where: str) -> tuple[int, ...]:
    """The rank of each stage: where its tasks stand."""
    ranks: dict[int, int] = {}
    for rank, row in enumerate(tasks):
        for task in row:
            if ranks.setdefault(task.stage, rank) != rank:
                raise DistIRError(f"stage {task.stage} is on rank {ranks[task.stage]} and on rank {rank}", where)
    for stage in range(len(ranks)):
        if stage not in ranks:
            raise DistIRError(f"there is no stage {stage}, and one {max(ranks)}", where)
    return tuple(ranks[stage] for stage in range(len(ranks)))
