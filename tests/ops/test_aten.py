"""Every ATen spelling against torch: a model of that one op is exported, imported, interpreted and compared."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - declares ops of its own
from aten_calls import CALLS, Call
from samples import draw
from torch.utils._pytree import tree_leaves, tree_map

from distir_relax.frontends.dynamic_shapes import Dim
from distir_relax.frontends.torch import graph, import_torch
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import verify
from distir_relax.ir.symbols import specialize
from distir_relax.ops import aten_of, aten_spellings, check

CASES = [(spelling, i) for spelling, calls in CALLS.items() for i in range(len(calls))]
TOGETHER = 24
"""Calls in a model: an export of one op takes nearly as long as one of many."""


DRAWN = {"rand.default", "randn.default"}
"""What has no operands, and is a number unless a program is trained: `tests/autodiff/test_dropout.py` draws."""


SIZED: dict[str, list[Any]] = {
    "arange.default": [lambda op, n: op(n), lambda op, n: op(2 * n + 1, dtype=torch.float32)],
    "arange.start": [lambda op, n: op(2, n + 3), lambda op, n: op(n, 3 * n)],
    "arange.start_step": [lambda op, n: op(0, 3 * n + 2, 3), lambda op, n: op(n + 1, -1, -1)],
    "empty.memory_format": [lambda op, n: op([2, n]).shape[1] + torch.zeros(n)],
    "full.default": [lambda op, n: op([n, 2], 7), lambda op, n: op([n], 0.5), lambda op, n: op([n], True)],
    "ones.default": [lambda op, n: op([n, 3])],
    "scalar_tensor.default": [lambda op, n: op(n, dtype=torch.int64), lambda op, n: op(2 * n, dtype=torch.float32)],
    "zeros.default": [lambda op, n: op([n // 2 + 1]), lambda op, n: op([n], dtype=torch.int64)],
}
"""What has no tensor as operand, and is a constant unless a size is symbolic."""


class OfSize(torch.nn.Module):
    """Applies one ATen op to the size of its input."""

    def __init__(self, spelling: str, number: int) -> None:
        super().__init__()
        self.op: Any = operator.attrgetter(f"aten.{spelling}")(torch.ops)
        self.use = SIZED[spelling][number]

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self.op, x.shape[0])


@pytest.mark.parametrize(("spelling", "number"), [(s, i) for s, uses in SIZED.items() for i in range(len(uses))])
def test_it_takes_symbolic_sizes(spelling: str, number: int) -> None:
    model = OfSize(spelling, number)
    imported = import_torch(model, (torch.zeros(5),), dynamic_shapes={"x": {0: Dim("n", max=40)}})
    verify(imported.module, check)
    assert not imported.module.records, "no value is ruled out"
    for n in (1, 2, 7, 40):
        module = specialize(imported.module, {"n": n})
        verify(module, check)
        x = torch.zeros(n)
        found = imported.rebuild(interpret(module.main, {**imported.tensors, **imported.flatten((x,), {})}))
        torch.testing.assert_close(found, model(x))


def test_every_spelling_has_a_call() -> None:
    missing = set(aten_spellings()) - set(CALLS) - DRAWN - set(SIZED)
    assert not missing, f"add a row to tests/ops/aten_calls.py for {sorted(missing)}"
    assert not set(CALLS) - set(aten_spellings())


@pytest.mark.drawn(8)
@pytest.mark.parametrize("start", range(0, len(CASES), TOGETHER))
def test_they_mean_what_torch_means(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[str] = []
    convert = lambda name, of: converted.append(f"complex.{name}" if of else name) or aten_of(name, of)  # noqa: E731
    monkeypatch.setattr(graph, "aten_of", convert)
    cases = CASES[start : start + TOGETHER]
    model = Several([OneOp(spelling, CALLS[spelling][number]) for spelling, number in cases])
    imported = import_torch(model, model.inputs)
    verify(imported.module, check)
    inputs = {**imported.tensors, **imported.flatten(model.inputs, {})}
    found = imported.rebuild(interpret(imported.module.main, inputs))
    for (spelling, number), results, op in zip(cases, found, model.ops, strict=True):
        assert spelling in converted
        for a, b in zip(tree_leaves(results), tree_leaves(op(*op.inputs)), strict=True):
            case = f"{spelling}, call {number}: "
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda text, case=case: case + text)


RESULTS = {
    f"{name}.{kind}": 1
    for name, kind in (
        *(("embedding_bag", kind) for kind in ("default", "padding_idx")),
        *((name, "default") for name in ("_embedding_bag", "_embedding_bag_forward_only")),
    )
}
"""How many results the spelling has of an op whose others are for torch's own backward."""


class OneOp(torch.nn.Module):
    """Applies one ATen op to its inputs; an op that works in place gets a copy of the first.

    Complex tensors come in and go out as real ones.
    """

    def __init__(self, spelling: str, call: Call) -> None:
        super().__init__()
        name = spelling.removeprefix("complex.") if spelling.count(".") > 1 else spelling
        self.op: Any = operator.attrgetter(name if name.count(".") > 1 else f"aten.{name}")(torch.ops)
        self.in_place = self.op._schema.is_mutable
        self.results = RESULTS.get(name)
        self.args, self.kwargs = call
        generator = torch.Generator().manual_seed(0)
        texts = [x for x in tree_leaves(call) if is_type(x)]
        self.complex = [text.startswith("c") for text in texts]
        self.inputs = tuple(draw(re.sub(r"^c(.*)]", r"f\1,2]", text), generator) for text in texts)

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = [torch.view_as_complex(x) if c else x for x, c in zip(inputs, self.complex, strict=True)]
        rest = iter([x.clone() for x in given] if self.in_place else given)
        args, kwargs = tree_map(lambda x: next(rest) if is_type(x) else x, (self.args, self.kwargs))
        found = self.op(*args, **kwargs)
        found = found if self.results is None else found[: self.results]
        return tree_map(lambda x: torch.view_as_real(x.resolve_conj()) if x.is_complex() else x, found)


class Several(torch.nn.Module):
    """Applies several ops, each to inputs of its own."""

    def __init__(self, ops: list[OneOp]) -> None:
        super().__init__()
        self.ops = torch.nn.ModuleList(ops)
        self.inputs = tuple(x for op in ops for x in op.inputs)

    def forward(self, *inputs: torch.Tensor) -> list[Any]:
        rest = iter(inputs)
        return [op(*(next(rest) for _ in op.inputs)) for op in self.ops]


def is_type(x: Any) -> bool:
    return isinstance(x, str) and "[" in x
