"""torch's own schedules, asked for their orders: nothing is distributed, and no stage has a model."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping


def torch_csv(name: str, p: int, m: int, chunks: int, folder: Path) -> str:
    """The order of torch's schedule class of that name, as torch writes it."""
    made: Any = getattr(theirs, name)
    if not issubclass(made, theirs.PipelineScheduleSingle):
        style = "v" if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else "loop"
        made(_stages(p, chunks, style), m)._dump_csv(str(folder / "theirs.csv"), "compute_only")
        return (folder / "theirs.csv").read_text(encoding="utf-8")
    text = io.StringIO()
    found = made._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
    csv.writer(text).writerows(found.values())
    return text.getvalue()


def runs_in_torch(text: str, p: int, chunks: int, m: int, folder: Path) -> dict[int, int]:
    """torch reads and checks an order, puts sends into it, and runs it dry. The rank of each stage, as torch sees it.

    Raises what torch raises where it does not like the order, or where ranks wait on each other.
    """
    (folder / "ours.csv").write_text(text, encoding="utf-8", newline="")
    schedule: Any = theirs._PipelineScheduleRuntime(_stages(p, chunks, "loop"), m)
    schedule._load_csv(str(folder / "ours.csv"))
    # The dry run does not know what is done to weights.
    of_weights = (theirs.UNSHARD, theirs.RESHARD, theirs.REDUCE_GRAD)
    for rank, actions in schedule.pipeline_order_with_comms.items():
        kept = [action for action in actions if action.computation_type not in of_weights]
        schedule.pipeline_order_with_comms[rank] = kept
    schedule._simulate()
    found: dict[int, int] = schedule.stage_index_to_group_rank
    return found


def _stages(p: int, chunks: int, style: str) -> list[Any]:
    """What a schedule asks the stages of rank 0 for when it is made."""
    rank_of = generate_stage_to_rank_mapping(p, p * chunks, style=style)
    return [
        SimpleNamespace(
            group_rank=0,
            group_size=p,
            num_stages=p * chunks,
            stage_index=stage,
            stage_index_to_group_rank=rank_of,
            submod=None,
        )
        for stage, rank in rank_of.items()
        if rank == 0
    ]
