"""Propagation: what annotations reach, where splits fall, what is refused."""

from __future__ import annotations

import pytest

from distir_relax.errors import AnnotationError, DistIRError, PlacementError
from distir_relax.ir import DTensorType, Gather, Module, Reason, TensorType, Value, verify
from distir_relax.layout import DeviceMesh
from distir_relax.layout.placement import parse_placements
from distir_relax.ops import Builder, check
from distir_relax.sharding import Propagate
from tests.rfc import rfc_module


def mesh(*shape: int) -> DeviceMesh:
    return DeviceMesh(shape, ("tp",) if len(shape) == 1 else ("dp", "tp", "pp")[: len(shape)])


def propagate(module: Module, *shape: int) -> Module:
    found = Propagate(mesh(*shape)).run(module)
    verify(found, check)
    return found


def layouts(module: Module) -> dict[str, str]:
    """The placements of every value, by name."""
    main = module.main
    values = [i.value for i in main.inputs] + [v for op in main.ops for v in op.results]
    return {v.name: ", ".join(map(str, v.type.placements)) for v in values if isinstance(v.type, DTensorType)}


def attention_block(heads: int, width: int, placement: str = "S[1]") -> tuple[Builder, Value]:
    """GPT-2's attention over 5 tokens, its fused weight laid out as `placement`; its result is returned."""
    g = Builder()
    dim = heads * width
    x = g.input("x", TensorType((1, 5, dim), "float32"))
    w = g.input("w", TensorType((dim, 3 * dim), "float32"), "parameter")
    marked = g.emit("annotate_sharding", w, placements=placement)
    qkv = g.emit("matmul", x, marked)
    parts = g.emit("split", qkv, sizes=(dim,) * 3, axis=2)
    heads_of = [
        g.emit("permute_dims", g.emit("reshape", p, shape=(1, 5, heads, width)), axes=(0, 2, 1, 3)) for p in parts
    ]
    attrs = {"scale": 0.5, "causal": True, "masked": False, "boolean": False, "dtype": "float32"}
    y = g.emit("nn.scaled_dot_product_attention", *heads_of, **attrs)
    y = g.emit("reshape", g.emit("permute_dims", y, axes=(0, 2, 1, 3)), shape=(1, 5, dim))
    return g, g.emit("matmul", y, g.input("o", TensorType((dim, dim), "float32"), "parameter"))


def test_rfc_example() -> None:
    found = layouts(propagate(rfc_module(), 2))
    assert found["A"] == "S[1: 64|63]"
    assert found["B"] == "S[0: 64|63]"
    assert found["Y"] == "S[1: 64|63]"
    assert found["Z.partial"] == "I[sum]"
    assert found["Z"] == "R"
    assert found["C"] == "R"


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, (832, 768)), (3, (576, 512, 512)), (5, (320,) * 5), (7, (256, 256, 256, 256, 192, 192, 192))],
)
def test_fused_qkv_is_cut_by_heads(ranks: int, sizes: tuple[int, ...]) -> None:
    """gpt2-xl has 25 heads of 64, so 1600 columns are never cut 800 | 800; a rank has three stretches of the weight."""
    builder, y = attention_block(25, 64)
    found = layouts(propagate(Module("global", (builder.function("main", [("y", y)]),)), ranks))
    text = "|".join(map(str, sizes))
    assert found["w"] == f"S[1: 3*({text})]"
    assert found["o"] == f"S[0: {text}]"
    assert found["matmul_1.partial"] == "I[sum]"


def test_user_sizes_and_chunks() -> None:
    assert layouts(propagate(rfc_module(66, "S[1: 64|2]"), 2))["B"] == "S[0: 64|2]"
    assert layouts(propagate(rfc_module(7, "S[1: chunk]"), 5))["B"] == "S[0: 2|2|2|1|0]"
    assert layouts(propagate(rfc_module(7, "S[1]"), 5))["B"] == "S[0: 2|2|1|1|1]"
    assert layouts(propagate(rfc_module(2, "S[1]"), 5))["B"] == "S[0: 1|1|0|0|0]"
    assert layouts(propagate(rfc_module(127, "S[1: /32]"), 3))["B"] == "S[0: 64|32|31]"
    assert layouts(propagate(rfc_module(127, "S[1: 3:1/32]"), 2))["B"] == "S[0: 96|31]"


@pytest.mark.parametrize(("multiple", "sizes"), [(4, "12|12|3|0"), (6, "12|6|6|3"), (8, "24|3|0|0")])
def test_multiples_of_elements_keep_heads_whole(multiple: int, sizes: str) -> None:
    """9 heads of 3 elements on 4 ranks."""
    builder, y = attention_block(9, 3)
    annotation = builder.ops[0]
    builder.ops[0] = type(annotation)(
        annotation.name,
        annotation.operands,
        annotation.results,
        {"placements": parse_placements(f"S[1: /{multiple}]")},
        "model.py:3",
    )
    found = layouts(propagate(Module("global", (builder.function("main", [("y", y)]),)), 4))
    assert found["o"] == f"S[0: {sizes}]"


def test_sizes_that_tear_a_head_apart() -> None:
    builder, y = attention_block(3, 4)
    annotation = builder.ops[0]
    builder.ops[0] = type(annotation)(
        annotation.name,
        annotation.operands,
        annotation.results,
        {"placements": parse_placements("S[1: 15|21]")},
        "model.py:3",
    )
    with pytest.raises(PlacementError, match=r"model.py:3.*units of 12 elements"):
        propagate(Module("global", (builder.function("main", [("y", y)]),)), 2)


def test_two_mesh_axes() -> None:
    found = layouts(propagate(rfc_module(127, "R, S[1]"), 3, 2))
    assert found["A"] == "R, S[1: 64|63]"
    g = Builder()
    x = g.input("x", TensorType((7, 6), "float32"))
    x = g.emit("annotate_sharding", x, placements="S[0], R")
    w = g.emit("annotate_sharding", g.input("w", TensorType((6, 9), "float32"), "parameter"), placements="R, S[1]")
    y = g.emit("nn.relu", g.emit("matmul", x, w))
    found = layouts(propagate(Module("global", (g.function("main", [("y", y)]),)), 3, 2))
    assert found[y.name] == "S[0: 3|2|2], S[1: 5|4]"


@pytest.mark.parametrize(
    ("placement", "shape", "weight"),
    [
        ("S[1], S[1]", (2, 3), "S[1: 4|3], S[1: 2|1|1 + 1|1|1]"),
        ("S[1: chunk], S[1: chunk]", (2, 3), "S[1: 4|3], S[1: 2|2|0 + 1|1|1]"),
        ("S[1: 5|2], S[1]", (2, 3), "S[1: 5|2], S[1: 2|2|1 + 1|1|0]"),
        ("S[1], S[1: 3|0|1 + 0|0|3]", (2, 3), "S[1: 4|3], S[1: 3|0|1 + 0|0|3]"),
        ("S[1], S[1: 4|0|3]", (2, 3), "S[1: 2|2 + 2|1], S[1: 4|0|3]"),
        ("S[1: 0|7], S[1: 5|2]", (2, 2), "S[1: 0|7], S[1: 5|2]"),
        ("S[1], R, S[1]", (2, 3, 2), "S[1: 4|3], R, S[1: 2|2 + 2|1]"),
        ("S[1], S[1], S[1]", (2, 2, 2), "S[1: 4|3], S[1: 2|2 + 2|1], S[1: 3*(1|1) + 1|0]"),
    ],
)
def test_one_dim_along_several_axes(placement: str, shape: tuple[int, ...], weight: str) -> None:
    """The cut along one axis divides what those before leave, the user's sizes first; the sum is pending along all."""
    found = layouts(propagate(rfc_module(7, placement), *shape))
    assert found["A"] == found["Y"] == weight
    assert found["B"] == weight.replace("S[1", "S[0")
    assert found["Z.partial"] == ", ".join("R" if p == "R" else "I[sum]" for p in placement.split(", "))
    assert found["Z"] == ", ".join("R" for _ in shape)


def test_heads_along_two_axes() -> None:
    """25 heads on 2x3 devices are 5|4|4 and 4|4|4, in each of the three parts of the fused weight."""
    builder, y = attention_block(25, 64, "S[1], S[1]")
    found = layouts(propagate(Module("global", (builder.function("main", [("y", y)]),)), 2, 3))
    inner = "320|256|256 + 256|256|256"
    assert found["o"] == f"S[0: 832|768], S[0: {inner}]"
    assert found["w"] == f"S[1: 3*(832|768)], S[1: {inner} + {inner} + {inner}]"
    assert found["scaled_dot_product_attention"] == "S[1: 13|12], S[1: 5|4|4 + 4|4|4]"
    assert found["matmul_1.partial"] == "I[sum], I[sum]"


@pytest.mark.parametrize("inner", ["45|30|0 + 15|15|0", "15|10|0 + 5|5|0 + 15|10|0 + 5|5|0 + 15|10|0 + 5|5|0"])
def test_sizes_of_a_fused_weight(inner: str) -> None:
    """Sizes are those of the whole dim, as if its three stretches were one, or stretch by stretch."""
    outer = "75|30" if inner.startswith("45") else "3*(25|10)"
    builder, y = attention_block(7, 5, f"S[1: {outer}], S[1: {inner}]")
    found = layouts(propagate(Module("global", (builder.function("main", [("y", y)]),)), 2, 3))
    assert found["o"] == "S[0: 25|10], S[0: 15|10|0 + 5|5|0]"
    assert found["scaled_dot_product_attention"] == "S[1: 5|2], S[1: 3|2|0 + 1|1|0]"


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("S[1: 4|3], S[1: 3|2|2]", r"(?s)S\[1: 3\|2\|2\] do not divide .*list the sizes .*S\[1: 2\|1\|1 \+ 1\|1\|1\]"),
        ("S[1: 4|3], S[1: 2|2|1 + 1|1|1]", "add up to 8, but dim 1 .* has 7"),
        ("S[1: 4|3], S[1: 2|2 + 2|1]", "2 sizes, but the mesh axis has 3 devices"),
    ],
)
def test_sizes_along_two_axes_that_do_not_fit(placement: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Propagate(mesh(2, 3)).run(rfc_module(7, placement))


def test_annotations_along_unlike_axes_meet() -> None:
    """A value that one annotation splits along one axis and another along the other is split along both."""
    g = Builder()
    x = g.emit("annotate_sharding", g.input("x", TensorType((7, 4), "float32")), placements="S[0], R")
    y = g.emit("nn.relu", x)
    z = g.emit("annotate_sharding", g.emit("tanh", y), placements="R, S[0]")
    found = layouts(propagate(Module("global", (g.function("main", [("z", z)]),)), 2, 3))
    assert found["x"] == "S[0: 4|3], R"
    assert found[y.name] == "S[0: 4|3], S[0: 2|1|1 + 1|1|1]"
    assert found[z.name] == "R, S[0: 2|1|1 + 1|1|1]"


def test_sizes_of_two_annotations_that_cross_are_not_put_together() -> None:
    g = Builder()
    x = g.emit("annotate_sharding", g.input("x", TensorType((7, 4), "float32")), placements="S[0: 5|2], R")
    y = g.emit("annotate_sharding", g.input("y", TensorType((7, 4), "float32")), placements="R, S[0: 3|2|2]")
    z = g.emit("add", g.emit("add", x, y), g.input("w", TensorType((7, 4), "float32"), "parameter"))
    found = layouts(propagate(Module("global", (g.function("main", [("z", z)]),)), 2, 3))
    assert found["w"] == found[z.name] == "S[0: 5|2], R"


def test_a_look_up_along_two_axes() -> None:
    """Each device holds one block of the table, so its part of the look-up is a term along both axes."""
    g = Builder()
    table = g.emit("annotate_sharding", g.input("t", TensorType((7, 4), "float32")), placements="S[0], S[0]")
    y = g.emit("take", table, g.input("ids", TensorType((5,), "int64")), axis=0)
    found = layouts(propagate(Module("global", (g.function("main", [("y", y)]),)), 2, 3))
    assert found[f"{y.name}.partial"] == "I[sum], I[sum]"


def test_a_window_along_two_axes() -> None:
    g = Builder()
    x = g.emit("annotate_sharding", g.input("x", TensorType((1, 1, 11), "float32")), placements="S[2], S[2]")
    attrs = {"strides": (1,), "padding": (1, 1), "dilation": (1,), "groups": 1}
    y = g.emit("nn.conv1d", x, g.input("w", TensorType((1, 1, 3), "float32"), "parameter"), **attrs)
    found = propagate(Module("global", (g.function("main", [("y", y)]),)), 2, 3)
    assert layouts(found)[y.name] == layouts(found)["x"] == "S[2: 6|5], S[2: 2|2|2 + 2|2|1]"
    assert [op.name for op in found.main.ops] == ["nn.conv1d"]


def test_reasons_name_the_annotation_and_the_op() -> None:
    reasons = {record.value: record for record in propagate(rfc_module(), 2).records}
    assert reasons["A"] == Reason("A", 0, "rfc.py:12")
    assert reasons["B"] == Reason("B", 0, "rfc.py:12", "matmul", "k", "Y")
    assert str(reasons["B"]) == "from the annotation at rfc.py:12, through matmul k of %Y"


def test_a_gather_nobody_asked_for_is_noted() -> None:
    g = Builder()
    x = g.emit("annotate_sharding", g.input("x", TensorType((4, 6), "float32")), placements="S[1]")
    g.location = "model.py:8"
    y = g.emit("flip", x, axis=1)
    found = propagate(Module("global", (g.function("main", [("y", y)]),)), 2)
    (gather,) = (record for record in found.records if isinstance(record, Gather))
    assert gather.bytes == 96
    assert str(gather).startswith("model.py:8: %x (S[1: 3|3]) is gathered, 96 bytes, because flip")


@pytest.mark.parametrize(
    ("placement", "error", "message"),
    [
        ("S[7]", PlacementError, r"S\[7\] names dim 7, .*dims 0 to 1"),
        ("S[1: 64|64]", PlacementError, "add up to 128, but dim 1 .* has 127"),
        ("S[1: 64|60|3]", PlacementError, "3 sizes, but the mesh axis has 2 devices"),
        ("S[0], S[1]", PlacementError, "one placement for each of the 1 mesh axes"),
        ("Q", PlacementError, "is not a placement"),
    ],
)
def test_illegal_placements(placement: str, error: type[DistIRError], message: str) -> None:
    with pytest.raises(error, match=message):
        Propagate(mesh(2)).run(rfc_module(127, placement))


def test_a_tensor_is_stored_one_way() -> None:
    g = Builder()
    w = g.input("w", TensorType((4, 6), "float32"), "parameter")
    g.location = "model.py:3"
    a = g.emit("annotate_sharding", w, placements="S[0]")
    g.location = "model.py:9"
    b = g.emit("annotate_sharding", w, placements="S[1]")
    y = g.emit("add", a, b)
    with pytest.raises(AnnotationError, match=r"model.py:9: .*'S\[0\]' at model.py:3 and 'S\[1\]' here"):
        propagate(Module("global", (g.function("main", [("y", y)]),)), 2)


def test_an_annotation_in_the_middle_redistributes() -> None:
    g = Builder()
    x = g.emit("annotate_sharding", g.input("x", TensorType((4, 6), "float32")), placements="S[0]")
    y = g.emit("annotate_sharding", g.emit("nn.relu", x), placements="S[1]")
    found = propagate(Module("global", (g.function("main", [("y", y)]),)), 2)
    assert [op.name for op in found.main.ops] == ["nn.relu", "redistribute"]
    assert not any(isinstance(record, Gather) for record in found.records)
    assert layouts(found)[y.name] == "S[1: 3|3]"


def test_a_table_cut_in_stretches_is_not_looked_up_in_part() -> None:
    """Rows cut ``2*(2|1)`` have no one first row per device, so the table is gathered for the look-up."""
    g = Builder()
    table = g.emit("annotate_sharding", g.input("t", TensorType((6, 4), "float32")), placements="S[0]")
    y = g.emit("take", table, g.input("ids", TensorType((5,), "int64")), axis=0)
    z = g.emit("split", table, sizes=(3, 3), axis=0)
    found = layouts(propagate(Module("global", (g.function("main", [("y", y), ("z", z[0])]),)), 2))
    assert found["t"] == "S[0: 2*(2|1)]"
    assert found["t.take"] == "R"
    assert found[y.name] == "R"


def test_no_mesh() -> None:
    with pytest.raises(AnnotationError, match="no annotation and no mesh"):
        Propagate().run(rfc_module())


def on_both_axes() -> Module:
    """12 samples over dp of 35 rows over tp, times weights of 210 x 210 and 210 x 7 whose columns lie over tp."""
    g = Builder()
    x = g.emit("annotate_sharding", g.input("x", TensorType((12, 35, 210), "float32")), placements="S[0], S[1]")
    sizes = {"w": 210, "v": 7}
    weights = [g.input(name, TensorType((210, n), "float32"), "parameter") for name, n in sizes.items()]
    marked = [g.emit("annotate_sharding", w, placements="R, S[1]") for w in weights]
    found = [g.emit("annotate_sharding", g.emit("matmul", x, w), placements="S[0], S[2]") for w in marked]
    return Module("global", (g.function("main", list(zip("ab", found, strict=True))),))


def test_what_lies_in_parts_along_another_axis_counts_by_its_part() -> None:
    """A device has 3 of 12 samples: to gather these is less than to gather the weight, all of them would be more."""
    moved = {
        op.operands[0].name: op.results[0].dtensor.placements
        for op in propagate(on_both_axes(), 4, 7).main.ops
        if op.name == "redistribute"
    }
    assert [str(p) for p in next(iter(moved.values()))] == ["S[0: 3|3|3|3]", "R"]


def test_what_was_brought_somewhere_for_another_op_costs_nothing() -> None:
    """The small weight would be gathered by itself; the rows are there for the large one."""
    ops = [op for op in propagate(on_both_axes(), 4, 7).main.ops if op.name == "redistribute"]
    assert len(ops) == 1
