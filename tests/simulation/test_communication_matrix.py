"""Bytes between devices against cases computed by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from distir_relax.compiler.simulate import simulate
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import DTensorType, Function, Input, Module, Op, Output, PerRank, Value, inline, parse
from distir_relax.layout import Cut, DeviceMesh, Partial, Placement, R, Shard, print_placements  # fmt: skip
from distir_relax.layout.partition import balanced
from distir_relax.lowering import ToDistIR
from distir_relax.lowering.program_builder import ProgramBuilder
from distir_relax.sharding import bytes_sent
from distir_relax.simulation.communication_matrix import bytes_between, traffic_by_kind
from tests.simulation.schedules import schedule

PIPELINE = Path(__file__).parents[2] / "examples" / "paper" / "pipeline.distir"


def matrix(module: Module) -> np.ndarray:
    count = module.meshes[0].size
    return bytes_between(module).between(np.arange(count))


def program(shape: tuple[object, ...], communication: str, n: int = 3, **attrs: object) -> Module:
    """A communication of float32 tensors of local `shape` along an axis of `n` devices."""
    built = ProgramBuilder(DeviceMesh((n,), ("x",)))
    main = built.function("main")
    main.output("y", main.emit(communication, main.input("v", shape, "float32", tuple(range(n))), axis="x", **attrs))
    return built.build()


def ring(*sent: float) -> np.ndarray:
    found = np.zeros((len(sent), len(sent)))
    for i, amount in enumerate(sent):
        found[i, (i + 1) % len(sent)] = amount
    return found


def test_a_ring_all_reduce_sends_each_byte_twice_but_for_one_part() -> None:
    # 7 x 3 floats on 3 devices: 84 bytes, of which each sends 2 * 84 * 2 / 3.
    np.testing.assert_allclose(matrix(program((7, 3), "all_reduce", op="sum")), ring(112, 112, 112))


def test_an_all_gather_sends_all_shards_but_the_receivers() -> None:
    # Shards of 20, 12 and 0 bytes; device 0 passes on its own and the last one's, which is empty.
    found = matrix(program((PerRank((5, 3, 0)),), "all_gather", dim=0, sizes=(5, 3, 0)))
    np.testing.assert_allclose(found, ring(20, 32, 12))


def test_a_reduce_scatter_sends_all_pieces_but_the_senders() -> None:
    found = matrix(program((8,), "reduce_scatter", dim=0, sizes=(5, 3, 0), size=PerRank((5, 3, 0)), op="sum"))
    np.testing.assert_allclose(found, ring(12, 20, 32))


def test_an_all_to_all_sends_each_its_piece() -> None:
    # Columns of 7 become rows of 5: device i holds 5 x (3|2|2) and gives (2|2|1) of its rows to each.
    held, kept = (3, 2, 2), (2, 2, 1)
    found = matrix(
        program(
            (5, PerRank(held)), "all_to_all", split_dim=0, split_sizes=kept, concat_dim=1, concat_sizes=held,
            size=PerRank(kept),
        )
    )  # fmt: skip
    wanted = np.array([[4.0 * a * b if i != j else 0 for j, b in enumerate(kept)] for i, a in enumerate(held)])
    np.testing.assert_allclose(found, wanted)


def test_a_resplit_sends_what_changes_hands() -> None:
    # 7 elements cut 4|2|1 become 2|2|3: 0 gives two to 1, 1 gives its two to 2.
    pieces = ((2, 2, 0), (0, 0, 2), (0, 0, 1))
    found = matrix(program((PerRank((4, 2, 1)),), "resplit", dim=0, pieces=pieces, size=PerRank((2, 2, 3))))
    np.testing.assert_allclose(found, [[0, 8, 0], [0, 0, 8], [0, 0, 0]])


def test_sends_count_once_for_each_call_and_each_device() -> None:
    # Two microbatches of 35 x 63 doubles go forward and two come back.
    module = infer_types(parse(PIPELINE.read_text()))
    np.testing.assert_allclose(matrix(module), [[0, 2 * 35 * 63 * 8], [2 * 35 * 63 * 8, 0]])


def test_a_function_that_is_called_on_other_devices_sends_there() -> None:
    built = ProgramBuilder(DeviceMesh((2, 2), ("stage", "tensor")))
    inner, outer = built.function("inner"), built.function("outer")
    inner.output("y", inner.emit("all_reduce", inner.input("x", (3,), "float32", (0, 1)), axis="tensor", op="sum"))
    x = outer.input("x", (3,), "float32", (0, 1))
    (y,) = outer.call(inner, *outer.call(inner, x, devices=(0, 1)), devices=(0, 1))
    outer.output("y", y)
    main = built.function("main")
    for stage in (0, 1):
        devices = (2 * stage, 2 * stage + 1)
        value = main.input(f"x{stage}", (3,), "float32", devices)
        for _ in range(2 + stage):
            (value,) = main.call(outer, value, devices=devices)
        main.output(f"y{stage}", value)
    found = matrix(built.build())
    # 12 bytes on 2 devices: 12 each way, twice a call of `outer`, which stage 0 calls twice and stage 1 three times.
    wanted = np.zeros((4, 4))
    wanted[0, 1] = wanted[1, 0] = 12 * 4
    wanted[2, 3] = wanted[3, 2] = 12 * 6
    np.testing.assert_allclose(found, wanted)


def test_blocks_keep_the_sum() -> None:
    found = bytes_between(
        simulate("benchmarks/paper/models.py:mlp_1b", profile="dgx2-v100", strategy="2/2/3/5", global_batch=30).module
    )
    blocks = found.between(np.arange(12) // 5)
    assert blocks.shape == (3, 3)
    assert blocks.sum() == pytest.approx(found.bytes.sum())
    assert blocks[0, 0] > 0


@pytest.mark.parametrize("mesh", [DeviceMesh((3,), ("a",)), DeviceMesh((2, 3), ("a", "b"))], ids=["3", "2x3"])
def test_redistributions_send_what_their_plans_say(mesh: DeviceMesh) -> None:
    # 6 x 12 x 18 splits evenly along either axis and both, so that the planner's bytes of a device hold for each.
    shape, count = (6, 12, 18), len(mesh.shape)
    one_axis: list[Placement] = [R, Partial("sum"), *(Shard(dim, Cut.of(1)) for dim in range(3))]
    layouts = [p for p in itertools.product(one_axis, repeat=count) if len({*map(str, p)}) == count or R in p]
    for source, target in itertools.product(layouts, layouts):
        if any(isinstance(p, Partial) for p in target):
            continue
        have, want = (
            DTensorType(shape, "float32", tuple(cut(p, n) for p, n in zip(row, mesh.shape, strict=True)))
            for row in (source, target)
        )
        x, y = Value("x", have), Value("y", want)
        op = Op("redistribute", (x,), (y,), {"placements": want.placements})
        function = Function("main", (Input(x),), (op,), (Output("y", y),))
        module = ToDistIR().run(Module("sharded", (function,), (mesh,)))
        assert bytes_between(module).bytes.sum() == pytest.approx(mesh.size * bytes_sent(have, want, mesh)), (
            f"{print_placements(have.placements)} to {print_placements(want.placements)}"
        )


def cut(placement: Placement, ranks: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    return Shard(placement.dim, Cut.of(*balanced((6, 12, 18)[placement.dim], ranks)))


@pytest.mark.parametrize("seed", range(6))
def test_bytes_by_kind_are_those_between_devices(seed: int) -> None:
    module = schedule(seed)
    rows = traffic_by_kind(module)
    assert sum(row.bytes or 0.0 for row in rows) == pytest.approx(bytes_between(module).bytes.sum())
    counts = Counter((op.name, op.attrs.get("axis", "")) for op in inline(module).main.ops)
    assert {(row.name, row.axis): row.times for row in rows} == {
        key: count for key, count in counts.items() if key[0] in ("send", "all_reduce")
    }
