"""The first wrong value of a plan: right plans have none, an edited program's op is named with its rank and line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import distir_relax as dr
from tests.proof.test_projection import plan

X = {"input": torch.randn(6, 11, 12, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("name", ["tensor", "tensor, padded", "data", "pipeline"])
def test_a_right_plan_has_no_wrong_value(name: str) -> None:
    bundle = plan(name).bundle(("torch",))
    result = dr.bisect(bundle, {bundle.manifest.divided_inputs[0].name if bundle.manifest.divided_inputs else
                                bundle.manifest.inputs[0].name: X["input"]})  # fmt: skip
    assert result.is_right, result
    assert result.values > 20


def test_an_edited_op_is_named() -> None:
    bundle = plan("pipeline").bundle(("torch",))
    path = bundle.manifest.program_of(1).torch
    assert path is not None
    text = bundle.programs[path]
    assert "1.1920928955078125e-07" in text
    programs = {**bundle.programs, path: text.replace("1.1920928955078125e-07", "0.01", 1)}
    result = dr.bisect(replace(bundle, programs=programs), {bundle.manifest.divided_inputs[0].name: X["input"]})
    assert result.wrong is not None
    assert result.wrong.ranks == (1,)
    assert result.wrong.cause == "execution"
    assert "nn.rms_norm" in result.wrong.op
    assert result.wrong.location.startswith("blocks.1.norm, ")
