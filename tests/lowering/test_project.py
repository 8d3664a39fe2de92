"""Ranked programs: which ranks share one, what each holds, which carry padding."""

from __future__ import annotations

import pytest

from distir_relax.ir import Module, PlacedType, TensorType, verify
from distir_relax.layout import DeviceMesh
from distir_relax.lowering import FuseLocal, Project
from distir_relax.ops import Builder, check
from tests.compiled import compiled
from tests.rfc import rfc_module


def lower(module: Module, ranks: int, tail: str = "ragged") -> tuple[Module, Module]:
    """The distributed stage, and the ranked one before ops are fused."""
    distributed = compiled(module, tail, DeviceMesh((ranks,), ("tp",)))["distributed"]
    ranked = Project().run(distributed)
    verify(ranked, check)
    return distributed, ranked


def columns(ranked: Module) -> list[int]:
    """The columns of `lv0` on each rank."""
    found = []
    for name in ranked.ranks:
        op = ranked.function(name).ops[[o.results[0].name for o in ranked.function(name).ops].index("lv0")]
        found.append(op.results[0].tensor.shape[1])
    return found


def test_the_tail_rank_has_its_own_shapes() -> None:
    _, ranked = lower(rfc_module(127), 2)
    assert columns(ranked) == [64, 63]
    assert ranked.ranks == ("main_0", "main_1")


def test_with_padding_only_the_tail_rank_pads() -> None:
    _, ranked = lower(rfc_module(127), 2, "pad")
    assert columns(ranked) == [64, 64]
    names = [[op.name for op in ranked.function(r).ops] for r in ranked.ranks]
    assert "pad_tail" not in names[0]
    assert names[1] == ["pad_tail", "pad_tail", *names[0]]


def test_the_rfcs_tail_of_two_columns() -> None:
    _, ranked = lower(rfc_module(66, "S[1: 64|2]"), 2)
    assert columns(ranked) == [64, 2]
    _, padded = lower(rfc_module(66, "S[1: 64|2]"), 2, "pad")
    assert columns(padded) == [64, 64]


@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_equal_ranks_share_one_program(tail: str) -> None:
    _, ranked = lower(rfc_module(128), 4, tail)
    assert len(ranked.functions) == 1
    assert ranked.ranks == ("main_0",) * 4


def test_unequal_ranks_share_where_they_can() -> None:
    _, ranked = lower(rfc_module(127), 5)
    assert columns(ranked) == [26, 26, 25, 25, 25]
    assert ranked.ranks == ("main_0", "main_0", "main_1", "main_1", "main_1")


def test_a_split_embedding_shares_its_program_too() -> None:
    g = Builder()
    table = g.emit("annotate_sharding", g.input("t", TensorType((12, 3), "float32"), "parameter"), placements="S[0]")
    y = g.emit("take", table, g.input("ids", TensorType((5,), "int64")), axis=0)
    _, ranked = lower(Module("global", (g.function("main", [("y", y)]),)), 4)
    assert len(ranked.functions) == 1


def test_the_schedule_does_not_grow_with_the_ranks() -> None:
    assert len(lower(rfc_module(1024), 2)[0].main.ops) == len(lower(rfc_module(1024), 256)[0].main.ops)
    distributed, _ = lower(rfc_module(127), 3)
    kind = next(op for op in distributed.main.ops if op.results[0].name == "lv0").results[0].type
    assert isinstance(kind, PlacedType)
    assert str(kind) == "f32[128,43|42|42] @ {0,1,2}"


def test_a_refilled_tail_is_neutral() -> None:
    """exp makes ones of a filling of zeros, so it is filled anew before the sum; sigmoid(0) is not 0 either."""
    g = Builder()
    x = g.emit("annotate_sharding", g.input("x", TensorType((4, 7), "float32")), placements="S[1]")
    y = g.emit("sum", g.emit("exp", x), axis=(1,), keepdims=False)
    _, ranked = lower(Module("global", (g.function("main", [("y", y)]),)), 3, "pad")
    assert [op.name for op in ranked.function(ranked.ranks[0]).ops] == ["exp", "sum", "all_reduce"]
    tail = [op.name for op in ranked.function(ranked.ranks[2]).ops]
    assert tail == ["pad_tail", "exp", "trim_tail", "pad_tail", "sum", "all_reduce"]


def test_fusion_leaves_equal_ranks_equal_and_types_right() -> None:
    g = Builder()
    x = g.input("x", TensorType((5, 6), "float32"))
    w = g.emit("annotate_sharding", g.input("w", TensorType((8, 6), "float32"), "parameter"), placements="S[0]")
    h = g.emit("add", g.emit("linear", x, w), g.input("b", TensorType((8,), "float32"), "parameter"))
    cube = g.emit("multiply", g.emit("power", h, g.constant(3.0, "float32")), g.constant(0.044715, "float32"))
    inner = g.emit("multiply", g.emit("add", h, cube), g.constant(0.7978845608028654, "float32"))
    y = g.emit(
        "multiply",
        g.emit("multiply", h, g.constant(0.5, "float32")),
        g.emit("add", g.emit("tanh", inner), g.constant(1.0, "float32")),
    )
    _, ranked = lower(Module("global", (g.function("main", [("y", y)]),)), 4)
    fused = FuseLocal().run(ranked)
    verify(fused, check)
    assert [op.name for op in fused.functions[0].ops] == ["linear_bias", "nn.gelu_tanh"]
    assert len(fused.functions) == 1


def test_fusion_keeps_what_others_use() -> None:
    g = Builder()
    x, w = g.input("x", TensorType((5, 6), "float32")), g.input("w", TensorType((8, 6), "float32"), "parameter")
    w = g.emit("annotate_sharding", w, placements="R")
    h = g.emit("linear", x, w)
    y = g.emit("add", h, g.input("b", TensorType((8,), "float32"), "parameter"))
    module = Module("global", (g.function("main", [("y", y), ("h", h)]),))
    fused = FuseLocal().run(lower(module, 2)[1])
    assert [op.name for op in fused.functions[0].ops] == ["linear", "add"]
