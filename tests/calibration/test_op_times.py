"""The times of ops beside their limits."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.calibration import limits as measured_limits
from distir_relax.calibration.limits import Limits
from distir_relax.calibration.measure_ops import measure_op_times
from distir_relax.calibration.op_times import step_times
from distir_relax.cli import app
from distir_relax.errors import RunError
from distir_relax.ir import Op, TensorType, Value
from distir_relax.lowering.emit.torch import to_torch, to_torch_clocked
from distir_relax.lowering.emit.torch_function import ClockedOp
from distir_relax.report.op_times import op_times_json
from tests.imported_once import compile_language_model
from tests.incremental.language_models import language_model
from tests.runtime.processes import mpirun

LIMITS = Limits({"float32": 1e9, "int8": 4e9}, bandwidth=1e8, cache_bandwidth=1e9, cache=1000.0)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_limits, "_SECONDS", 1e-3)
    monkeypatch.setattr(measured_limits, "_READ", 1 << 20)


def op(name: str, operands: dict[str, TensorType], result: TensorType, **attrs: object) -> Op:
    return Op(name, tuple(Value(n, kind) for n, kind in operands.items()), (Value("y", result),), attrs, "model.py:3")


def f32(*shape: int) -> TensorType:
    return TensorType(shape, "float32")


def test_equal_ops_are_one_row_with_the_sum_of_their_medians() -> None:
    add = op("add", {"a": f32(5, 7), "b": f32(5, 7)}, f32(5, 7))
    ops = [ClockedOp(add, (False, False)), ClockedOp(add, (False, False))]
    steps = [
        [(-1, 0), (0, 1000), (1, 5000), (0, 6000)],
        [(-1, 0), (0, 3000), (1, 5000), (0, 7000)],
        [(-1, 10), (0, 20), (1, 30), (0, 40)],
    ]
    found = step_times("a step", ops, steps, lambda _: ({}, 1), LIMITS)
    (row,) = found.ops
    # Of the first op 2000, 5000 and 20 ns; of the second one 4000, 2000 and 10.
    assert row.count == 3
    assert row.seconds == pytest.approx(2000e-9 + 2000e-9)
    assert found.seconds == pytest.approx(6000e-9)
    # Three tensors of 140 bytes in the cache.
    assert row.limit == pytest.approx(3 * 3 * 140 / 1e9)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, (4 * 63 * 127 + 0.0) / 1e8), (400, 2 * 400 * 63 * 127 / 1e9)],
    ids=["reads its weight from memory", "is bound by its products"],
)
def test_the_limit_of_a_product(rows: int, expected: float) -> None:
    product = op("linear", {"x": f32(rows, 127), "w": f32(63, 127)}, f32(rows, 63))
    found = step_times("", [ClockedOp(product, (False, True))], [[(-1, 0), (0, 9)]], lambda _: ({}, 1), LIMITS)
    assert found.limit == pytest.approx(expected, rel=0.05)


def test_products_of_small_integers_have_their_own_limit() -> None:
    kinds = {"x": f32(900, 64), "v": TensorType((63, 64), "int8"), "s": f32(63, 1)}
    product = op("quantized_linear", kinds, f32(900, 63))
    fast = replace(LIMITS, bandwidth=1e12, cache_bandwidth=1e12)
    found = step_times("", [ClockedOp(product, (False, True, True))], [[(-1, 0), (0, 9)]], lambda _: ({}, 1), fast)
    assert found.limit == pytest.approx(2 * 900 * 63 * 64 / 4e9)


def test_communication_has_no_limit() -> None:
    reduced = op("all_reduce", {"x": f32(5)}, f32(5), axis="tp", op="sum")
    found = step_times("", [ClockedOp(reduced, (False,))], [[(-1, 0), (0, 9)]], lambda _: ({}, 1), LIMITS)
    assert found.ops[0].limit is None
    assert found.limit == 0


def mlp(strategy: str) -> dr.Plan:
    model = torch.nn.Sequential(torch.nn.Linear(63, 127), torch.nn.GELU(), torch.nn.Linear(127, 31))
    return dr.compile(model, (torch.randn(37, 63),), strategy=strategy)


@pytest.mark.sweep
def test_a_clock_is_all_that_is_added_to_a_program() -> None:
    generation = compile_language_model(language_model("llama"), max_length=64)
    ranked = generation.plan.modules["ranked"]
    (entry,) = set(ranked.ranks)
    text, ops = to_torch_clocked(ranked, entry, "model")
    without = re.sub(r"^(    clock\(.*\)|from distir_relax.kernels.clock import clock)\n", "", text, flags=re.MULTILINE)
    assert without == to_torch(ranked, "model")[entry]
    numbers = [int(number) for number in re.findall(r"clock\((-?\d+)\)", text)]
    assert sorted(numbers) == list(range(-1, len(ops)))


def test_ops_of_a_model() -> None:
    (step,) = measure_op_times(mlp("1/1/1/1").bundle(backends=("torch",)), steps=3).steps
    assert sorted((row.op, row.count) for row in step.ops) == [("linear_bias", 1), ("linear_bias", 1), ("nn.gelu", 1)]
    assert step.limit > 0
    assert step.seconds > 0
    assert all(row.seconds > 0 for row in step.ops)


@pytest.mark.sweep
def test_ops_of_prompts_and_of_tokens() -> None:
    generation = compile_language_model(language_model("llama"), max_length=64)
    bundle = generation.plan.bundle(backends=("torch",))
    prompt, token = measure_op_times(bundle, steps=3, tokens=17, requests=3).steps
    (reads,), (makes,) = ([o for o in s.ops if o.op == "nn.attention_of_states"] for s in (prompt, token))
    assert reads.count == makes.count
    # Each request attends by itself: to 17 positions, and in the median of three steps after them to the fifth.
    assert ",17," in reads.operands
    assert f",{17 + 3 + 1}," in makes.operands
    # Other ops have the rows of all requests.
    assert any(o.operands.startswith("f32[1,51,") for o in prompt.ops)
    assert any(o.operands.startswith("f32[1,3,") for o in token.ops)


def test_a_limit_of_seconds_is_measured_once() -> None:
    """As products in bfloat16 are, on processors without instructions for it."""
    calls = []
    assert measured_limits._seconds(lambda: (calls.append(1), time.sleep(0.31)), "cpu") >= 0.3
    assert len(calls) == 1
    assert measured_limits._seconds(lambda: calls.append(1), "cpu") < 0.01
    assert len(calls) > 10


def test_several_ranks_need_a_launch() -> None:
    with pytest.raises(RunError, match="a launch of 3 ranks"):
        measure_op_times(mlp("1/3/1/1").bundle(backends=("torch",)))


@pytest.mark.mpirun
def test_the_command(tmp_path: Path) -> None:
    mlp("1/2/1/1").save(tmp_path / "b.dist", backends=("torch",))
    options = ["--steps", "2", "--rank", "1"]
    done = mpirun(2, "-m", "distir_relax", "roofline", tmp_path / "b.dist", *options, "--json", limit=150)
    assert done.returncode == 0, done.stderr
    (step,) = json.loads(done.stdout)["steps"]
    found = {(o["op"], o["operands"]): o["limit"] is None for o in step["ops"]}
    assert found[("all_reduce", "f32[37,127]")]
    assert not found[("linear", "f32[37,31], f32[127,31]")]
    wrong = CliRunner().invoke(app, ["roofline", str(tmp_path / "b.dist"), "--rank", "2"])
    assert "expected a rank less than 2, found 2" in str(wrong.exception)


@pytest.mark.sweep
def test_json_has_all_ops() -> None:
    times = measure_op_times(mlp("1/1/1/1").bundle(backends=("torch",)), steps=2)
    found = op_times_json(times)
    assert [o["seconds"] for o in found["steps"][0]["ops"]] == [o.seconds for o in times.steps[0].ops]
    assert set(found["limits"]) == {"products", "bandwidth", "cache_bandwidth", "cache"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/1/1/3,checkpoint=block"])
def test_a_step_of_training(strategy: str, tmp_path: Path) -> None:
    """Its forward, backward and updates, also in functions that are called for each microbatch."""
    model = torch.nn.TransformerEncoderLayer(20, 5, 33, dropout=0.0, batch_first=True)
    batch = torch.randn(6, 7, 20), torch.randn(6, 7, 20)
    step = dr.compile_training(
        model, torch.nn.functional.mse_loss, optimizer=dr.optim.AdamW(lr=dr.lr.Cosine(0.1, 1000)),
        example_batch=batch, clip_norm=1.0, strategy=strategy,
    )  # fmt: skip
    step.save(tmp_path / "train.dist")
    result = CliRunner().invoke(app, ["roofline", str(tmp_path / "train.dist"), "--steps", "3", "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.output)["steps"]
    counts: dict[str, int] = {}
    for row in found["ops"]:
        counts[row["op"]] = counts.get(row["op"], 0) + row["number"]
    microbatches = int(strategy.split("/")[3][0])
    assert counts["attention_grad"] == counts["nn.scaled_dot_product_attention"] == microbatches
    assert counts["layer_norm_grad"] == 2 * microbatches
    assert counts["adam_step"] == 12
