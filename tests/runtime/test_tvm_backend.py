"""Programs on TVM's virtual machine: communication between ranks, uneven and empty shards, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import cut, example_input, expected_outputs, mlp_bundle

from distir_relax import ir
from distir_relax.bundle import (
    Bundle,
    Manifest,
    Program,
    Shard,
    Tensor,
    TensorWeights,
    read_bundle,
    write_bundle,
)
from distir_relax.errors import BundleError, RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.execute import run_bundle
from distir_relax.runtime.session import Session
from tests.runtime.processes import mpirun

pytest.importorskip("tvm")
pytestmark = pytest.mark.timeout(120)

SHARDS = ([2, 3], [3, 2, 4], [4, 0, 3], [5, 1, 0])


def mlp_program(sizes: Sequence[int], rank: int, rows: Sequence[int]) -> str:
    """`z = relu(x @ up) @ down` with the hidden dim cut as `sizes`; every collective takes part."""
    n, hidden, total, own = sizes[rank], sum(sizes), sum(rows), rows[rank]
    by_rows = f"sizes={tuple(rows)}, size={own}"
    turned = f"split_dim=0, split_sizes={tuple(rows)}, size={own}, concat_dim=1, concat_sizes={tuple(sizes)}"
    return f"""
  func @main_{rank}(
    input %x: f32[{total},6],
    parameter %up: f32[6,{n}],
    parameter %down: f32[5,{n}],
  ) {{
    %a: f32[{total},{n}] = matmul(%x, %up)
    %h: f32[{total},{n}] = nn.relu(%a)
    %p: f32[{total},5] = linear(%h, %down)
    %z: f32[{total},5] = all_reduce(%p) {{axis="tp", op="sum", step=3}}
    %part: f32[{own},5] = reduce_scatter(%p) {{axis="tp", dim=0, {by_rows}, op="sum", step=4}}
    %whole: f32[{total},5] = all_gather(%part) {{axis="tp", dim=0, sizes={tuple(rows)}, step=5}}
    %mine: f32[{own},5] = shard(%z) {{axis="tp", dim=0, {by_rows}}}
    %hidden: f32[{total},{hidden}] = all_gather(%h) {{axis="tp", dim=1, sizes={tuple(sizes)}, step=7}}
    %wide: f32[{own},{hidden}] = all_to_all(%h) {{axis="tp", {turned}, step=8}}
    %first: i64[] = shard_start() {{axis="tp", sizes={tuple(rows)}, dtype="int64"}}
    %ids: f32[] = astype(%first) {{dtype="float32"}}
    %start: f32[{own},5] = add(%mine, %ids)
    return "z": %z, "whole": %whole, "hidden": %hidden, "wide": %wide, "start": %start
  }}
"""


def tvm_bundle(sizes: Sequence[int], order: tuple[str, ...] = ("x", "up", "down")) -> Bundle:
    """The bundle of `mlp_program` on as many ranks as there are `sizes`; row cuts are uneven too."""
    ranks, hidden = len(sizes), sum(sizes)
    rows = [3 if i == 0 else 1 for i in range(ranks)]
    names = [f"main_{i}" for i in range(ranks)]
    module = ir.parse(
        f'module @ranked {{\n  mesh[0] = device_mesh(({ranks},), ("tp",))\n'
        f"  ranks = ({', '.join('@' + n for n in names)},)\n"
        + "".join(mlp_program(sizes, i, rows) for i in range(ranks)) + "}\n"
    )  # fmt: skip
    place = {name: i for i, name in enumerate(order)}
    functions = tuple(
        replace(f, inputs=tuple(sorted(f.inputs, key=lambda i: place[i.value.name]))) for f in module.functions
    )
    module = replace(module, functions=functions)
    ir.verify(module)
    generator = torch.Generator().manual_seed(1)
    weights = {"up": torch.randn(6, hidden, generator=generator), "down": torch.randn(5, hidden, generator=generator)}
    columns, split = Shard(0, 1, cut(hidden, sizes)), (Shard(0, 0, cut(sum(rows), rows)),)
    manifest = Manifest(
        name="mlp",
        mesh=DeviceMesh((ranks,), ("tp",)),
        tail="ragged",
        schedule_hash="0" * 64,
        programs=tuple(Program(name, arguments=order) for name in names),
        ranks=tuple(range(ranks)),
        inputs=(Tensor("x", "float32", (sum(rows), 6)),),
        outputs=(
            Tensor("z", "float32", (sum(rows), 5)),
            Tensor("whole", "float32", (sum(rows), 5)),
            Tensor("hidden", "float32", (sum(rows), hidden)),
            Tensor("wide", "float32", (sum(rows), hidden), "S[0]", split),
            Tensor("start", "float32", (sum(rows), 5), "S[0]", split),
        ),
        weights=(
            Tensor("up", "float32", (6, hidden), "S[1]", (columns,)),
            Tensor("down", "float32", (5, hidden), "S[1]", (columns,)),
        ),
    )
    texts = {"distir.txt": "schedule\n", "ranked.txt": ir.print_module(module)}
    return Bundle(manifest, {}, TensorWeights(weights), texts)


@pytest.mark.parametrize("sizes", SHARDS, ids=str)
def test_collectives_read_and_write_the_machines_buffers(sizes: list[int]) -> None:
    bundle = tvm_bundle(sizes)
    session = Session(bundle, "tvm")
    up, down = (bundle.weights.read(name, [[(0, n)], [(0, sum(sizes))]]) for name, n in (("up", 6), ("down", 5)))
    rows = bundle.manifest.inputs[0].shape[0]
    starts = torch.tensor([0.0] * 3 + [3.0 + i for i in range(rows - 3)])
    for seed in range(2):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
        h = torch.relu(x @ up)
        expected = {"z": h @ down.T, "whole": h @ down.T, "hidden": h, "wide": h, "start": h @ down.T + starts[:, None]}
        found = session({"x": x})
        assert list(found) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.parametrize("sizes", [[3, 2], [4, 0, 3]], ids=lambda sizes: "-".join(map(str, sizes)))
def test_the_same_under_mpirun(sizes: list[int], tmp_path: Path) -> None:
    bundle = tvm_bundle(sizes)
    x = torch.randn(bundle.manifest.inputs[0].shape, generator=torch.Generator().manual_seed(0))
    path = write_bundle(bundle, tmp_path / "m.dist")
    np.savez(tmp_path / "x.npz", x=x.numpy())
    files = ["--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz"]
    done = mpirun(len(sizes), "-m", "distir_relax", "run", path, "--backend", "tvm", *files)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "y.npz")
    for name, value in run_bundle(bundle, {"x": x}, backend="tvm").items():
        np.testing.assert_allclose(found[name], value.numpy(), atol=1e-6, rtol=1e-6)


def test_results_of_a_call_outlive_the_next_call() -> None:
    session = Session(tvm_bundle([2, 3]), "tvm")
    first = session({"x": torch.ones(4, 6)})
    kept = {name: value.clone() for name, value in first.items()}
    session({"x": -torch.ones(4, 6)})
    for name, value in kept.items():
        torch.testing.assert_close(first[name], value, atol=0, rtol=0)


def test_ranks_with_the_same_program_share_one_executable() -> None:
    from distir_relax.runtime.backends.tvm.compile import ProgramText, compile_program

    text = tvm_bundle([2, 3]).texts["ranked.txt"]
    first, second = (ProgramText("".join(list(text)), "main_0") for _ in range(2))
    assert compile_program(first) is compile_program(second)


def test_the_steps_are_named_for_the_watchdog() -> None:
    bundle = tvm_bundle([2, 3])
    from distir_relax.runtime.backends.tvm import load
    from distir_relax.runtime.transports.threads import ThreadWorld

    program = load(bundle, 1, ThreadWorld(bundle.manifest.mesh).communicator(1))
    assert program.steps[3] == '%z: f32[4,5] = all_reduce(%p) {axis="tp", op="sum", step=3}'
    assert sorted(program.steps) == [3, 4, 5, 7, 8]


def test_an_error_of_a_communication_arrives_as_it_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from distir_relax.runtime.transports.threads import ThreadCommunicator

    class Broken(Exception):
        pass

    def fail(self: ThreadCommunicator, *args: object, **kwargs: object) -> None:
        raise Broken("the network is gone")

    monkeypatch.setattr(ThreadCommunicator, "_reduce_scatter", fail)
    with pytest.raises(Broken, match="the network is gone"):
        run_bundle(tvm_bundle([2, 3]), {"x": torch.ones(4, 6)}, backend="tvm")


def test_any_bundle_runs_on_it(tmp_path: Path) -> None:
    bundle, x = mlp_bundle([3, 2]), example_input()
    found = run_bundle(read_bundle(write_bundle(bundle, tmp_path / "m.dist")), {"x": x}, backend="tvm")
    for name, value in expected_outputs(bundle, x).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)


def test_a_bundle_without_program_text_is_refused() -> None:
    bundle = tvm_bundle([2, 3])
    with pytest.raises(BundleError, match=r"the bundle holds no ranked\.txt"):
        run_bundle(replace(bundle, texts={}), {"x": torch.ones(4, 6)}, backend="tvm")


def test_inputs_may_stand_among_the_weights() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    expected = run_bundle(tvm_bundle([2, 3]), {"x": x}, backend="tvm")
    found = run_bundle(tvm_bundle([2, 3], order=("up", "down", "x")), {"x": x}, backend="tvm")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=0, rtol=0)


def test_other_devices_than_the_cpu_are_refused() -> None:
    from distir_relax.runtime.backends.tvm import load
    from distir_relax.runtime.transports.threads import ThreadWorld

    bundle = tvm_bundle([2, 3])
    with pytest.raises(RunError, match="runs on the CPU, found device 'cuda:0'"):
        load(bundle, 0, ThreadWorld(bundle.manifest.mesh).communicator(0), "cuda:0")
