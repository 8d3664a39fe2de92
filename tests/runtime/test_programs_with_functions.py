"""Programs with functions at run time: answers, and in which call a rank waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distir_relax.errors import RunError
from distir_relax.runtime.session import Session
from tests.blocks import blocks_bundle

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize(("ranks", "tail"), [(2, "ragged"), (3, "pad"), (5, "ragged")])
def test_blocks_give_what_torch_gives(ranks: int, tail: str, backend: str) -> None:
    bundle, tensors = blocks_bundle(ranks, tail, backend)
    x = torch.randn(5, 64)
    expected = x
    for i in range(3):
        up, down = tensors[f"blocks.{i}.up"], tensors[f"blocks.{i}.down"]
        expected = expected + torch.nn.functional.gelu(expected @ up) @ down
    torch.testing.assert_close(Session(bundle, backend)({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)


def test_the_watchdog_says_in_which_call_a_rank_waits() -> None:
    bundle, _ = blocks_bundle(2, "ragged", "torch")
    late = bundle.programs["programs/main_1.py"].replace(
        "    add_2 = feed_forward(", "    import time; time.sleep(3)\n    add_2 = feed_forward("
    )
    assert "time.sleep" in late
    session = Session(replace(bundle, programs={**bundle.programs, "programs/main_1.py": late}), timeout=0.5)
    with pytest.raises(RunError) as raised:
        session({"x": torch.randn(5, 64)})
    step = "%matmul_1 = all_reduce(%matmul_1.partial)  # model.py:8"
    assert f"{step} in blocks.2; it last finished step #6 {step} in blocks.1" in str(raised.value)


def test_the_tvm_program_names_every_call() -> None:
    from distir_relax.runtime.backends.tvm import load
    from distir_relax.runtime.transports.threads import ThreadWorld

    bundle, _ = blocks_bundle(2, "ragged", "tvm")
    program = load(bundle, 0, ThreadWorld(bundle.manifest.mesh).communicator(0))
    ((_, calls),) = program.steps.items()
    assert [text.rpartition("# ")[2] for text in calls] == [f"blocks.{i}, model.py:8" for i in range(3)]
