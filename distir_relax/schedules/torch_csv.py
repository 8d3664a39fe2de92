"""Read and write schedules in torch's CSV format: a line for each rank, with its actions separated by commas.

This is the format ``compute_only`` of ``torch.distributed.pipelining``, `_PipelineScheduleRuntime._load_csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from distir_relax.errors import DistIRError
from distir_relax.schedules.task import Kind, Order, Task
from distir_relax.schedules.validate import check

_TASK = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# Actions on weights and gradients; communication between stages occurs in torch's lowered format only.
_NO_TASK = re.compile(r"[0-9]{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9}")
_MOST_ACTIONS = 10_000_000


def to_csv(order: Order) -> str:
    """Return the order as text for torch: ``0F0,0F1,0B0,0B1`` and a line for each further rank."""
    return "".join(",".join(map(str, tasks)) + "\r\n" for tasks in order.tasks)


def from_csv(text: str, rank_of: Sequence[int] = (), where: str = "schedule") -> Order:
    """Parse torch's text of an order: stage, kind and microbatch, ``2F0``; an empty field is a step without a task.

    A stage is on the rank of its line, or as in `rank_of`. A forward and a backward that overlap
    (``(0F4;7B0)OVERLAP_F_B``) are read as consecutive tasks. Actions on weights (``0UNSHARD``, ``0RESHARD``,
    ``0REDUCE_GRAD``) are ignored. Raises `DistIRError`, with the line and the field, for any other text, and for an
    invalid order; `where` names the file.
    """
    if text.count(",") + text.count(";") + text.count("\n") > _MOST_ACTIONS:
        raise DistIRError(f"expected a schedule of up to {_MOST_ACTIONS:,} actions", where)
    # Split at CSV line ends only; `splitlines` splits at more characters.
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
    """Yield the tasks of a field."""
    # csv.writer quotes fields with commas or quotes, which no action has.
    action = field.strip().removeprefix('"').removesuffix('"').strip()
    if overlapped := _OVERLAPPED.fullmatch(action):
        for part in overlapped[1].split(";"):
            yield _task(part.strip(), where)
    elif action and not _NO_TASK.fullmatch(action):
        yield _task(action, where)


def _task(action: str, where: str) -> Task:
    match = _TASK.fullmatch(action)
    if not match:
        expected = "expected an action: stage, F, B, I or W, microbatch, such as 2F0"
        lowered = re.search("SEND|RECV", action)
        hint = "use the schedule before torch added sends to it: compute_only" if lowered else ""
        raise DistIRError(f"{expected}, found {action[:40]!r}", where, hint)
    kind: Kind = match[2]  # type: ignore[assignment]
    return Task(kind, int(match[1]), int(match[3]))


def _ranks(tasks: tuple[tuple[Task, ...], ...], where: str) -> tuple[int, ...]:
    """Return the rank of each stage: that of its tasks."""
    ranks: dict[int, int] = {}
    for rank, row in enumerate(tasks):
        for task in row:
            if ranks.setdefault(task.stage, rank) != rank:
                raise DistIRError(f"stage {task.stage} is on rank {ranks[task.stage]} and on rank {rank}", where)
    for stage in range(len(ranks)):
        if stage not in ranks:
            raise DistIRError(f"there is no stage {stage}, and one {max(ranks)}", where)
    return tuple(ranks[stage] for stage in range(len(ranks)))
