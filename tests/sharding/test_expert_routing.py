"""Rows that go to the devices of their groups and come back: every layout of small mixtures against the whole."""

from __future__ import annotations

import itertools

import pytest
import torch

import distir_relax as dr
from distir_relax.autodiff import Differentiate
from distir_relax.errors import AnnotationError, PlacementError
from distir_relax.interpret import execute, interpret
from distir_relax.ir import Function, Module, Op, TensorType, Value, verify
from distir_relax.kernels import routing
from distir_relax.layout import parse_placements
from distir_relax.lowering import ToDistIR
from distir_relax.ops import Builder, check
from distir_relax.runtime.session import Session
from distir_relax.sharding import DelayReductions, Propagate
from distir_relax.simulation.communication_matrix import bytes_between

ROWS, GROUPS, WIDTH, HIDDEN = 11, 5, 3, 4
MESHES = [(2,), (3,), (7,), (2, 3)]


def mixture(x: str, first: str, second: str, groups: int = GROUPS, count: int = ROWS) -> Module:
    """Two products with row by row ops between and behind, from layouts of the rows and of both weights."""
    g = Builder()
    f64, i64 = "float64", "int64"
    rows = g.input("x", TensorType((count, WIDTH), f64))
    ids = g.input("ids", TensorType((count,), i64))
    w1 = g.input("w1", TensorType((groups, WIDTH, HIDDEN), f64), "parameter")
    w2 = g.input("w2", TensorType((groups, HIDDEN, WIDTH), f64), "parameter")
    rows, w1, w2 = (_marked(g, v, text) for v, text in ((rows, x), (w1, first), (w2, second)))
    numbers = g.emit("group_numbers", count=groups)
    sent = g.emit("dispatch_rows", rows, ids, numbers)
    hidden = g.emit("tanh", g.emit("routed_matmul", sent, w1, ids, numbers, count=groups))
    # Of the zeros in the rows of others the cosine makes ones.
    found = g.emit("cos", g.emit("routed_matmul", hidden, w2, ids, numbers, count=groups))
    back = g.emit("combine_rows", found, ids, numbers)
    return Module("global", (g.function("main", [("y", g.emit("multiply", back, rows))]),))


def _marked(g: Builder, value: Value, text: str) -> Value:
    marked = Value(g.fresh(f"{value.name}.marked"), value.type)
    g.ops.append(Op("annotate_sharding", (value,), (marked,), {"placements": parse_placements(text)}, "here"))
    return marked


def lowered(module: Module, mesh: tuple[int, ...], tail: str) -> tuple[Module, Module]:
    axes = dr.DeviceMesh(mesh, tuple(f"axis{i}" for i in range(len(mesh))))
    sharded = DelayReductions().run(Propagate(axes).run(module))
    placed = ToDistIR(tail).run(sharded)
    for found in (sharded, placed):
        verify(found, check)
    return sharded, placed


def data(ids: torch.Tensor, groups: int = GROUPS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (len(ids), WIDTH), "w1": (groups, WIDTH, HIDDEN), "w2": (groups, HIDDEN, WIDTH)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {**drawn, "ids": ids}


ROUTINGS = {
    "spread": torch.tensor([4, 0, 2, 2, 1, 0, 4, 4, 2, 0, 1]),  # none to group 3
    "one": torch.full((ROWS,), 2),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_layout_gives_what_the_whole_gives(mesh: tuple[int, ...], routing: str) -> None:
    """Rows whole, in parts, and split across; groups and hidden dims in parts or not: on each axis of the mesh."""
    given = data(ROUTINGS[routing])
    exchanges = 0
    one_axis = list(itertools.product(("R", "S[0]", "S[1]"), ("R", "S[0]", "S[2]")))
    chosen = list(itertools.product(one_axis, repeat=len(mesh)))
    for number, layouts in enumerate(chosen):
        x, first = (", ".join(axis[i] for axis in layouts) for i in range(2))
        second = first.replace("S[2]", "S[1]")
        try:
            module = mixture(x, first, second)
            sharded, placed = lowered(module, mesh, ("ragged", "pad")[number % 2])
        except PlacementError:  # two axes split one dim in ways that do not nest
            continue
        found = execute(sharded, placed, given)["y"]
        expected = interpret(module, given)["y"]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=f"{x}; {first}: {{}}".format)
        exchanges += any(op.name == "rows_to_groups" for op in placed.main.ops)
    assert exchanges >= (1 if len(mesh) == 1 else 5)


@pytest.mark.parametrize("mesh", [(3,), (7,), (2, 3)], ids=str)
def test_gradients_are_those_of_the_whole(mesh: tuple[int, ...]) -> None:
    """Rows in parts along every axis; groups along one of them, or all, the hidden dim along another."""
    more = (", R", ", S[0]", ", S[2]") if len(mesh) > 1 else ("",)
    given = data(ROUTINGS["spread"])
    for number, end in enumerate(more):
        layout = f"S[0]{end}"
        module = mixture(", ".join(["S[0]"] * len(mesh)), layout, layout.replace("S[2]", "S[1]"))
        g = Builder.of(module.main)
        loss = g.emit("sum", g.emit("square", module.main.outputs[0].value), axis=(0, 1), keepdims=False)
        module = Differentiate(wrt=("x", "w1", "w2")).run(Module("global", (g.function("main", [("loss", loss)]),)))
        expected = interpret(module, given)
        sharded, placed = lowered(module, mesh, ("ragged", "pad")[number % 2])
        found = execute(sharded, placed, given)
        for name, tensor in expected.items():
            where = f"{layout}, {name}: {{}}"
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10, msg=where.format)
        names = [op.name for op in placed.main.ops]
        assert names.count("rows_to_groups") == names.count("rows_from_groups") == 2


def test_rows_that_are_routed_evenly_send_what_is_expected() -> None:
    """The matrix of a simulation, and what ranks count: of 12 rows on 3 ranks each sends 2 of 3 to others."""
    module = mixture("S[0]", "S[0]", "S[0]", groups=6, count=36)
    _, placed = lowered(module, (3,), "ragged")
    matrix = bytes_between(placed)
    gathered, row = 2 * 12 * 8, WIDTH * 8
    assert matrix.between(range(3)).sum(1).tolist() == [gathered + 2 * 2 * 4 * row] * 3
    plan = dr.compile((module, data(torch.arange(36) % 6, 6)), mesh=3, check=True)
    session = Session(plan.bundle(("torch",)), "torch")
    session({"x": torch.ones(36, WIDTH, dtype=torch.float64), "ids": torch.arange(36) % 6})
    sent = [comm.traffic.bytes for comm in session.communicators]
    assert [(t["rows_to_groups"], t["rows_from_groups"]) for t in sent] == [(2 * 4 * row, 2 * 4 * row)] * 3
    assert [t["all_gather"] for t in sent] == [gathered] * 3


@pytest.mark.parametrize(("layout", "own"), [("S[0]", True), ("R", False)])
def test_ranks_keep_the_rows_of_their_groups_alone(layout: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come by an exchange; where all rows are on each rank already, they stay."""
    found: list[int] = []
    whole = routing.matmul

    def counted(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        found.append(x.shape[0])
        return whole(x, *others)

    monkeypatch.setattr(routing, "matmul", counted)
    given = data(ROUTINGS["spread"])
    weights = {name: given[name] for name in ("w1", "w2")}
    plan = dr.compile((mixture(layout, "S[0]", "S[0]"), weights), mesh=3, check=True)
    session = Session(plan.bundle(("torch",)), "torch")
    result = session({"x": given["x"], "ids": given["ids"]})["y"]
    rows = [3 + 2, 3, 3] if own else [ROWS] * 3  # of groups 0 and 1, 2 and 3, 4
    assert sorted(found) == sorted(2 * rows)
    torch.testing.assert_close(result, interpret(mixture("R", "R", "R"), given)["y"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["torch", "tvm"])
def test_both_backends_send_rows(backend: str) -> None:
    """TVM's kernels have fixed shapes: they work on zeros in the rows of others."""
    given = data(ROUTINGS["spread"])
    weights = {name: given[name] for name in ("w1", "w2")}
    plan = dr.compile((mixture("S[0]", "S[0]", "S[0]"), weights), mesh=3, check=True)
    assert any(op.name == "rows_to_groups" for op in plan.modules["distributed"].main.ops)
    found = Session(plan.bundle((backend,)), backend)({"x": given["x"], "ids": given["ids"]})["y"]
    torch.testing.assert_close(found, interpret(mixture("R", "R", "R"), given)["y"], rtol=1e-10, atol=1e-10)


def test_each_row_goes_there_and_back_once() -> None:
    """The row by row op between both products is done where the rows are."""
    _, placed = lowered(mixture("S[0]", "S[0]", "S[0]"), (3,), "ragged")
    names = [op.name for op in placed.main.ops if "axis" in op.attrs and op.name != "shard_start"]
    assert names == ["all_gather", "rows_to_groups", "rows_from_groups"]
    (gathered,) = (op for op in placed.main.ops if op.name == "all_gather")
    assert gathered.operands[0].placed.dtype == "int64"


def test_groups_are_cut_as_they_are_marked() -> None:
    """8 on 3 devices are 3, 3 and 2; or what the user says."""
    for mark, expected in (("S[0]", ((0, 3), (3, 6), (6, 8))), ("S[0: 1|6|1]", ((0, 1), (1, 7), (7, 8)))):
        module = mixture("S[0]", mark, mark, groups=8)
        sharded, placed = lowered(module, (3,), "ragged")
        (sent,) = (op for op in placed.main.ops if op.name == "rows_to_groups")
        assert sent.attrs["groups"] == expected
        given = data(torch.arange(ROWS) % 8, groups=8)
        torch.testing.assert_close(execute(sharded, placed, given)["y"], interpret(module, given)["y"])


def test_where_all_rows_are_on_each_device_results_are_summed_once() -> None:
    """Each device works on the rows of its groups: nothing is sent before, and one sum is made behind."""
    _, placed = lowered(mixture("R", "S[0]", "S[0]"), (3,), "ragged")
    assert [op.name for op in placed.main.ops if "axis" in op.attrs and op.name != "shard_start"] == ["all_reduce"]


def test_what_needs_all_rows_says_so() -> None:
    module = mixture("S[0]", "S[0]", "S[0]")
    (product,) = (op for op in module.main.ops if op.name == "tanh")
    summed = Op("cumsum", product.operands, product.results, {"axis": 0}, "model.py:7")
    ops = tuple(summed if op is product else op for op in module.main.ops)
    changed = Module("global", (Function("main", module.main.inputs, ops, module.main.outputs),))
    with pytest.raises(AnnotationError, match="cumsum needs all rows") as caught:
        lowered(changed, (3,), "ragged")
    assert caught.value.where == "model.py:7"
    assert "hidden dim" in caught.value.hint


def test_no_mark_asks_for_rows_at_their_experts() -> None:
    assert str(parse_placements("Routed[0], R")[0]) == "Routed[0]"
    with pytest.raises(PlacementError, match="an annotation cannot request Routed"):
        lowered(mixture("Routed[0]", "S[0]", "S[0]"), (3,), "ragged")
