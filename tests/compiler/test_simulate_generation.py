"""Predicted generation: times by hand, the plan's own simulation, and the steps of the engine itself."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.compiler.virtual_engine import StepTime, Workload, run_virtually
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError, RunError
from distir_relax.serving import EngineOptions, Limits
from distir_relax.simulation.request_steps import Chunk
from tests.incremental.language_models import MODELS, VOCABULARY
from tests.machines import link, machine
from tests.serving.test_engine import LENGTH, compiled, model

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.shares("engine")]
WIDTH, LAYERS = 32, 2
NEVER = 1e300
ATTENTION = "nn.scaled_dot_product_attention"


def products_only(devices: int = 1) -> Profile:
    """A machine on which only products take time, a second an operation, and transfers."""
    made = machine(devices, link(1e3, 1.0), flops=1.0)
    rates = dict.fromkeys(made.vector, NEVER)
    return replace(made, vector=rates, ops={dtype: {ATTENTION: NEVER} for dtype in rates})


def attention_only() -> Profile:
    made = machine(1, flops=NEVER)
    return replace(made, ops={dtype: {ATTENTION: 1.0} for dtype in made.vector})


def products(rows: int, last: int) -> float:
    """Operations of GPT-2's products: four of width by width, two of four times as much, and the logits.

    In the last layer, only queries, keys and values are computed for all rows.
    """
    return 2.0 * (rows * (12 * LAYERS - 9) * WIDTH**2 + last * (9 * WIDTH**2 + WIDTH * VOCABULARY))


def attention(chunks: Sequence[Chunk]) -> float:
    return sum(4.0 * WIDTH * LAYERS * chunk.new * (chunk.past + chunk.new) for chunk in chunks)


def test_products_run_on_the_rows_of_all_requests() -> None:
    options = EngineOptions(step_tokens=20, chunk_tokens=20)
    found = dr.simulate_generation(
        compiled("gpt2"), profile=products_only(), prompt=7, generate=3, requests=5, options=options
    )
    # 20 rows: two prompts and 6 tokens of the third; then the rest of it, two more, and a token of each of the first.
    steps = [products(20, 2), products(17, 5), products(5, 5), products(3, 3)]
    assert found.steps == len(steps)
    ends = np.cumsum(steps)
    assert found.seconds == pytest.approx(ends[-1])
    assert found.first_token == pytest.approx((ends[0], ends[0], ends[1], ends[1], ends[1]))
    assert found.per_token == pytest.approx((*[(ends[2] - ends[0]) / 2] * 2, *[(ends[3] - ends[1]) / 2] * 3))
    assert found.throughput == pytest.approx(15 / ends[-1])


def test_attention_runs_for_each_request() -> None:
    found = dr.simulate_generation(compiled("gpt2"), profile=attention_only(), prompt=5, generate=4, requests=3)
    steps = [[Chunk(0, 5, 1)] * 3, *([Chunk(5 + n, 1, 1)] * 3 for n in range(3))]
    assert found.seconds == pytest.approx(sum(map(attention, steps)))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "strategy", "tail"),
    [
        ("llama", "1/1/1/1", "ragged"),
        ("gpt2", "1/3/1/1", "pad"),
        ("gpt2", "1/1/2/1", "ragged"),
        ("mixtral", "1/3/1/1", "ragged"),
        ("gemma2 with a window of 5", "1/2/2/1", "pad"),
    ],
)
def test_one_prompt_takes_the_time_of_the_plan(name: str, strategy: str, tail: str) -> None:
    """Values that depend on sizes alone, which steps leave out, have no products and are not sent."""
    generation = compiled(name, strategy, tail)
    profile = products_only(generation.plan.mesh.size)
    found = dr.simulate_generation(generation, profile=profile, prompt=13, generate=1)
    expected = dr.simulate(generation.plan, profile=profile, dims={"batch": 1, "past": 0, "new": 13, "last": 1})
    assert found.seconds == pytest.approx(expected.makespan, rel=1e-9)
    assert (found.steps, found.per_token) == (1, None)


@pytest.mark.parametrize(
    ("name", "strategy", "requests", "options"),
    [
        ("gpt2", "1/1/1/1", 1, EngineOptions()),
        ("gpt2", "1/1/1/1", 7, EngineOptions(max_requests=3, step_tokens=20, chunk_tokens=7)),
        ("gpt2", "1/1/1/1", 9, EngineOptions(max_requests=5, memory=45_000, chunk_tokens=3)),
        ("gpt2", "1/1/2/1", 5, EngineOptions(max_requests=4, chunk_tokens=5)),
        ("gpt2", "1/1/2/1", 1, EngineOptions()),
    ],
)
def test_steps_are_those_of_the_engine(name: str, strategy: str, requests: int, options: EngineOptions) -> None:
    generation = compiled(name, strategy)
    rng = random.Random(0)
    with generation.engine(options) as engine:
        for number in range(requests):
            engine.submit([number, *(rng.randrange(VOCABULARY) for _ in range(10))], 6)
        engine.run()
        expected = engine.steps
    profile = dr.load_profile("cpu-local")
    found = dr.simulate_generation(
        generation, profile=profile, prompt=11, generate=6, requests=requests, options=options
    )
    assert found.steps == expected
    assert max(found.cache) <= (options.memory or 1 << 30)


@pytest.mark.sweep
def test_more_requests_take_longer_and_share_more() -> None:
    found = [
        dr.simulate_generation(compiled("llama"), profile="cpu-local", prompt=9, generate=5, requests=n)
        for n in (1, 2, 5, 16, 17)
    ]
    for fewer, more in pairwise(found):
        assert fewer.seconds < more.seconds
        assert max(fewer.first_token) <= max(more.first_token)
    assert found[0].throughput < found[1].throughput < found[2].throughput < found[3].throughput


def test_cache_is_that_of_all_tokens_on_each_rank() -> None:
    """The last token of a request is never computed."""
    generation = compiled("gpt2", "1/3/1/1", "pad")
    found = dr.simulate_generation(generation, profile=products_only(3), prompt=9, generate=5, requests=3)
    heads = [2, 1, 1]
    assert found.cache == tuple(3 * 13 * LAYERS * 2 * 8 * count * 4 for count in heads)
    assert found.weights == tuple(generation.plan.footprint.weights)
    assert found.fits
    small = replace(products_only(3), memory=float(max(found.weights)))
    tight = dr.simulate_generation(generation, profile=small, prompt=9, generate=5, requests=3)
    assert not tight.fits
    assert "does not fit" in str(tight)


def test_a_pipeline_runs_at_the_pace_of_its_slowest_stage() -> None:
    """Of a step of three seconds the first stage takes one, and the second two."""
    step = StepTime(3.0, np.array([0.0, 1.0]), np.array([1.0, 3.0]))
    for tokens in (1, 4):
        found = run_virtually(Workload(2, 5, tokens), Limits(4, 100, 8, 8), 2, lambda chunks: step)
        assert found.steps == 2 * tokens
        assert max(times[-1] for times in found.times) == 3.0 + 2.0 * (2 * tokens - 1)
        assert np.array_equal(found.busy, [2 * tokens, 4 * tokens])
    alone = run_virtually(Workload(1, 5, 4), Limits(4, 100, 8, 8), 2, lambda chunks: step)
    assert alone.times == [[3.0, 6.0, 9.0, 12.0]]


def test_stages_work_on_steps_of_two_requests_at_once() -> None:
    """On a machine where only the number of ops counts, two requests take less time than one after the other."""
    generation = compiled("gpt2", "1/1/2/1")
    profile = machine(2, link(1e-3, 1e15), flops=1e15, overhead=1.0)
    one, two, three = (
        dr.simulate_generation(generation, profile=profile, prompt=5, generate=20, requests=n) for n in (1, 2, 3)
    )
    assert 1.05 * one.seconds < two.seconds < 1.4 * one.seconds
    assert two.seconds < three.seconds < 2.0 * one.seconds
    # Of one request's steps each stage does its part, and waits for the other.
    assert sum(one.idle) == pytest.approx(1.0, abs=0.05)
    assert f"devices are idle {sum(two.idle) / 2:.0%} of the time" in str(two)


def test_a_stage_without_a_part_in_a_step_waits_for_nothing() -> None:
    first = StepTime(2.0, np.array([0.0, np.inf]), np.array([2.0, -np.inf]))
    second = StepTime(5.0, np.array([np.inf, 0.0]), np.array([-np.inf, 5.0]))
    times = iter([first, second])
    found = run_virtually(Workload(2, 3, 1), Limits(4, 100, 3, 3), 2, lambda chunks: next(times))
    assert found.times == [[2.0], [5.0]]


def simulate(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments), "--profile", "cpu-local"])


def message(ran: Any) -> str:
    """The error of a command, which `main` prints without a traceback."""
    assert isinstance(ran.exception, DistIRError), ran.output
    return ran.exception.message


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "llama.dist"
    compiled("llama").plan.save(path, backends=("torch",))
    return path


def test_the_command_prints_what_the_function_returns(bundle: Path) -> None:
    expected = dr.simulate_generation(bundle, profile="cpu-local", prompt=9, generate=3, requests=2)
    ran = simulate(bundle, "--prompt", 9, "--generate", 3, "--requests", 2)
    assert ran.output.rstrip() == str(expected)
    ran = simulate(bundle, "--prompt", 9, "--generate", 3, "--requests", 2, "--json")
    assert json.loads(ran.output) == json.loads(json.dumps(expected.as_json()))
    by_plan = dr.simulate_generation(compiled("llama").plan, profile="cpu-local", prompt=9, generate=3, requests=2)
    assert by_plan == expected
    assert simulate(bundle, "--prompt", 9, "--generate", 3, "--requests", 2, "--max-requests", 1).output != ran.output


def test_the_command_compares_with_a_scaled_machine(bundle: Path) -> None:
    workload = (bundle, "--prompt", 5, "--generate", 7, "--requests", 3)
    before, after = (
        json.loads(simulate(*workload, *more, "--json").output) for more in ((), ("--scale", "device.overhead=4x"))
    )
    assert after["what_if"]["before"] == before
    assert after["what_if"]["ratios"]["first token"] == pytest.approx(
        sum(after["first_token_s"]) / sum(before["first_token_s"])
    )
    assert after["seconds"] > 2 * before["seconds"]
    text = simulate(*workload, "--scale", "device.overhead=4x").output
    assert f"{after['seconds'] / before['seconds']:.3f}x" in text


def test_a_function_returns_a_generation(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "from tests.serving.test_engine import compiled\n\n\n"
        "def build(strategy):\n    return compiled('llama', str(strategy))\n\n\n"
        "def number():\n    return 3\n"
    )
    target = f"{tmp_path / 'made.py'}:build"
    ran = simulate(target, "--prompt", 9, "--generate", 3, "--strategy", "1/2/1/1", "--json")
    assert len(json.loads(ran.output)["cache_bytes"]) == 2
    ran = simulate(f"{tmp_path / 'made.py'}:number", "--prompt", 9, "--generate", 3)
    assert "expected a function of a strategy that returns a Generation, found int" in message(ran)


def test_a_folder_of_a_model_is_compiled_by_a_strategy(tmp_path: Path) -> None:
    model("gpt2").save_pretrained(tmp_path / "gpt2")
    found = dr.simulate_generation(tmp_path / "gpt2", profile="cpu-local", prompt=9, generate=3, strategy="1/2/1/1")
    expected = dr.simulate_generation(compiled("gpt2", "1/2/1/1"), profile="cpu-local", prompt=9, generate=3)
    assert found == expected


@pytest.mark.sweep
def test_a_model_needs_no_weights() -> None:
    with torch.device("meta"):
        meta = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODELS["llama"][1]))
    generation = dr.compile_generation(meta.eval(), strategy="1/1/1/1", max_length=LENGTH)
    found = dr.simulate_generation(generation, profile="cpu-local", prompt=9, generate=3)
    assert found.seconds == dr.simulate_generation(compiled("llama"), profile="cpu-local", prompt=9, generate=3).seconds


def test_errors(bundle: Path, tmp_path: Path) -> None:
    cases = {
        ("--prompt", 9): "expected --prompt and --generate, found no --generate",
        ("--generate", 9): "expected --prompt and --generate, found no --prompt",
        (
            "--prompt",
            LENGTH,
            "--generate",
            1,
        ): f"expected at most {LENGTH} tokens, found a prompt of {LENGTH} and 1 new",
        ("--prompt", 9, "--generate", 1, "--memory", 0): "expected memory for the states of 16 requests",
        ("--prompt", 9, "--generate", 1, "--dim", "new=3"): "expected no --dim with --prompt and --generate",
        ("--prompt", 9, "--generate", 1, "--mesh", 2): "expected no --mesh with --prompt and --generate",
        ("--prompt", 9, "--generate", 1, "--strategy", "1/2/1/1"): "a strategy cannot be applied to a program",
    }
    for arguments, expected in cases.items():
        ran = simulate(bundle, *arguments)
        assert expected in message(ran)
    ran = simulate(tmp_path / "missing", "--prompt", 9, "--generate", 1)
    assert "there is no such bundle" in message(ran)
    with pytest.raises(DistIRError, match="expected requests of at least 1, found 0"):
        dr.simulate_generation(bundle, profile="cpu-local", prompt=9, generate=1, requests=0)
    with pytest.raises(DistIRError, match="expected a Generation, a Plan or the path of a bundle, found int"):
        dr.simulate_generation(3, profile="cpu-local", prompt=9, generate=1)
    options = EngineOptions(memory=9000, max_requests=1)
    with pytest.raises(RunError, match="tokens of a request, which fit into memory"):
        dr.simulate_generation(bundle, profile="cpu-local", prompt=50, generate=9, options=options)


def test_a_program_that_continues_nothing_is_refused(tmp_path: Path) -> None:
    plan = dr.compile(torch.nn.Linear(3, 5).eval(), (torch.zeros(2, 3),), mesh=dr.DeviceMesh((1,), ("d",)))
    with pytest.raises(RunError, match="does not continue sequences"):
        dr.simulate_generation(plan, profile="cpu-local", prompt=9, generate=1)
