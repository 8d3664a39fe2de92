"""Calls with the same sizes run as recorded steps after the first few, with the results of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.runtime.backends import load_program, recorded_calls
from distir_relax.runtime.backends.recorded_calls import RecordedCalls
from distir_relax.runtime.session import Session
from distir_relax.runtime.transports.threads import ThreadWorld
from tests.imported_once import compile_case
from tests.zoo import Case, gpt2, made_once, mlp

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("native_products")]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a rank's program ran as a recorded step."""
    calls: list[bool] = []
    run = RecordedCalls.run

    def noted(self: RecordedCalls, sizes: Mapping[str, int], *arguments: Any) -> Any:
        calls.append(self._steps.get(recorded_calls._key(sizes)) is not None)
        return run(self, sizes, *arguments)

    monkeypatch.setattr(RecordedCalls, "run", noted)
    return calls


def bert() -> Case:
    """A mask of the user's, which is another in each call."""
    torch.manual_seed(5)
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=48, intermediate_size=127, num_attention_heads=6, vocab_size=97
    )
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 7:] = 0
    call = {"input_ids": torch.randint(0, 97, (3, 11)), "attention_mask": mask}
    shardings = {f"encoder.layer.*.{name}.weight": "S[0]" for name in ("self.query", "intermediate.dense")}
    return Case(transformers.BertModel(config).eval(), (), call, {**shardings, "input_ids": "R"})


def llama() -> Case:
    """Query heads that share those of keys, and rows of several sequences."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=48, intermediate_size=127, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=97,
    )  # fmt: skip
    shardings = {"*.self_attn.[qkv]_proj.weight": "S[0]", "*.mlp.gate_proj.weight": "S[0]"}
    model = transformers.LlamaForCausalLM(config).eval()
    return Case(model, (torch.randint(0, 97, (2, 13)),), {"use_cache": False}, shardings)


def drawn_again(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Other values like those of an input of a model: numbers, ids, or a mask with another end in each row."""
    generator = torch.Generator().manual_seed(seed)
    if x.is_floating_point():
        return torch.randn(x.shape, generator=generator)
    if int(x.max()) == 1:
        ends = torch.randint(1, x.shape[1] + 1, (x.shape[0], 1), generator=generator)
        return (torch.arange(x.shape[1]) < ends).long()
    return torch.randint(0, 97, x.shape, generator=generator)


def compare(found: Any, expected: Any) -> None:
    pairs = (
        [(found, expected)] if isinstance(expected, torch.Tensor) else [(found[key], expected[key]) for key in found]
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("make", [mlp, gpt2, llama, bert])
def test_models(make: Callable[[], Case], ranks: int, recorded: list[bool]) -> None:
    case = made_once(make)
    mesh = dr.DeviceMesh((ranks,), ("tp",))
    plan = compile_case(case, shardings=case.shardings, mesh=mesh)
    for seed in range(7):
        args = [drawn_again(x, seed) for x in case.args]
        kwargs = {k: drawn_again(x, seed) if isinstance(x, torch.Tensor) else x for k, x in case.kwargs.items()}
        with torch.inference_mode():
            compare(plan(*args, **kwargs), case.model(*args, **kwargs))
    assert recorded == [False] * 4 * ranks + [True] * 3 * ranks


def test_sizes_of_calls(recorded: list[bool]) -> None:
    """A step for each choice of sizes; a mask that depends on them is true for one token."""
    model = gpt2().model
    tokens = torch.export.Dim("tokens", max=31)
    plan = dr.compile(
        model, (torch.zeros(2, 13, dtype=torch.long),), {"use_cache": False}, strategy="1/1/1/1",
        dynamic_shapes={"input_ids": {1: tokens}, "use_cache": None},
    )  # fmt: skip
    for seed in range(14):
        ids = torch.randint(0, 97, (2, (1, 7)[seed % 2]), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            compare(plan(ids, use_cache=False), model(ids, use_cache=False))
    assert recorded == [False] * 8 + [True] * 6


def test_a_step_takes_no_memory_but_for_its_outputs() -> None:
    case = mlp(31, 127)
    plan = compile_case(case, shardings=case.shardings, mesh=dr.DeviceMesh((1,), ("tp",)))
    bundle = plan.bundle(("torch",))
    program = load_program("torch", bundle, 0, ThreadWorld(bundle.manifest.mesh).communicator(0, "cpu"), "cpu")
    x = torch.randn(7, 31)
    taken = []
    for _ in range(7):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            (y,) = program(x, sizes={})
        results = found.profiler
        assert results is not None
        events = [event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]"]
        taken.append([size for size in events if size > 0])
        del y
    assert len(taken[0]) > 2
    # The first that runs prepares the list of calls.
    assert taken[5:] == [[7 * 31 * 4]] * 2


def test_large_outputs_and_programs_run_op_by_op(monkeypatch: pytest.MonkeyPatch, recorded: list[bool]) -> None:
    case = mlp(31, 127)
    plan = compile_case(case, shardings=case.shardings, mesh=dr.DeviceMesh((1,), ("tp",)))
    for name in ("_MOST_OUTPUTS", "MOST_BYTES"):
        with monkeypatch.context() as changed:
            changed.setattr(recorded_calls, name, 99)
            session = Session(plan.bundle(("torch",)))
            for _ in range(6):
                session({"input": case.args[0]})
    assert recorded == [False] * 12


def test_most_functions_of_python_run_op_by_op(recorded: list[bool]) -> None:
    """There are no kernels for the numbers of float64."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.GELU()).double()
    plan = dr.compile(model, (torch.ones(2, 5, dtype=torch.float64),), strategy="1/1/1/1")
    for _ in range(6):
        plan(torch.ones(2, 5, dtype=torch.float64))
    assert recorded == [False] * 6


def test_many_sizes_take_no_more_memory() -> None:
    calls = RecordedCalls(lambda *_: (), ThreadWorld(dr.DeviceMesh((1,), ("alone",))).communicator(0, "cpu"))
    for size in range(1_000):
        calls.run({"batch": size}, (), ())
    assert len(vars(calls)["_calls"]) < 300


def test_modules_that_users_have_edited_run_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recorded: list[bool]
) -> None:
    case = mlp(31, 127)
    compile_case(case, shardings=case.shardings, mesh=dr.DeviceMesh((1,), ("tp",))).save(tmp_path / "mlp.dist")
    module = tmp_path / "mlp.dist" / "programs" / "main_0.py"
    lines = module.read_text().split("\n")
    lines.insert(next(n for n, line in enumerate(lines) if line.startswith("def main(")) + 1, '    print("here")')
    module.write_text("\n".join(lines))
    session = Session(read_bundle(tmp_path / "mlp.dist", trust_code=True))
    for _ in range(7):
        session({"input": case.args[0]})
    assert capfd.readouterr().out == 7 * "here\n"
    assert recorded == []
