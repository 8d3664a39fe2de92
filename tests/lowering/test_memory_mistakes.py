"""Mistakes in what the executable stage says about memory: each that changes a result is found before it runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import VerificationError
from distir_relax.executable.check_memory import check_memory
from distir_relax.ir import Attribute, Function, Module, Op, parse, print_module, verify
from distir_relax.layout import assuming
from distir_relax.lowering.emit.torch import print_torch, to_executable
from distir_relax.ops import Overwriting, check, lookup
from distir_relax.runtime.backends.torch import load_text, prepare_weights
from distir_relax.runtime.transports.threads import ThreadWorld

pytestmark = pytest.mark.timeout(300)
ROWS = 67


class Blocks(torch.nn.Module):
    """Blocks whose products have dims of 31 and 13, views, and values that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(31, 31) for _ in range(2))
        self.head = torch.nn.Linear(31, 13)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 31))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            wide = block(x) * (self.scale + 1)
            x = x + torch.tanh(wide) - wide.view(-1).square().view(ROWS, 31) + (-wide).exp().relu()
        first, second = self.head(x).split([6, 7], 1)
        return torch.cat([second * 2, first - first.mean(0), second.abs()], 1)


@cache
def example(name: str) -> tuple[Module, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A program of one rank at the executable stage, its weights, and its inputs."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(ROWS, 31)
    if name == "training":
        plan = dr.compile_training(
            model, torch.nn.functional.mse_loss, optimizer=dr.optim.AdamW(lr=0.1), mesh=1, clip_norm=1.0,
            example_batch=(x, torch.randn(ROWS, 20)),
        ).plan  # fmt: skip
    else:
        plan = dr.compile(model.eval(), (x,), mesh=1)
    ranked, bundle = plan.modules["ranked"], plan.bundle()
    with assuming(ranked.guards):
        executable = to_executable(ranked)
    inputs = {i.value.name: i for i in ranked.main.inputs}
    weights = {
        t.name: bundle.weights.read(t.name, [[(0, n)] for n in t.shape])
        for t in bundle.manifest.weights if t.name in inputs
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    given = {
        n: (torch.rand(i.value.tensor.shape, generator=generator) * (1.0 if i.value.tensor.shape else 1e-3)).to(
            getattr(torch, i.value.tensor.dtype)
        )
        for n, i in inputs.items() if i.role == "input"
    }  # fmt: skip
    return executable, weights, given


def run(module: Module, weights: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a program twice on the same inputs; return both results."""
    comm = ThreadWorld(dr.DeviceMesh((1,), ("alone",))).communicator(0, "cpu")
    loaded = load_text(print_torch(module, "mistake"), "mistake", "<mistake>")
    results: list[torch.Tensor] = []
    with torch.inference_mode():
        stored: dict[str, Any] = prepare_weights(loaded, comm, {name: x.clone() for name, x in weights.items()})
        for _ in range(2):
            arguments = [given[i.value.name].clone() for i in module.main.inputs if i.role == "input"]
            results += [x.clone() for x in loaded.main(comm, stored, *arguments)]
        # What a call leaves in the arguments is its caller's.
        results += arguments
    return results


def mistakes(module: Module, count: int, seed: int) -> Iterator[tuple[str, Module]]:
    """Iterate over programs with one wrong word about memory, and its kind."""
    generator = random.Random(seed)
    while count:
        function = generator.choice(module.functions)
        if not function.ops:
            continue
        number = generator.randrange(len(function.ops))
        kind = generator.choice(["into", "into", "last", "unused", "prepared"])
        changed = _mistake(function, number, kind, generator)
        if changed is not None and changed != function:
            count -= 1
            yield kind, replace(module, functions=tuple(changed if f is function else f for f in module.functions))


def _mistake(function: Function, number: int, kind: str, generator: random.Random) -> Function | None:
    op = function.ops[number]
    if kind == "prepared":
        # That others are among the weights is for those who have these.
        constants = [i for i in function.inputs if i.role == "constant"]
        if not constants or function.name.endswith(".prepare"):
            return None
        one = generator.choice(constants)
        renamed = replace(one, value=replace(one.value, name=one.value.name + ".lost"))
        ops = tuple(
            replace(o, operands=tuple(renamed.value if v == one.value else v for v in o.operands)) for o in function.ops
        )
        return replace(function, inputs=tuple(renamed if i is one else i for i in function.inputs), ops=ops)
    added: dict[str, Attribute] = {}
    if kind == "into":
        fits = [n for n, v in enumerate(op.operands) if op.results and v.type == op.results[0].type]
        if not fits or op.callee or lookup(op.name, op.location).kernel(Overwriting) is None:
            return None
        added = {"by": "overwriting", "into": generator.choice(fits)}
    elif kind == "last":
        if not op.operands:
            return None
        added = {"last": (generator.randrange(len(op.operands)),)}
    else:
        added = {"unused": (generator.randrange(len(op.results)),)}
    changed: Op = replace(op, attrs={**op.attrs, **added})
    return replace(function, ops=(*function.ops[:number], changed, *function.ops[number + 1 :]))


def found(module: Module) -> str:
    """The error for a program; empty if there is none."""
    try:
        verify(module, check)
        check_memory(module)
    except VerificationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["inference", "training"])
def test_what_changes_a_result_is_found(name: str) -> None:
    module, weights, given = example(name)
    assert not found(module)
    assert parse(print_module(module)) == module
    expected = run(module, weights, given)
    kinds: Counter[tuple[str, bool]] = Counter()
    for kind, mistaken in mistakes(module, 100, seed=0):
        error = found(mistaken)
        try:
            results = run(mistaken, weights, given)
            wrong = any(not torch.equal(x, y) for x, y in zip(results, expected, strict=True))
        except (NameError, KeyError, AttributeError, RuntimeError, TypeError):
            wrong = True
        assert error or not wrong, (kind, print_module(mistaken))
        kinds[kind, wrong] += 1
    assert all(kinds[kind, True] >= 4 for kind in ("into", "last", "unused", "prepared")), kinds
    assert sum(count for (_, wrong), count in kinds.items() if wrong) >= 40, kinds
