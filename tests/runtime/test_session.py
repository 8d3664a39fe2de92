"""Running bundles with ranks as threads: answers, repeated calls, errors, deadlocks."""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import (
    DEADLOCK,
    RAISES_ON_1,
    SUM_COLUMNS,
    WRONG_SHAPE,
    cut,
    example_input,
    expected_outputs,
    mlp_bundle,
)

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
from distir_relax.runtime.backends import find_backend, register_backend
from distir_relax.runtime.backends.torch import load
from distir_relax.runtime.execute import run_bundle
from distir_relax.runtime.session import Session

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("sizes", [[3], [3, 2], [4, 0, 3], [1, 2, 0, 4, 1], [1, 0, 2, 1, 3, 0, 1]], ids=str)
def test_answers_are_those_of_numpy(sizes: list[int], tmp_path: Path) -> None:
    bundle, x = mlp_bundle(sizes), example_input()
    expected = expected_outputs(bundle, x)
    for source in (bundle, read_bundle(write_bundle(bundle, tmp_path / "m.dist"))):
        found = run_bundle(source, {"x": x})
        assert list(found) == ["z", "h"]
        for name, value in expected.items():
            np.testing.assert_allclose(found[name].numpy(), value, rtol=1e-5, atol=1e-5)


def test_a_session_is_called_many_times() -> None:
    bundle = mlp_bundle([2, 3])
    session = Session(bundle)
    threads = torch.get_num_threads()
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((4, 6)).astype("float32")
        found = session({"x": torch.from_numpy(x)})
        np.testing.assert_allclose(found["z"].numpy(), expected_outputs(bundle, x)["z"], rtol=1e-5, atol=1e-5)
        assert session.seconds > 0
        assert session.communicators[1].traffic.calls == {"all_reduce": 1}
    assert torch.get_num_threads() == threads


def test_uneven_inputs_constants_and_prepare_on_a_2x3_mesh() -> None:
    # y[i, j] = 10 x[i, j] + a number of the rank, x split on both dims; `prepare` makes the 10.
    text = """
STEPS = []


def prepare(comm, weights):
    return {**weights, "ten": weights["five"] * 2}


def main(comm, weights, x, bias):
    start = comm.shard_start("tp", (6, 1, 0), "int64")
    return (x * weights["ten"] + start + bias, x.sum().reshape(1))
"""
    mesh = DeviceMesh((2, 3), ("dp", "tp"))
    splits = (Shard(0, 0, cut(5, [2, 3])), Shard(1, 1, (((0, 1), (4, 6)), (), ((1, 4),))))
    manifest = Manifest(
        name="affine", mesh=mesh, tail="ragged", schedule_hash="",
        programs=(Program("main_0", torch="programs/main_0.py"),), ranks=(0,) * 6,
        inputs=(Tensor("x", "float32", (5, 6), "", splits), Tensor("bias", "bfloat16", ())),
        outputs=(
            Tensor("y", "float32", (5, 6), "", splits),
            Tensor("sums", "float32", (6,), "", (
                Shard(0, 0, cut(6, [3, 3])), Shard(1, 0, tuple(((i, i + 1), (i + 3, i + 4)) for i in range(3))),
            )),
        ),
        weights=(Tensor("five", "float32", ()),),
    )  # fmt: skip
    bundle = Bundle(manifest, {"programs/main_0.py": text}, TensorWeights({"five": torch.tensor(5.0)}))
    x = np.arange(30, dtype="float32").reshape(5, 6)
    found = run_bundle(bundle, {"x": x, "bias": np.float32(0.5).reshape(())})
    starts = np.array([0, 7, 7, 7, 0, 0])
    np.testing.assert_array_equal(found["y"].numpy(), x * 10 + starts + 0.5)
    blocks = [x[rows][:, columns].sum() for rows in (slice(2), slice(2, 5)) for columns in ([0, 4, 5], [], [1, 2, 3])]
    np.testing.assert_array_equal(found["sums"].numpy(), blocks)


def test_the_error_of_a_rank_is_raised_with_its_source_and_the_session_goes_on(tmp_path: Path) -> None:
    text = RAISES_ON_1.replace("if comm.rank == 1:", "if comm.rank == 1 and x.sum() > 0:")
    session = Session(mlp_bundle([2, 1, 2], text))
    positive = np.ones((4, 6), "float32")
    with pytest.raises(ValueError, match="a kernel failed") as caught:
        session({"x": positive})
    assert "raise ValueError('a kernel failed')" in "".join(traceback.format_exception(caught.value))
    found = session({"x": -positive})
    np.testing.assert_allclose(
        found["z"].numpy(), expected_outputs(session.bundle, -positive)["z"], rtol=1e-5, atol=1e-5
    )
    path = write_bundle(session.bundle, tmp_path / "m.dist")
    with pytest.raises(ValueError, match="a kernel failed") as caught:
        run_bundle(read_bundle(path, trust_code=True), {"x": positive})
    assert str(path / "programs" / "main_0.py") in "".join(traceback.format_exception(caught.value))


def test_a_deadlock_ends_within_the_time_out_and_says_where() -> None:
    session = Session(mlp_bundle([1, 1, 1], DEADLOCK), timeout=0.5)
    start = time.monotonic()
    with pytest.raises(RunError) as caught:
        session({"x": example_input()})
    assert 0.5 < time.monotonic() - start < 5
    for rank in range(3):
        assert (
            f"rank {rank} waits in step #1 %b = recv(%x) (model.py:3); "
            "it last finished step #0 %a = all_reduce(%x) (model.py:2)"
        ) in str(caught.value)


def test_a_slow_rank_within_the_time_out_is_waited_for() -> None:
    text = SUM_COLUMNS.replace("    z =", "    import time; time.sleep(0.6 * comm.rank)\n    z =")
    run_bundle(mlp_bundle([1, 1], text), {"x": example_input()}, timeout=2)
    with pytest.raises(RunError, match=r"rank 0 waits in step #2.*\n.*rank 1 has not reached its first"):
        run_bundle(mlp_bundle([1, 1], text), {"x": example_input()}, timeout=0.2)
    run_bundle(mlp_bundle([1, 1], text), {"x": example_input()}, timeout=0)


def test_results_unlike_the_manifest() -> None:
    with pytest.raises(RunError, match=r"output h: rank . computed float32 \(4, 1\), the bundle declares"):
        run_bundle(mlp_bundle([2, 3], WRONG_SHAPE), {"x": example_input()})
    text = SUM_COLUMNS.replace("return (z, h)", "return (z,)")
    with pytest.raises(RunError, match="gives 1 outputs, the bundle names 2"):
        run_bundle(mlp_bundle([2, 3], text), {"x": example_input()})


@pytest.mark.parametrize(
    ("text", "message"),
    [("def main(:", r"main_0\.py>:1: not a Python program"), ("x = 1\n", r"defines no main\(comm, weights")],
)
def test_programs_that_are_none(text: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        Session(mlp_bundle([2, 3], text))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input 'x': the input is missing; found none"),
        ({"x": np.zeros((4, 7), "float32")}, r"expected float32 \(4, 6\), found float32 \(4, 7\)"),
        ({"x": np.zeros((4, 6))}, r"found float64 \(4, 6\)\n  hint: cast it: x.astype\('float32'\)"),
        ({"x": np.zeros((4, 6), "float32"), "xs": np.zeros(1)}, "input 'xs': .* did you mean 'x'"),
    ],
)
def test_inputs_that_do_not_fit(inputs: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(RunError, match=f"(?s){message}"):
        run_bundle(mlp_bundle([2, 3]), inputs)


def test_a_backend_is_added_once() -> None:
    with pytest.raises(ValueError, match="there is a backend 'tvm' already"):
        register_backend("tvm", load)
    with pytest.raises(RunError, match="unknown backend 'mine'"):
        find_backend("mine")


def test_backends_and_devices_that_are_not_there() -> None:
    with pytest.raises(RunError, match="unknown backend 'jax'"):
        Session(mlp_bundle([2]), backend="jax")
    with pytest.raises(RunError, match="unknown device 'tpu'"):
        Session(mlp_bundle([2]), device="tpu")
    bundle = mlp_bundle([2])
    no_torch = replace(bundle.manifest, programs=(Program("main_0"),))
    with pytest.raises(BundleError, match=r"the bundle holds no ranked\.txt"):
        Session(Bundle(no_torch, {}, bundle.weights))
