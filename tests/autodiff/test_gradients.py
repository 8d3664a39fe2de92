"""The gradient of every op: against torch's autograd in float64, and split in every way against itself whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from gradients import Case, by_autograd, case, differentiable, kind_of, largest_error
from validator import GRID, MESHES, TAILS, Layout, Setting, _layouts

from distir_relax.interpret import execute, interpret
from distir_relax.ir import Function, Module, Value
from distir_relax.layout import DeviceMesh
from distir_relax.lowering import ToDistIR
from distir_relax.ops import NO_GRADIENT, entries
from distir_relax.sharding import DelayReductions, Propagate

SAMPLED = differentiable()
# Layouts of operands and gradients, drawn for each sample and mesh.
DRAWN = 3


class Split(Setting):
    """A backward program on one mesh, whose inputs can be laid out in any way."""

    def __init__(self, one: Case, mesh: DeviceMesh) -> None:
        self.mesh, self.function = mesh, one.module.main
        self.operands = [*one.operands, *one.seeds]
        self.types = [kind_of(x) for x in self.operands]
        self._leads = {}

    def module(self, layouts: Sequence[Layout]) -> Module:
        """The global program: inputs laid out, then the backward step."""
        leads = self.leads(layouts)
        names = {item.value.name: f"x{i}.laid" for i, item in enumerate(self.function.inputs)}

        def laid(value: Value) -> Value:
            return replace(value, name=names.get(value.name, value.name))

        ops = tuple(replace(op, operands=tuple(map(laid, op.operands))) for op in self.function.ops)
        outputs = tuple(replace(o, value=laid(o.value)) for o in self.function.outputs)
        inputs = tuple(lead.source for lead in leads)
        whole = Function("main", inputs, (*(op for lead in leads for op in lead.ops), *ops), outputs)
        return Module("global", (whole,), (self.mesh,))


def drawn(split: Split, seed: str) -> list[tuple[Layout, ...]]:
    """Some of the combinations of layouts, even and uneven cuts, whole and pending."""
    chance = random.Random(seed)
    options = [
        [layout for how in ("", ": chunk") for layout in _layouts(kind, split.mesh, how)] for kind in split.types
    ]
    whole = tuple(options[i][0] for i in range(len(options)))
    rows = [tuple(chance.choice(column) for column in options) for _ in range(5 * DRAWN)]
    return list(dict.fromkeys([row for row in rows if row != whole]))[:DRAWN]


def test_every_differentiable_entry_has_a_sample() -> None:
    differentiable = {e.name for e in entries() if e.computes and e.gradient not in (None, NO_GRADIENT)}
    assert differentiable - {name for name, _ in SAMPLED} == set()
    assert len(differentiable) > 100


@pytest.mark.parametrize(("name", "number"), SAMPLED, ids=lambda x: str(x))
def test_gradients_are_those_of_autograd(name: str, number: int) -> None:
    one = case(name, number)
    found = list(interpret(one.module, one.inputs).values())
    assert largest_error(found, by_autograd(one)) < 1e-9


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", sorted({name for name, _ in SAMPLED}))
def test_split_gradients_are_those_of_the_whole(name: str) -> None:
    for number in (n for other, n in SAMPLED if other == name):
        one = case(name, number)
        for mesh, tail in itertools.product((MESHES[1], GRID), TAILS):
            split = Split(one, mesh)
            for layouts in drawn(split, f"{name} {number} {mesh.shape} {tail}"):
                module = split.module(layouts)
                data = split.data(layouts)
                sharded = DelayReductions().run(Propagate().run(module))
                found = execute(sharded, ToDistIR(tail).run(sharded), data)
                for output, whole in interpret(module.main, data).items():
                    torch.testing.assert_close(
                        found[output], whole, rtol=1e-9, atol=1e-9, msg=lambda m, at=(tail, layouts): f"{at}: {m}"
                    )
