"""ONNX's If, Loop and Scan: the standard's own cases, and loops whose steps become one function."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import distir_relax as dr
from distir_relax.errors import UnsupportedOpError
from distir_relax.frontends.onnx import control_flow
from distir_relax.frontends.onnx.control_flow import GRAPH_OPS
from distir_relax.frontends.onnx.importer import import_onnx
from distir_relax.frontends.torch.arguments import as_tensor
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import verify
from distir_relax.ops import check
from tests.frontends.onnx_cases import array, standard_cases

pytestmark = pytest.mark.xdist_group("cases of the ONNX standard")

# Sequences and optional values are no tensors; Scan of operator set 8 has a batch dim.
REFUSED = re.compile(r"test_sequence_map|_seq|_opt|test_scan_sum")


def op_types(graph: Any) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                yield from op_types(attribute.g)


@cache
def cases() -> list[Any]:
    found = [case for case in standard_cases() if case.model]
    return [c for c in found if set(op_types(c.model.graph)) & set(GRAPH_OPS) and not REFUSED.search(c.name)]


@pytest.mark.parametrize("op_type", sorted(GRAPH_OPS))
def test_it_means_what_the_standard_says(op_type: str) -> None:
    for case in cases():
        if op_type in op_types(case.model.graph):
            check_case(case)


def check_case(case: Any) -> None:
    """With as few inputs known at import as the course of the program needs: none, all but one, or all."""
    given, expected = case.data_sets[0]
    count = len(given)
    for runtime in (set(range(count)), {0}, {count - 1}, set()):
        model, feeds = onnx.ModelProto(), {}
        model.CopyFrom(case.model)
        for number, (item, data) in enumerate(zip(case.model.graph.input, map(array, given), strict=True)):
            if number in runtime:
                feeds[item.name] = data
            else:
                model.graph.initializer.append(numpy_helper.from_array(data, item.name))
        try:
            imported = import_onnx(model, {name: data.shape for name, data in feeds.items()})
        except UnsupportedOpError:
            assert runtime, case.name
            continue
        verify(imported.module, check)
        found = interpret(imported.module.main, {**imported.tensors, **imported.flatten((), feeds)})
        for item, wanted in zip(model.graph.output, expected, strict=True):
            target = as_tensor(array(wanted))
            tolerance = 2e-3 if target.dtype in (torch.float16, torch.bfloat16) else 1e-5
            torch.testing.assert_close(
                found[item.name], target, rtol=tolerance, atol=tolerance, msg=lambda text: f"{case.name}: {text}"
            )
        return


def test_many_cases_are_covered() -> None:
    ops = {op for case in cases() for op in op_types(case.model.graph)}
    assert ops >= set(GRAPH_OPS)
    assert len(cases()) > 20


def info(name: str, shape: tuple[int | str, ...] = (), kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


WIDTH, ROWS = 6, 7


def looped(trips: int | None, goes_on: str = "go_in", known: bool = True) -> onnx.ModelProto:
    """``h = tanh(h W + b) + x_t`` for each step `t`: a Loop that carries `h` and gives each step's."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", [goes_on], ["go_out"]),
            helper.make_node("MatMul", ["h_in", "W"], ["product"], "/cell/MatMul"),
            helper.make_node("Add", ["product", "b"], ["biased"], "/cell/Add"),
            helper.make_node("Tanh", ["biased"], ["bent"], "/cell/Tanh"),
            helper.make_node("Add", ["bent", "x"], ["h_out"], "/cell/Add_1"),
            helper.make_node("Identity", ["h_out"], ["row"]),
        ],
        "body",
        [info("t", (), TensorProto.INT64), info("go_in", (), TensorProto.BOOL), info("h_in", (ROWS, WIDTH))],
        [info("go_out", (), TensorProto.BOOL), info("h_out", (ROWS, WIDTH)), info("row", (ROWS, WIDTH))],
    )
    generator = np.random.default_rng(0)
    data = {
        "W": generator.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "b": generator.standard_normal(WIDTH).astype(np.float32),
        "yes": np.array(True),
    }
    inputs = [info("x", (ROWS, WIDTH)), info("h", (ROWS, WIDTH))]
    if trips is not None and known:
        data["trips"] = np.array(trips, np.int64)
    elif not known:
        inputs.append(info("trips", (), TensorProto.INT64))
    node = helper.make_node(
        "Loop", ["trips" if trips is not None else "", "yes", "h"], ["last", "rows"], "/Loop", body=body
    )
    graph = helper.make_graph(
        [node], "looped", inputs, [info("last", (ROWS, WIDTH)), info("rows", ("n", ROWS, WIDTH))],
        [numpy_helper.from_array(array, name) for name, array in data.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("layout", [{"x": "S[0]"}, {"W": "S[1]"}])
def test_steps_of_a_loop_are_one_function(layout: dict[str, str]) -> None:
    model, x, h = looped(5), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    plan = dr.compile(model, mesh=3, shardings=layout)
    weights = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    rows, state = [], h
    for _ in range(5):
        state = torch.tanh(state @ weights["W"] + weights["b"]) + x
        rows.append(state)
    found = plan(x=x, h=h)
    torch.testing.assert_close(found["last"], state)
    torch.testing.assert_close(found["rows"], torch.stack(rows))
    functions = [f for f in plan.modules["global"].functions if f is not plan.modules["global"].main]
    # The first step of a split one may be called otherwise than the rest; the source is one function.
    (function,) = functions
    assert [op.name for op in function.ops] == ["matmul", "add", "tanh", "add"]
    assert sum(op.callee == function.name for op in plan.modules["global"].main.ops) == 5


def test_a_loop_of_no_step() -> None:
    imported = import_onnx(looped(0))
    h = torch.randn(ROWS, WIDTH)
    unsaid = looped(0)
    unsaid.graph.node[0].attribute[0].g.output[2].type.tensor_type.shape.dim[0].dim_param = "n"
    with pytest.raises(UnsupportedOpError, match="leaves the type of 'row' open"):
        import_onnx(unsaid)
    found = interpret(imported.module.main, {**imported.tensors, "x": h, "h": h})
    torch.testing.assert_close(found["last"], h)
    assert found["rows"].shape == (0, ROWS, WIDTH)


def test_what_depends_on_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_flow, "MOST_STEPS", 70)
    for model, message in [
        (looped(3, known=False), "Loop.*the number of iterations depends on data"),
        (looped(None), "Loop.*more than 70 times"),
    ]:
        with pytest.raises(UnsupportedOpError, match=message) as caught:
            import_onnx(model)
        assert caught.value.where == "looped:/Loop"
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan_is_split_by_rows_and_by_columns(backwards: int) -> None:
    """A running sum over the middle dim, in both directions."""
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "v"], ["t"]), helper.make_node("Identity", ["t"], ["y"])],
        "body",
        [info("s", (ROWS, WIDTH)), info("v", (ROWS, WIDTH))],
        [info("t", (ROWS, WIDTH)), info("y", (ROWS, WIDTH))],
    )
    node = helper.make_node(
        "Scan", ["start", "x"], ["end", "sums"], "/Scan", body=body, num_scan_inputs=1, scan_input_axes=[1],
        scan_output_axes=[-2], scan_input_directions=[backwards], scan_output_directions=[backwards],
    )  # fmt: skip
    inputs = [info("start", (ROWS, WIDTH)), info("x", (ROWS, 4, WIDTH))]
    outputs = [info("end", (ROWS, WIDTH)), info("sums", (ROWS, 4, WIDTH))]
    model = helper.make_model(
        helper.make_graph([node], "scan", inputs, outputs), opset_imports=[helper.make_opsetid("", 17)]
    )
    start, x = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 4, WIDTH)
    ordered = x.flip(1) if backwards else x
    sums = start[:, None] + ordered.cumsum(1)
    for layout in ({"x": "S[0]"}, {"start": "S[1]"}, {"x": "S[1]"}):
        found = dr.compile(model, mesh=3, shardings=layout)(start=start, x=x)
        torch.testing.assert_close(found["end"], sums[:, -1])
        torch.testing.assert_close(found["sums"], sums.flip(1) if backwards else sums)
