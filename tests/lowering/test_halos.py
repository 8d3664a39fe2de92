"""Windows over split dims: what is fetched from whom, in which order, and a grid of cases against the whole op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distir_relax.errors import VerificationError
from distir_relax.interpret import execute, interpret
from distir_relax.ir import Module, TensorType, parse, print_module, verify
from distir_relax.kernels.sampling import Resizing
from distir_relax.layout import DeviceMesh
from distir_relax.lowering import Project, ToDistIR
from distir_relax.ops import Builder, StridedWindow, check, entries
from distir_relax.ops.spatial.resample import sampling_attrs
from distir_relax.report.rules import explain_rule
from distir_relax.sharding import Propagate
from tests.compiled import check_results, compiled
from tests.test_golden import compare
from tests.windows import MESHES, case, check_case

BLOCKS = 8
CASES = 1200


def tail_of(number: int) -> str:
    """What is done about uneven sizes in the case of that number."""
    return ("ragged", "pad")[number // BLOCKS % 2]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_ascii_chart(block: int) -> None:
    """Stride, dilation, asymmetric padding, groups, several split dims, several axes on one, empty shards.

    `make fuzz` checks 5,000 more.
    """
    for number in range(block, CASES, BLOCKS):
        check_case(number, tail_of(number))


def test_the_grid_has_every_op_with_windows_and_every_mesh() -> None:
    modules = [(case(number).module, tail_of(number)) for number in range(CASES)]
    drawn = {(op.name, tail) for module, tail in modules for op in module.main.ops if op.name != "annotate_sharding"}
    windowed = [entry.name for entry in entries() if entry.split.windowed is not None]
    assert drawn == {(name, tail) for name in windowed for tail in ("ragged", "pad")}
    assert {(module.meshes[0], tail) for module, tail in modules} == {
        (mesh, tail) for mesh in MESHES for tail in ("ragged", "pad")
    }


def sharded_conv(placement: str, ranks: int, rows: int = 5, kernel: int = 3) -> Module:
    """A convolution over `rows` rows, "same" padding, its input split as `placement`."""
    builder = Builder()
    x = builder.input("x", TensorType((1, 2, rows, 4), "float64"))
    w = builder.input("w", TensorType((3, 2, kernel, 1), "float64"), "parameter")
    builder.location = "conv.py:7"
    x = builder.emit("annotate_sharding", x, placements=placement)
    builder.location, builder.hint = "conv.py:8", "y"
    low = kernel // 2
    y = builder.emit("nn.conv2d", x, w, strides=(1, 1), padding=(low, 0, low, 0), dilation=(1, 1), groups=1)
    mesh = DeviceMesh((ranks,), ("rows",))
    return Propagate(mesh).run(Module("global", (builder.function("main", [("y", y)]),), (mesh,)))


def test_the_rfc_example() -> None:
    """Five rows on two ranks, 3|2: rank 1's halo comes from above, so it is joined in front of its own rows."""
    distributed = ToDistIR().run(sharded_conv("S[2]", 2))
    ranked = Project().run(distributed)
    for name, module in (("distributed", distributed), ("ranked", ranked)):
        verify(module, check)
        text = print_module(module)
        assert parse(text) == module
        compare(f"conv_{name}.txt", text)


def test_a_halo_over_several_neighbours() -> None:
    """A kernel of 7 over shards of one row: each rank fetches from up to three neighbours on either side."""
    sharded = sharded_conv("S[2]", 7, rows=7, kernel=7)
    distributed = ToDistIR().run(sharded)
    sends = [op for op in distributed.main.ops if op.name == "send"]
    pairs = {
        (a, b) for op in sends for a, b in zip(op.operands[0].placed.devices, op.results[0].placed.devices, strict=True)
    }
    assert pairs == {(a, b) for a in range(7) for b in range(7) if 0 < abs(a - b) <= 3}
    tensors = {"x": torch.randn(1, 2, 7, 4, dtype=torch.float64), "w": torch.randn(3, 2, 7, 1, dtype=torch.float64)}
    whole = torch.conv2d(tensors["x"], tensors["w"], padding=(3, 0))
    torch.testing.assert_close(execute(sharded, distributed, tensors)["y"], whole)


FORMULAS: list[tuple[str, dict[str, Any]]] = [
    ("image.resize2d", {"size": (7, 19), "method": "linear", "coordinate_transformation_mode": "half_pixel"}),
    ("image.resize2d", {"size": (17, 5), "method": "cubic", "coordinate_transformation_mode": "align_corners"}),
    ("nn.adaptive_avg_pool2d", {"output_size": (5, 7)}),
    ("nn.adaptive_max_pool2d", {"output_size": (4, 7)}),
    ("nn.adaptive_max_pool2d_places", {"output_size": (4, 7), "plane": (9, 1)}),
    (
        "nn.max_pool2d_places",
        {"pool_size": (3, 2), "strides": (2, 1), "padding": (1, 0, 1, 0), "dilation": (1, 2), "output_size": (6, 7),
         "plane": (1, 11)},
    ),
    ("resample", {"axis": 2, "size": 4, **sampling_attrs(Resizing("linear", "half_pixel", 0.4, antialias=True))}),
]  # fmt: skip


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize(("name", "attrs"), FORMULAS, ids=lambda value: value if isinstance(value, str) else "")
def test_windows_that_follow_a_formula_are_slices_and_sends(name: str, attrs: dict[str, Any], tail: str) -> None:
    """Rows, columns, both, along one mesh axis and two; uneven, empty, and shards smaller than what is needed."""
    shape, names = (1, 2, 11, 9), set()
    for mesh, placements in (
        ((2,), "S[2]"), ((3,), "S[3]"), ((5,), "S[2: 0|1|7|3|0]"), ((7,), "S[2: 2|1|1|1|4|1|1]"),
        ((2, 3), "S[2], S[3]"), ((2, 3), "S[2], S[2]"), ((3, 2), "S[3: 1|0|8], S[2: 10|1]"),
    ):  # fmt: skip
        builder = Builder()
        x = builder.emit("annotate_sharding", builder.input("x", TensorType(shape, "float64")), placements=placements)
        y = builder.emit(name, x, **attrs)
        grid = DeviceMesh(mesh, ("a", "b")[: len(mesh)])
        module = Module("global", (builder.function("main", [("y", y)]),), (grid,))
        stages = compiled(module, tail)
        names |= {op.name for op in stages["distributed"].main.ops}
        # Few values, so that there are several largest elements.
        tensors = {"x": torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).double()}
        check_results(stages, tensors)
    assert names - {name, "pad_tail", "trim_tail"} == {"send", "strided_slice", "concat"}


def test_a_part_must_hold_just_what_it_needs() -> None:
    builder = Builder()
    x = builder.input("x", TensorType((1, 2, 5), "float64"))
    with pytest.raises(VerificationError, match=r"elements 2 to 5 of dim 2 need \(3, 10\), found \(11, 3, 6, 2\)"):
        builder.emit("nn.adaptive_avg_pool1d", x, output_size=(3,), part=((11, 3, 6, 2),))


def test_the_number_of_sends_does_not_grow_with_the_ranks() -> None:
    counts = set()
    for ranks in (4, 16, 64):
        distributed = ToDistIR().run(sharded_conv("S[2]", ranks, rows=3 * ranks))
        counts.add(sum(op.name == "send" for op in distributed.main.ops))
    assert counts == {4}


def test_no_device_both_sends_and_receives_in_one_op() -> None:
    for ranks, rows, kernel in ((5, 11, 3), (6, 6, 5), (7, 9, 7)):
        for op in ToDistIR().run(sharded_conv("S[2]", ranks, rows, kernel)).main.ops:
            if op.name == "send":
                assert not set(op.operands[0].placed.devices) & set(op.results[0].placed.devices)


def test_distir_rules_explains_windows() -> None:
    attrs = {"strides": (2,), "padding": (0, 0), "dilation": (1,), "groups": 1}
    text = explain_rule("nn.conv1d", ["f32[2,3,9]", "f32[4,3,3]"], attrs)
    assert "window 0 (kernel 3, stride 2, dilation 1): dim 2 of operand 0, dim 2 of the result: may be split" in text


def test_aligned_windows_need_nothing() -> None:
    builder = Builder()
    x = builder.input("x", TensorType((1, 1, 12), "float64"))
    x = builder.emit("annotate_sharding", x, placements="S[2]")
    y = builder.emit("nn.max_pool1d", x, pool_size=(2,), strides=(2,), padding=(0, 0), dilation=(1,))
    mesh = DeviceMesh((3,), ("rows",))
    module = Module("global", (builder.function("main", [("y", y)]),), (mesh,))
    ops = ToDistIR().run(Propagate().run(module)).main.ops
    assert [op.name for op in ops] == ["nn.max_pool1d"]


def test_sizes_that_the_user_gave_are_kept_behind_a_window() -> None:
    """Twelve rows as 8|4 are six rows as 4|2 behind a stride of 2: the faster device stays the busier one."""
    builder = Builder()
    x = builder.input("x", TensorType((1, 1, 12), "float64"))
    w = builder.input("w", TensorType((1, 1, 3), "float64"), "parameter")
    x = builder.emit("annotate_sharding", x, placements="S[2: 8|4]")
    y = builder.emit("nn.conv1d", x, w, strides=(2,), padding=(1, 1), dilation=(1,), groups=1)
    mesh = DeviceMesh((2,), ("rows",))
    sharded = Propagate().run(Module("global", (builder.function("main", [("y", y)]),), (mesh,)))
    assert str(sharded.main.outputs[0].value.dtensor.placements[0]) == "S[2: 4|2]"


def test_a_gathered_window_is_exact_in_ranges_and_padding() -> None:
    """What `reads` and `part` say, against the definition, element by element."""
    for kind in ("gather", "scatter"):
        for size, kernel, stride, dilation, low, high in (
            (9, 3, 1, 1, 1, 1), (9, 3, 2, 2, 2, 0), (5, 1, 3, 1, 0, 2), (6, 4, 3, 1, 0, 1), (4, 2, 3, 2, 1, 0),
        ):  # fmt: skip
            window = StridedWindow(0, 0, 2, 2, size, kernel, stride, dilation, low, high, kind)
            for start in range(window.result_size + 1):
                for stop in range(start, window.result_size + 1):
                    first, last = window.reads(start, stop)
                    wanted = set()
                    for o in range(start, stop):
                        for j in range(kernel):
                            if kind == "gather":
                                wanted.add(o * stride - low + dilation * j)
                            elif (o + low - dilation * j) % stride == 0:
                                wanted.add((o + low - dilation * j) // stride)
                    assert all(first <= i < last for i in wanted if 0 <= i < size)
                    ends = window.part(start, stop)
                    assert window.sized(last - first, *ends) == stop - start


def test_operands_that_do_not_fit() -> None:
    builder = Builder()
    x = builder.input("x", TensorType((1, 2, 3), "float64"))
    w = builder.input("w", TensorType((1, 2, 5), "float64"))
    attrs = {"strides": (1,), "dilation": (1,), "groups": 1}
    with pytest.raises(VerificationError, match=r"kernel that covers 5 of a dim of 3 with padding 0, 0"):
        builder.emit("nn.conv1d", x, w, padding=(0, 0), **attrs)
    with pytest.raises(VerificationError, match="2 groups do not fit"):
        builder.emit("nn.conv1d", x, w, padding=(1, 1), **{**attrs, "groups": 2})


def test_splits_along_two_spatial_dims_fetch_the_corners() -> None:
    builder = Builder()
    x = builder.input("x", TensorType((1, 1, 5, 7), "float64"))
    w = builder.input("w", TensorType((1, 1, 3, 3), "float64"), "parameter")
    x = builder.emit("annotate_sharding", x, placements="S[2], S[3]")
    y = builder.emit("nn.conv2d", x, w, strides=(1, 1), padding=(1, 1, 1, 1), dilation=(1, 1), groups=1)
    mesh = DeviceMesh((2, 3), ("rows", "columns"))
    module = Module("global", (builder.function("main", [("y", y)]),), (mesh,))
    sharded = Propagate().run(module)
    assert [str(p) for p in sharded.main.outputs[0].value.dtensor.placements] == ["S[2: 3|2]", "S[3: 3|2|2]"]
    tensors = {"x": torch.randn(1, 1, 5, 7, dtype=torch.float64), "w": torch.randn(1, 1, 3, 3, dtype=torch.float64)}
    found = execute(sharded, ToDistIR().run(sharded), tensors)["y"]
    torch.testing.assert_close(found, interpret(module.main, tensors)["y"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("targets", ["{1}", "{0,2}", "{2,3,4}"])
def test_a_send_needs_a_device_of_its_own_at_each_end(targets: str) -> None:
    text = f"""
module @distributed {{
  mesh[0] = device_mesh((5,), ("rows",))
  func @main(input %x: f32[3] @ {{0,1}}) {{
    %y: f32[3] @ {targets} = send(%x)
    return "y": %x
  }}
}}
"""
    with pytest.raises(VerificationError, match="send goes from each device to one of as many others"):
        verify(parse(text), check)
