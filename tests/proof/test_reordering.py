"""A pass that reorders communication: accepted where all ranks follow it, refused where one of them does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.errors import VerificationError
from distir_relax.ir import parse
from distir_relax.proof import check_projection

EXAMPLE = Path(__file__).parents[2] / "examples" / "reorder_sums.py"


class Heads(nn.Module):
    """Two independent heads, each of which ends in a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_2, self.down, self.down_2 = (nn.Linear(*n) for n in ((6, 10), (6, 7), (10, 4), (7, 5)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(self.up(x).relu()).tanh(), self.down_2(self.up_2(x).relu()).sigmoid()


@pytest.fixture
def plan() -> dr.Plan:
    torch.manual_seed(0)
    return dr.compile(Heads().eval(), (torch.randn(5, 6),), shardings={"up*.weight": "S[0]"}, mesh=3)


def run(plan: dr.Plan, passes: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `distir opt` in a process of its own: passes stay registered."""
    (folder / "ranked.txt").write_text(plan.text("ranked"), encoding="utf-8")
    options = ["opt", str(folder / "ranked.txt"), "--import", str(EXAMPLE), "--passes", passes, "--verify"]
    command = [sys.executable, "-c", "from distir_relax.cli import main; main()", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_on_all_ranks_it_is_accepted(plan: dr.Plan, tmp_path: Path) -> None:
    done = run(plan, "exchange-sums", tmp_path)
    assert done.returncode == 0, done.stderr
    changed = done.stdout
    assert changed != plan.text("ranked")
    # Another schedule than the compiler's, which the projection notices.
    with pytest.raises(VerificationError, match="where the schedule has"):
        check_projection(plan.modules["distributed"], parse(changed))


def test_on_one_rank_it_is_refused(plan: dr.Plan, tmp_path: Path) -> None:
    done = run(plan, "exchange-sums{rank=0}", tmp_path)
    assert done.returncode != 0
    assert re.search(r"different places of the schedule: rank 0 does .* rank 1 does", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
