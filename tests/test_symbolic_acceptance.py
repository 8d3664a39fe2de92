"""Every third model of the acceptance tests, in one of its layouts, at six sizes from one saved bundle.

``make shapes`` takes all models in all layouts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.symbolic_acceptance import SUBJECTS, check_layout

torch.set_num_threads(1)


LONG = {"resnet50 of any extent", "resnet of any extent", "convnext of any extent"}
DRAWN = [name for name in SUBJECTS if name not in LONG][::3]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("number", "name"), list(enumerate(DRAWN)))
def test_a_model_gives_what_torch_gives_at_six_sizes(number: int, name: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    layouts = ["import"] if "import" in subject.refused else list(subject.layouts)
    check_layout(subject, layouts[number % len(layouts)], tmp_path / "model.dist")
