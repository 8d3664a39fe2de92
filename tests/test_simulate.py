"""`dr.simulate` and `distir simulate`: every kind of model, what is printed, and errors without a traceback."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.errors import DistIRError, ImportModelError, ParseError, ProfileError, VerificationError
from distir_relax.ir import CALL, inline
from distir_relax.lowering import FuseLocal
from distir_relax.simulation.memory_categories import CATEGORIES
from tests import mlp

sys.path.insert(0, str(Path(__file__).parent / "runtime"))

from tests.runtime.processes import python

ROOT = Path(__file__).parents[1]
PIPELINE = ROOT / "examples" / "paper" / "pipeline.distir"
MODELS = """
import torch

import distir_relax as dr


def program(strategy=dr.Strategy(1, 1, 1, 1), global_batch=24):
    linear = [torch.nn.Linear(7, 7, bias=False, device="meta") for _ in range(3)]
    x, y = (torch.empty(global_batch, 7, device="meta") for _ in range(2))
    training = dr.Training(torch.nn.Sequential(*linear), torch.nn.functional.mse_loss, dr.optim.SGD(), (x, y))
    return training.compile(strategy=strategy).plan.modules["distributed"]


def model(width=127):
    return torch.nn.Linear(5, width).eval(), (torch.zeros(3, 5),)


def plan():
    return dr.compile(*model(), mesh=dr.DeviceMesh((3,), ("tp",)), shardings={"weight": "S[0]"})


def number():
    return 3


def raises():
    return 1 / 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a function's file, a bundle on three ranks, an ONNX file and a program's text."""
    found = tmp_path_factory.mktemp("models")
    (found / "models.py").write_text(MODELS)
    (found / "program.distir").write_text(PIPELINE.read_text())
    plan().save(found / "plan.dist", backends=("torch",))
    write_onnx(found / "model.onnx")
    return found


@cache
def plan() -> dr.Plan:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 127), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(127, 5))
    mesh = dr.DeviceMesh((3,), ("tp",))
    return dr.compile(model.eval(), (torch.zeros(3, 5),), mesh=mesh, shardings={"0.weight": "S[0]"})


def write_onnx(path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [3, 5]), ("y", [3, 7])))
    w = helper.make_tensor("w", TensorProto.FLOAT, [5, 7], [0.1] * 35)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


def distir(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["simulate", *map(str, arguments), "--profile", "dgx2-v100", "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("model", "options", "devices"),
    [
        ("plan.dist", [], 3),
        ("program.distir", [], 2),
        ("models.py:program", ["--strategy", "2/1/3/2", "--global-batch", "24"], 6),
        ("models.py:plan", [], 3),
        ("model.onnx", [], 1),
        ("model.onnx", ["--mesh", "2", "--axes", "tp", "--shard", "w=S[1]"], 2),
    ],
)
def test_each_kind_of_model(folder: Path, model: str, options: list[str], devices: int) -> None:
    found = distir(folder / model, *options)
    assert found["makespan_s"] > 0
    assert found["profile"] == "dgx2-v100"
    assert found["devices"] == len(found["peak_memory_bytes"]) == len(found["peak"]) == devices
    assert min(found["peak_memory_bytes"]) > 0
    assert found["fits"] is True
    assert 0 <= found["bubble"] < 1
    assert 0 <= found["communication"] < 1
    for device in range(devices):
        times = [found[key][device] for key in ("compute_s", "communication_s", "idle_s")]
        assert sum(times) == pytest.approx(found["makespan_s"])
        assert sum(found["peak"][device][c] for c in CATEGORIES) == found["peak_memory_bytes"][device]


def test_throughput_is_samples_by_seconds(folder: Path) -> None:
    found = distir(folder / "models.py:program", "--strategy", "2/1/3/2", "--global-batch", "36")
    assert found["samples"] == 36
    assert found["throughput"] == pytest.approx(36 / found["makespan_s"])
    by_default = distir(folder / "models.py:program")
    assert by_default["samples"] == 24
    assert distir(folder / "program.distir")["throughput"] is None
    assert distir(folder / "program.distir", "--global-batch", "70")["samples"] == 70


def test_the_command_and_the_function_say_the_same(folder: Path) -> None:
    target = f"{folder / 'models.py'}:program"
    found = dr.simulate(target, profile="dgx2-v100", strategy="2/1/3/2", global_batch=24)
    assert found.as_json() == distir(target, "--strategy", "2/1/3/2", "--global-batch", "24")
    alone = dr.simulate(found.module, profile="dgx2-v100", global_batch=24).as_json()
    assert {**alone, "strategy": "2/1/3/2"} == found.as_json()


def test_a_bundle_and_its_plan_are_the_same_program(folder: Path) -> None:
    bundle = dr.simulate(folder / "plan.dist", profile="dgx2-v100")
    assert bundle.as_json() == dr.simulate(plan(), profile="dgx2-v100").as_json()


def test_what_ranks_run_fused_is_simulated_fused() -> None:
    found = dr.simulate(plan(), profile="dgx2-v100").module
    names = [op.name for op in found.main.ops]
    assert "linear_bias" in names
    assert "linear" in [op.name for op in plan().modules["distributed"].main.ops]
    assert "nn.gelu_tanh" in names
    assert "all_reduce" in names


def test_fusion_leaves_calls_and_communication_alone() -> None:
    module = mlp.program(3, 7, "2/3/2/2", 24)
    fused = FuseLocal().run(module)

    def kept(m: Any) -> list[str]:
        return [op.name for f in m.functions for op in f.ops if op.name in (CALL, "send", "all_reduce")]

    assert kept(fused) == kept(module)
    assert kept(FuseLocal().run(inline(module))) == kept(inline(module))


def test_a_summary_for_people(folder: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", str(folder / "program.distir"), "--profile", "dgx2-v100"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("on dgx2-v100: ")
    assert lines[0].endswith(" on 2 devices")
    assert lines[1].startswith("time      compute ")
    assert lines[2].startswith("memory    peak 327 kB on device 0: weights ")
    assert lines[3].startswith("          at %")


def test_a_trace_has_a_track_for_each_device(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    makespan = distir(folder / "program.distir", "--trace", trace)["makespan_s"]
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"device 0", "device 1"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in slices} == {"compute", "communication"}
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(makespan * 1e6)
    counters = [event for event in events if event["ph"] == "C"]
    assert {"weights", "activations", "gradients", "optimizer state", "all"} == set(counters[0]["args"])


def fails(kind: type[DistIRError], message: str, model: object, **options: Any) -> None:
    with pytest.raises(kind) as raised:
        dr.simulate(model, **{"profile": "dgx2-v100", **options})
    assert message in str(raised.value)


def test_errors_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "own.distir"
    fails(ImportModelError, "none.distir: there is no such file\n  hint: give a bundle", tmp_path / "none.distir")
    fails(DistIRError, "there is no profile 'dgx9'\n  hint: profiles are ", folder / "plan.dist", profile="dgx9")
    fails(DistIRError, "to apply the strategy to, found a bundle", folder / "plan.dist", strategy="1/1/1/1")
    fails(DistIRError, "to apply the strategy to, found a program", folder / "program.distir", strategy="1/1/1/1")
    fails(DistIRError, "expected a strategy D/T/P/K", f"{folder}/models.py:program", strategy="2/2")
    fails(DistIRError, "found a function that returns a plan", f"{folder}/models.py:plan", strategy="1/1/1/1")
    fails(ImportModelError, "expected a Plan, a program, or a tuple", f"{folder}/models.py:number")
    fails(ImportModelError, "raised ZeroDivisionError when it was called", f"{folder}/models.py:raises")
    many = {"strategy": "3/2/3/2", "global_batch": 24}
    fails(
        ProfileError, "the program uses 18 devices, the profile dgx2-v100 has 16", f"{folder}/models.py:program", **many
    )
    text.write_text(
        'module @distributed {\n func @main(input %x: f32[5] @ {20}) {\n %y = nn.relu(%x) return "y": %y }\n}'
    )
    fails(ProfileError, "the program uses 21 devices, the profile dgx2-v100 has 16", text)
    text.write_bytes(b"\xff\xfe\x00")
    fails(ImportModelError, "not UTF-8 text", text)
    text.write_text("module @distributed {")
    fails(ParseError, f"{text}:1: expected", text)
    text.write_text(plan().text("global"))
    fails(DistIRError, "a program of the distributed stage is simulated, found the global stage", text)
    text.write_text(PIPELINE.read_text().replace("%dw1 = add(%dw1_1, %dw1_2)", "%dw1 = add(%dw1_1, %dw2_2)"))
    fails(VerificationError, "the operands of add are on different devices: {0}, {1}", text)
    typed = plan().text("distributed").replace("linear(", "nn.relu(", 1)
    text.write_text(typed)
    fails(VerificationError, "nn.relu", text)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ["none.distir", "--profile", "dgx2-v100"],
        ["program.distir", "--profile", "dgx9"],
        ["program.distir", "--profile", "dgx2-v100", "--strategy", "1/1/1/1"],
        ["models.py:raises", "--profile", "dgx2-v100"],
    ],
)
def test_the_command_ends_with_2_and_no_traceback(folder: Path, arguments: list[str]) -> None:
    done = python("-m", "distir_relax", "simulate", folder / arguments[0], *arguments[1:])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("error:") == 1
    assert "Traceback (most recent call last)" not in done.stderr


def example(samples: int, kind: str) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.ReLU(), torch.nn.Linear(9, 5)).eval()
    x = torch.randn(samples, 7)
    if kind == "symbolic":
        return model, (x,), {}, {"input": {0: "batch"}}
    if kind == "training":
        return dr.Training(model, torch.nn.functional.mse_loss, dr.optim.SGD(), (x, torch.randn(samples, 5)))
    return model, (x,)


@pytest.mark.parametrize("samples", [1, 6, 24])
@pytest.mark.parametrize("kind", ["model", "training", "symbolic"])
def test_global_batch_is_that_of_the_program(kind: str, samples: int) -> None:
    strategy = "3/1/1/1" if samples > 1 else "1/2/1/1"
    options: Any = {"profile": "dgx2-v100", "strategy": strategy, "global_batch": samples}
    expected = dr.simulate(example(samples, "model" if kind == "symbolic" else kind), **options)
    found = dr.simulate(example(2, kind), **options)
    assert found.samples == samples
    assert found.makespan == expected.makespan
    assert found.peak_memory.tolist() == expected.peak_memory.tolist()


def test_command_simulates_the_batch_of_a_function_without_the_parameter(folder: Path) -> None:
    one, many = (distir(folder / "models.py:model", "--strategy", "1/1/1/1", "--global-batch", n) for n in (3, 300000))
    assert many["makespan_s"] > 2 * one["makespan_s"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("plan.dist", "expected the global_batch of a bundle, 3, found 12"),
        ("models.py:plan", "expected the global_batch of a plan, 3, found 12"),
        ("model.onnx", "can have global_batch 12, found one with its example's 3 samples"),
    ],
)
def test_batches_that_a_program_cannot_have_are_refused(folder: Path, target: str, message: str) -> None:
    fails(DistIRError, message, f"{folder}/{target}", global_batch=12)


def test_example_of_one_sample_has_no_batch_to_repeat() -> None:
    fails(DistIRError, "can have global_batch 12", example(1, "model"), global_batch=12)
    linear = torch.nn.Linear(7, 5)
    fails(DistIRError, "can have global_batch 12", (linear, (torch.randn(1, 4, 7),)), global_batch=12)
    fails(DistIRError, "expected global_batch of at least 1, found 0", example(2, "model"), global_batch=0)
