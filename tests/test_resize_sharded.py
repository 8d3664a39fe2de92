"""Resizing as ONNX has it, on split pictures: devices send each other halos, nothing is gathered or summed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import distir_relax as dr
from distir_relax.ir import verify
from distir_relax.ops import Trait, check, lookup

SCALES = [1.0, 1.0, 0.6, 1.7]
FORMS: list[dict[str, Any]] = [
    {"mode": "linear", "antialias": 1},
    {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
    {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
    {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil"},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_it_gives_what_the_standard_gives(form: dict[str, Any]) -> None:
    shape = (1, 2, 11, 7)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], **form)
    scales = helper.make_tensor("scales", TensorProto.FLOAT, [4], SCALES)
    graph = helper.make_graph(
        [node],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 2, 6, 11))],
        [scales],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    names: set[str] = set()
    for layout in ("S[2]", "S[3]"):
        for ranks, tail in ((2, "ragged"), (3, "pad"), (5, "ragged")):
            plan = dr.compile(model, shardings={"x": layout}, mesh=dr.DeviceMesh((ranks,), ("rows",)), tail=tail)
            for module in plan.modules.values():
                verify(module, check)
            found = plan(torch.from_numpy(x))
            torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
            names |= {
                op.name for op in plan.modules["distributed"].main.ops if Trait.COMMUNICATES in lookup(op.name).traits
            }
    assert names == {"send"}
