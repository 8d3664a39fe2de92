"""The smallest input that shows a mistake, for mistakes whose smallest input is known by hand."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import write_bundle
from distir_relax.cli import app
from distir_relax.counterexample import Counterexample, Stages, find_counterexample
from distir_relax.counterexample.double import in_float64
from distir_relax.counterexample.model_comparison import ModelComparison
from distir_relax.counterexample.shrink import minimal
from distir_relax.errors import RunError, VerificationError
from distir_relax.interpret.ranked_executor import run_ranks
from distir_relax.ir import Module, TensorType, UpdateProgram, inline, parse, print_module, verify
from distir_relax.layout import DeviceMesh
from distir_relax.ops import Builder, check
from distir_relax.proof import Refuted, check_model, check_projection, check_schedule
from distir_relax.proof.plan import MODEL, PROJECTION, SCHEDULE
from tests.compiled import compiled
from tests.proof.language_model import step
from tests.proof.test_projection import plan


class Halves(nn.Module):
    """The two halves of each row by different functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat([first.tanh(), second.relu()], 1)


class Words(nn.Module):
    """A look-up, a product, and a function that keeps the sign."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 3), nn.Linear(3, 2, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(ids)).tanh()


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, dict[str, str], str]] = {
    "product": (lambda: nn.Linear(7, 5, bias=False), torch.ones(4, 7), {"weight": "S[1: 3|2|2]"}, "ragged"),
    "padded": (lambda: nn.Linear(7, 5, bias=False), torch.ones(4, 7), {"weight": "S[1: 3|2|2]"}, "pad"),
    "bias": (lambda: nn.Linear(7, 5), torch.ones(4, 7), {"weight": "S[1: 3|2|2]"}, "ragged"),
    "halves": (Halves, torch.ones(5, 6), {"x": "S[0: 2|2|1]"}, "ragged"),
    "words": (Words, torch.zeros(3, dtype=torch.int64), {"ids": "S[0]"}, "ragged"),
}


@cache
def made(name: str) -> dr.Plan:
    model, x, shardings, tail = MODELS[name]
    return dr.compile(model().eval(), (x,), mesh=3, shardings=shardings, tail=tail, name=name)


def edited(module: Module, pattern: str, new: str) -> Module:
    """A program in which all matches of a pattern are replaced."""
    text = print_module(module)
    changed = re.sub(pattern, new, text)
    assert changed != text
    return replace(parse(changed), records=module.records)


def stages_of(plan: dr.Plan, **changed: Module) -> Stages:
    """The programs of a plan, of which some are others."""
    modules = {**plan.modules, **changed}
    return Stages(modules["ranked"], modules["distributed"], modules["sharded"], plan.imported.module)


STATEMENTS: dict[str, tuple[str, Callable[[Stages], object]]] = {
    "sharded": (MODEL, lambda stages: check_model(stages.model, stages.sharded)),
    "distributed": (SCHEDULE, lambda stages: check_schedule(stages.sharded, stages.distributed)),
    "ranked": (PROJECTION, lambda stages: check_projection(stages.distributed, stages.ranked)),
}


def found(plan: dr.Plan, stage: str, pattern: str, new: str, seconds: float = 60.0) -> Counterexample:
    """The counterexample of a plan that is refused since the program of one stage is edited."""
    stages = stages_of(plan, **{stage: edited(plan.modules[stage], pattern, new)})
    statement, refuse = STATEMENTS[stage]
    verify(getattr(stages, stage), check)
    with pytest.raises(VerificationError):
        refuse(stages)
    return find_counterexample(stages, statement, seconds)


MISTAKES = {
    # Rank 0 has the term of column 0, the others have zeros.
    "no sum": (
        "product", "distributed", r'"output": %linear\b', r'"output": %linear.partial',
        "smallest input: input[0, 0] = 1, weight[0, 0] = 1, all else 0: "
        "the output 'output' at [0, 0] is 0 on ranks 1 and 2, and not 1",
    ),
    "a mean for a sum": (
        "product", "distributed", r'op="sum"', r'op="mean"',
        "smallest input: input[0, 0] = 1, weight[0, 0] = 1, all else 0: "
        "the output 'output' at [0, 0] is 0.333333 on ranks 0, 1 and 2, and not 1",
    ),
    # Both operands are padded by one column on ranks 1 and 2.
    "padding that is not zero": (
        "padded", "distributed", r"value=0\.0", "value=1.0",
        "smallest input: all 0: the output 'output' at [0, 0] is 2 on ranks 0, 1 and 2, and not 0",
    ),
    "a bias on each rank": (
        "bias", "distributed",
        r"%(\S+): (\S+ @ \S+) = all_reduce\(%(\S+)\)([^\n]*)\n(\s*)%(\S+): (\S+ @ \S+) = add\(%\S+, %bias\)[^\n]*",
        r"%biased: \2 = add(%\3, %bias)\n\5%\6: \7 = all_reduce(%biased)\4",
        "smallest input: bias[0] = 1, all else 0: the output 'output' at [0, 0] is 3 on ranks 0, 1 and 2, and not 1",
    ),
    # Row 2 is the first of rank 1.
    "swapped halves": (
        "halves", "sharded", r"concat\(%(\S+), %(\S+)\)", r"concat(%\2, %\1)",
        "smallest input: x[0, 0] = 1, all else 0: the output 'output' at [0, 0] is 0, and not 0.761594",
    ),
    # Row 4 is the one of rank 2.
    "swapped halves on one rank": (
        "halves", "ranked", r"(?s)(func @main_1.*)concat\(%(\S+), %(\S+)\)", r"\1concat(%\3, %\2)",
        "smallest input: x[4, 0] = 1, all else 0: the output 'output' at [4, 0] is 0 on rank 2, and not 0.761594",
    ),
    "another function": (
        "words", "sharded", r"= tanh\(%(\S+)\)", r"= nn.relu(%\1)",
        "smallest input: words.weight[0, 0] = 1, out.weight[0, 0] = 1, all else 0: "
        "the output 'output' at [0, 0] is 1, and not 0.761594",
    ),
    # Indices stay those of words; the first one is drawn as 0.
    "the first word for each": (
        "words", "sharded", r"= check_indices\(%ids\) \{[^\n]*\}", "= subtract(%ids, %ids)",
        "smallest input: ids[1] = 1, words.weight[0, 0] = 1, out.weight[0, 0] = 1, all else 0: "
        "the output 'output' at [1, 0] is 0.761594, and not 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_the_smallest_input(name: str) -> None:
    plan, stage, pattern, new, expected = MISTAKES[name]
    assert str(found(made(plan), stage, pattern, new)) == expected


GELU = (r"= nn\.gelu\(", "= nn.relu(")


@cache
def language_model() -> dr.Plan:
    return step("1/3/1/1", optimizer=dr.optim.SGD(0.1))


@pytest.mark.sweep
def test_no_element_can_be_zero() -> None:
    """In a step of a language model: zero for any element of the smallest input hides the mistake."""
    plan = language_model()
    example = found(plan, "sharded", *GELU)
    assert example == found(plan, "sharded", *GELU)
    assert example.difference is not None
    assert example.is_smallest
    modules = {"sharded": inline(edited(plan.modules["sharded"], *GELU)), "model": inline(plan.imported.module)}
    modules = {name: in_float64(module) for name, module in modules.items()}
    record = next(r for r in plan.modules["sharded"].records if isinstance(r, UpdateProgram))
    whole = ModelComparison(modules["model"], modules["sharded"], in_float64(parse(record.text)))
    one = whole.only(example.difference.output)
    for left_out in (None, *example.elements):
        tensors = {n: torch.zeros(k.shape, dtype=getattr(torch, k.dtype)) for n, k in one.inputs.items()}
        for element in example.elements:
            if element is not left_out:
                tensors[element.input][element.index] = element.value
        difference = one.difference(tensors, 1e-7)
        assert (difference == example.difference) if left_out is None else difference is None, left_out


def test_a_false_alarm() -> None:
    """An op that is done twice by mistake changes nothing, if it is idempotent."""
    new = r"%again: \1 = nn.relu(%\2)\n%relu: \1 = nn.relu(%again)"
    example = found(made("halves"), "distributed", r"%relu: ([^=]*) = nn\.relu\(%(\S+)\)", new)
    assert str(example) == "no input of 12 tried shows a difference"


RIGHT = ["tensor, padded", "all", "halos", "training, pipeline"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", RIGHT)
def test_right_plans_show_no_difference(name: str) -> None:
    for statement in (PROJECTION, SCHEDULE, MODEL):
        example = find_counterexample(stages_of(plan(name)), statement, 60.0)
        assert str(example).startswith("no input of "), (statement, str(example))
        assert example.tried >= 12


class Sums(nn.Module):
    """The sums of the columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


def test_the_smallest_sizes() -> None:
    """A maximum for a sum over the batch shows at a batch of two."""
    batch = torch.export.Dim("batch", min=1, max=64)
    made = dr.compile(
        Sums(), (torch.ones(6, 5),), mesh=3, shardings={"x": "S[1: 3|1|1]"}, dynamic_shapes={"x": {0: batch}}
    )
    example = found(made, "sharded", r"= sum\(", "= max(")
    assert str(example) == (
        "smallest input: batch = 2, x[0, 0] = -1, all else 0: the output 'output' at [0] is 0, and not -1"
    )


def test_programs_that_are_too_large() -> None:
    """Neither memory nor time is taken for them."""
    g = Builder()
    x = g.input("x", TensorType((1 << 15, 1 << 15), "float32"))
    y = g.emit("annotate_sharding", g.emit("tanh", x), placements="S[0]")
    stages = compiled(Module("global", (g.function("main", [("y", y)]),), (DeviceMesh((3,), ("tp",)),)))
    given = Stages(stages["ranked"], stages["distributed"], stages["sharded"], stages["global"])
    for statement in (PROJECTION, SCHEDULE, MODEL):
        assert "too large" in str(find_counterexample(given, statement))


def test_a_run_that_fails() -> None:
    """Only the second program does not accept an input."""
    example = found(made("words"), "sharded", "low=0, high=5", "low=0, high=4")
    assert "the run fails: words, " in str(example)
    assert [(element.input, element.value) for element in example.elements] == [("ids", 4.0)]


WAITING = """module @ranked {
  mesh[0] = device_mesh((2,), ("tp",))
  ranks = (@main_0, @main_1,)
  func @main_0(
    input %x: f32[3],
  ) {
    %y: f32[3] = recv() {shape=(3,), dtype="float32", distance=1, step=1}
    %z: f32[3] = send(%x) {distance=1, step=2}
    return "y": %y
  }
  func @main_1(
    input %x: f32[3],
  ) {
    %y: f32[3] = recv() {shape=(3,), dtype="float32", distance=-1, step=2}
    %z: f32[3] = send(%x) {distance=-1, step=1}
    return "y": %y
  }
}
"""


def test_ranks_that_wait_for_each_other() -> None:
    """Programs that are not verified end with an error."""
    x = {"x": {0: torch.zeros(3), 1: torch.ones(3)}}
    with pytest.raises(RunError, match="ranks 0, 1 wait for each other"):
        run_ranks(parse(WAITING), x)
    first, second = WAITING.split("  func @main_1")
    receive, send = first.splitlines()[6:8]
    exchanged = first.replace(f"{receive}\n{send}", f"{send}\n{receive}")
    found = run_ranks(parse(f"{exchanged}  func @main_1{second}"), x)["y"]
    assert (found[0].tolist(), found[1].tolist()) == ([1.0] * 3, [0.0] * 3)


def test_time_is_bounded() -> None:
    """A fraction of a second is too short to shrink the inputs of a step: the result says so."""
    start = time.perf_counter()
    example = found(language_model(), "distributed", *GELU, seconds=0.3)
    assert time.perf_counter() - start < 10
    assert example.difference is None or "until time was over" in str(example)


@pytest.mark.parametrize("seed", range(20))
def test_minimal_subsets(seed: int) -> None:
    """Items show together with those of one of several sets: the result has all of one, and nothing else."""
    draw = random.Random(seed)
    items = list(range(draw.randrange(1, 12)))
    needed = [set(draw.sample(items, draw.randrange(min(4, len(items)) + 1))) for _ in range(draw.randrange(1, 4))]

    def shows(kept: Sequence[int]) -> bool:
        return any(wanted <= set(kept) for wanted in needed)

    kept = minimal(items, shows)
    assert kept == sorted(kept)
    assert shows(kept)
    assert not any(shows([other for other in kept if other != item]) for item in kept)


def test_the_command(tmp_path: Path) -> None:
    plan, stage, pattern, new, text = MISTAKES["swapped halves on one rank"]
    changed = edited(made(plan).modules[stage], pattern, new)
    bundle = made(plan).bundle(("torch",)).with_texts({"ranked.txt": print_module(changed)})
    path = write_bundle(bundle, tmp_path / "m.dist")
    run = CliRunner()
    refused = run.invoke(app, ["check", str(path)])
    assert isinstance(refused.exception, VerificationError)
    assert text in str(refused.exception)
    assert "test_counterexample.py" in str(refused.exception)
    (shown,) = json.loads(run.invoke(app, ["check", str(path), "--json"]).stdout)
    assert shown["refused"] == PROJECTION
    assert shown["example"]["elements"] == [["x", [4, 0], 1.0]]
    assert (shown["example"]["output"], shown["example"]["ranks"]) == ("output", [2])
    short = run.invoke(app, ["check", str(path), "--example", "0"])
    assert isinstance(short.exception, VerificationError)
    assert "smallest input" not in str(short.exception)


def test_compilation_with_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that must be proved, and is not, is an error with the search for an input that shows it."""

    def refuse(*modules: object) -> None:
        raise Refuted("an op is none of the model's", "m.py:3", "", MODEL)

    monkeypatch.setattr("distir_relax.compiler.compile.prove", refuse)
    with pytest.raises(VerificationError, match=r"none of the model's\n  no input of 12 tried shows a difference"):
        dr.compile(nn.Linear(5, 7).eval(), (torch.randn(4, 5),), strategy="1/2/1/1", check=True)
