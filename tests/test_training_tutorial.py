"""The tutorial of docs/training.md: its file and its commands, in their order, with fewer steps."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from distir_relax.cli import app
from tests.test_docs import code_blocks

PAGE = "docs/training.md"
RANKS_OF_MPIRUN = re.compile(r" -n \d+")
STEPS = re.compile(r"(--steps|--evaluate-every) (\d+)0\b")


def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = [block for block in code_blocks(PAGE, "python") if block.startswith("# train.py")]
    Path("train.py").write_text(text, encoding="utf-8")
    lines = "\n".join(code_blocks(PAGE, "sh")).replace("\\\n", "").splitlines()
    commands = [line for line in lines if "train.py" in line or "ck" in line]
    assert len(commands) == 8
    for command in commands:
        # Ranks are threads here, with the same results.
        shorter = STEPS.sub(r"\1 \2", RANKS_OF_MPIRUN.sub("", command))
        done = CliRunner().invoke(app, shlex.split(shorter)[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}"
    assert {path.name for path in tmp_path.iterdir()} >= {"run.csv", "run.html", "trained.safetensors"}

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    import train  # type: ignore[import-not-found]

    model = train.build().model.eval()
    model.load_state_dict(load_file("trained.safetensors"))
    images, labels = (torch.stack(part) for part in zip(*train.held_out(), strict=True))
    # After 30 steps it is better than chance.
    assert float(train.accuracy(model(images), labels)) > 0.3
    inside: dict[str, object] = {"model": model}
    *_, same = [block for block in code_blocks(PAGE, "python") if "from train import" in block]
    exec(same.replace("steps=300", "steps=20").replace("evaluate_every=50", "evaluate_every=10"), inside)
    monkeypatch.delitem(sys.modules, "train")
