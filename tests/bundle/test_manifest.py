"""The manifest: what it accepts, what each rank holds."""

from __future__ import annotations

import json
import time
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir_relax.bundle import (
    Manifest,
    Program,
    Shard,
    Tensor,
    TrainingManifest,
    local_bytes,
    local_intervals,
    local_shape,
)
from distir_relax.errors import BundleError, PlacementError
from distir_relax.layout import DeviceMesh
from distir_relax.support.learning_rate import SCHEDULES, Constant, Cosine, Schedule


def columns(*pieces: list[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(map(tuple, pieces))


def manifest() -> Manifest:
    split = Shard(0, 1, columns([(0, 2), (5, 6)], [], [(2, 5)]))
    return Manifest(
        name="m",
        mesh=DeviceMesh((3,), ("tp",)),
        tail="pad",
        schedule_hash="abc",
        programs=(Program("main_0", "programs/main_0.py", ("x", "start")), Program("main_1")),
        ranks=(0, 1, 0),
        inputs=(Tensor("x", "float32", (4, 6), "R"),),
        outputs=(Tensor("y", "bfloat16", (4, 6), "S[1]", (split,)),),
        weights=(Tensor("w", "float32", (4, 6), "S[1]", (split,)),),
        fast_math=True,
        checksums={"a": "b"},
    )


def test_json_round_trip() -> None:
    made = manifest()
    read = Manifest.from_json(json.loads(json.dumps(made.to_json())))
    assert read.to_json() == made.to_json()
    assert read == made
    assert read.program_of(1).name == "main_1"


def of_training(schedule: Schedule, loss: str = "loss", rate: str = "rate", seed: str | None = "seed") -> Manifest:
    """The manifest of a step of training."""
    made = manifest()
    numbers = (*(Tensor(name, "float32", ()) for name in ("rate", "rate.1")), Tensor("seed", "int64", ()))
    outputs = (*made.outputs, Tensor("loss", "float64", ()))
    training = TrainingManifest(loss, {rate: schedule, "rate.1": Constant(0.25)}, seed)
    return replace(made, inputs=(*made.inputs, *numbers), outputs=outputs, training=training)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_training_round_trip(kind: type[Schedule]) -> None:
    options = {"steps": 9, "every": 3, "at": (2, 5), "factor": 0.5, "warmup": 2, "period": 4, "decay": 3}
    names = [item.name for item in fields(kind) if item.name in options]  # type: ignore[arg-type]
    firsts: dict[str, Any] = {"rates": (0.5, 0.25, 0.125), "schedule": Cosine(0.5, 9)}
    first = firsts.get(fields(kind)[0].name, 0.5)  # type: ignore[arg-type]
    schedule = kind(first, **{name: options[name] for name in names})  # type: ignore[call-arg]
    made = of_training(schedule)
    read = Manifest.from_json(json.loads(json.dumps(made.to_json())))
    assert read == made
    assert read.training is not None
    assert [read.training.rates["rate"](step) for step in range(9)] == [schedule(step) for step in range(9)]


def test_training_is_checked() -> None:
    for wrong in ({"loss": "y"}, {"rate": "seed"}, {"seed": "rate"}, {"rate": "x"}):
        with pytest.raises(BundleError, match=r"as the .* of training, found"):
            of_training(Constant(0.5), **wrong)
    table = of_training(Cosine(0.5, 9)).to_json()
    for field, value, words in (
        ("kind", "Sawtooth", "expected one of ByEpoch, Constant, Cosine"),
        ("lr", "high", "expected a number for 'lr'"),
        ("lr", -1.0, "a learning rate of at least 0"),
        ("steps", 2.5, "a whole number"),
        ("warmup", 9, "more steps than there are of warm-up"),
    ):
        broken = json.loads(json.dumps(table))
        broken["training"]["rates"]["rate"][field] = value
        with pytest.raises(BundleError, match=words):
            Manifest.from_json(broken)


def test_what_a_rank_holds() -> None:
    made = manifest()
    tensor = made.outputs[0]
    assert [local_intervals(tensor, made.mesh, rank)[1] for rank in range(3)] == [[(0, 2), (5, 6)], [], [(2, 5)]]
    assert [local_shape(tensor, made.mesh, rank) for rank in range(3)] == [(4, 3), (4, 0), (4, 3)]
    assert [local_bytes(tensor, made.mesh, rank) for rank in range(3)] == [24, 0, 24]
    assert local_intervals(made.inputs[0], made.mesh, 2) == [[(0, 4)], [(0, 6)]]


def test_two_axes_on_one_dim_hold_the_intersection() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    outer = Shard(0, 0, columns([(0, 5)], [(5, 10)]))
    inner = Shard(1, 0, columns([(0, 3), (5, 8)], [(3, 5), (8, 10)]))
    tensor = Tensor("x", "int8", (10,), "", (outer, inner))
    held = [local_intervals(tensor, mesh, rank)[0] for rank in range(4)]
    assert held == [[(0, 3)], [(3, 5)], [(5, 8)], [(8, 10)]]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_ranks_are_numbered_row_by_row(shape: list[int]) -> None:
    mesh = DeviceMesh(tuple(shape), tuple(f"a{i}" for i in range(len(shape))))
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert places == sorted(set(places))
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    for axis, size in enumerate(shape):
        for rank in range(mesh.size):
            group = mesh.group(rank, axis)
            assert len(group) == size
            assert group[places[rank][axis]] == rank
            assert len({places[r][:axis] + places[r][axis + 1 :] for r in group}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": (0, 1)}, "3 ranks, but programs are given for 2"),
        ({"ranks": (0, 1, 2)}, "an index below 2"),
        ({"inputs": (Tensor("x", "float31", (4,)),)}, "unknown dtype 'float31'"),
        ({"inputs": (Tensor("x", "float32", (4,)),) * 2}, "duplicate names: x"),
        ({"inputs": (Tensor("x", "int8", (4,), "", (Shard(1, 0, ()),)),)}, "does not fit"),
        ({"inputs": (Tensor("x", "int8", (4,), "", (Shard(0, 1, ()),)),)}, "does not fit"),
        ({"inputs": (Tensor("x", "int8", (4,), "", (Shard(0, 0, columns([], [])),)),)}, "2 interval lists"),
        ({"inputs": (Tensor("x", "int8", (4,), "", (Shard(0, 0, columns([], [(2, 5)], [])),)),)}, r"\[2, 5\) leaves"),
        (
            {"outputs": (Tensor("y", "int8", (4,), "", (Shard(0, 0, columns([(0, 1)], [], [(2, 4)])),)),)},
            "no rank holds index 1 of dim 0",
        ),
    ],
)
def test_parts_that_do_not_fit(change: dict[str, object], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        replace(manifest(), **change)


@pytest.mark.parametrize(("shape", "axes"), [((), ()), ((2,), ("a", "b")), ((2, 2), ("a", "a")), ((0,), ("a",))])
def test_meshes_that_are_none(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    with pytest.raises(PlacementError, match="mesh"):
        DeviceMesh(shape, axes)
    plain = manifest().to_json()
    plain["mesh"] = {"shape": list(shape), "axes": list(axes)}
    with pytest.raises(BundleError, match="mesh"):
        Manifest.from_json(plain)


def test_json_of_another_version_or_kind() -> None:
    plain = manifest().to_json()
    with pytest.raises(BundleError, match="has format 9, this version reads format 11"):
        Manifest.from_json({**plain, "format": 9})
    with pytest.raises(BundleError, match="expected a table, found"):
        Manifest.from_json([])
    with pytest.raises(BundleError, match="the field 'mesh' is missing"):
        Manifest.from_json({key: value for key, value in plain.items() if key != "mesh"})
    with pytest.raises(BundleError, match=r"ranks\[0\]: expected a whole number of at least 0 .*, found '0'"):
        Manifest.from_json({**plain, "ranks": ["0", 1, 0]})
    with pytest.raises(BundleError, match="expected a list for 'inputs', found 3"):
        Manifest.from_json({**plain, "inputs": 3})


def test_twenty_thousand_outputs_are_checked_at_once() -> None:
    """Looking each name up among all others takes 6 s."""
    outputs = tuple(Tensor(f"output {i}", "float32", (4,)) for i in range(20_000))
    start = time.perf_counter()
    many = replace(manifest(), outputs=outputs)
    assert len(many.outputs) == 20_000
    assert time.perf_counter() - start < 2
    with pytest.raises(BundleError, match="duplicate names: output 7"):
        replace(manifest(), outputs=(*outputs, outputs[7]))
