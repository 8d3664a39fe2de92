"""Every factor rule against brute force: an op run whole, and run part by part as its rule says, must agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from samples import SAMPLES, Sample, draw

from distir_relax.errors import VerificationError
from distir_relax.ir import Op, TensorType, Value
from distir_relax.ops import BLOCKED, OF_PROGRAMS, PARALLEL, OpDef, Rule, Trait, entries, evaluate, infer, lookup

CASES = [(name, i) for name, samples in SAMPLES.items() for i in range(len(samples))]


def test_every_entry_has_a_sample() -> None:
    local = [
        entry
        for entry in entries()
        if Trait.ON_COMMUNICATOR not in entry.traits and entry.traits.isdisjoint(OF_PROGRAMS)
    ]
    missing = [entry.name for entry in local if entry.name not in SAMPLES]
    assert not missing, f"add a row to tests/ops/samples.py for {missing}"


def test_no_sample_without_an_entry() -> None:
    for name in SAMPLES:
        lookup(name)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_types_are_those_of_the_reference(name: str, number: int) -> None:
    case = Case(name, SAMPLES[name][number])
    assert [type_of(t) for t in case.whole] == list(case.results)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_each_factor_splits_as_the_rule_says(name: str, number: int) -> None:
    case = Case(name, SAMPLES[name][number])
    try:
        rule = case.entry.rule_for(case.types, case.attrs, case.results)
    except NotImplementedError:
        return  # an op of the distributed stage, whose operands are parts already
    assert [len(dims) for dims in rule.operands] == [len(t.shape) for t in case.types]
    for index, factor in enumerate(rule.factors):
        reduced = factor.kind not in (PARALLEL, BLOCKED)
        expanded = factor.name in case.entry.split.expand or (reduced and "*" in case.entry.split.expand)
        if factor.kind != BLOCKED and not expanded:
            case.check_split(rule, index)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_pending_sums_pass_through_linear_operands(name: str, number: int) -> None:
    case = Case(name, SAMPLES[name][number])
    for operands in case.entry.linear_sets(len(case.operands), case.attrs):
        shares = [0.6, 0.4] if case.operands[min(operands)].is_floating_point() else [3, -2]
        noise = {i: draw(case.sample.operands[i], case.generator) for i in operands}
        # Not 0.6 x and 0.4 x alone: those would let abs and relu pass.
        terms = [
            case.run([s * x + sign * noise[i] if i in operands else x for i, x in enumerate(case.operands)])
            for s, sign in zip(shares, (1, -1), strict=True)
        ]
        for whole, *parts in zip(case.whole, *terms, strict=True):
            torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 4), ()])
def test_broadcasting_does_not_remove_dims(shape: tuple[int, ...]) -> None:
    kind = TensorType((1, 1, 5, 1), "float32")
    with pytest.raises(VerificationError, match="has more dims than"):
        infer("broadcast_to", [kind], {"shape": shape})


class Case:
    """An op instance with drawn operands and its results on them."""

    def __init__(self, name: str, sample: Sample) -> None:
        self.entry: OpDef = lookup(name)
        self.sample, self.attrs = sample, sample.attrs
        self.generator = torch.Generator().manual_seed(0)
        self.operands = [draw(text, self.generator) for text in sample.operands]
        self.types = [type_of(t) for t in self.operands]
        self.results = infer(name, self.types, self.attrs)
        self.whole = self.run(self.operands)

    def run(self, operands: Sequence[torch.Tensor], attrs: object = None) -> tuple[torch.Tensor, ...]:
        values = tuple(Value(f"x{i}", type_of(t)) for i, t in enumerate(operands))
        return evaluate(Op(self.entry.name, values, (), self.attrs if attrs is None else attrs), operands)

    def check_split(self, rule: Rule, index: int) -> None:
        factor = rule.factors[index]
        most = math.ceil(2 * factor.size / 3)
        empty = () if factor.kind in ("max", "min") else (0,)  # these have no value for no elements
        for sizes in ((most, *empty, factor.size - most), (*empty, factor.size - most, most)):
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            parts = [self.part(rule, index, start, size) for start, size in zip(starts, sizes, strict=True)]
            for position, whole in enumerate(self.whole):
                pieces = [part[position] for part in parts]
                if factor.kind == PARALLEL and not any(index in dims for dims in rule.results[position]):
                    # The factor of another result: each device computes all of this one.
                    joined = pieces[0]
                    assert all(torch.equal(piece, joined) for piece in pieces)
                elif any(index in dims for dims in rule.results[position]):
                    joined = self.join(pieces, rule, index, position)
                else:
                    stacked = torch.stack(pieces)
                    joined = (
                        stacked.sum(0, dtype=stacked.dtype)
                        if factor.kind == "sum"
                        else getattr(stacked, f"a{factor.kind}")(0)
                    )
                torch.testing.assert_close(joined, whole, msg=f"split {factor} into {sizes}")

    def part(self, rule: Rule, index: int, start: int, size: int) -> tuple[torch.Tensor, ...]:
        sizes = [f.size for f in rule.factors]
        operands = [
            narrow(x, dims, index, sizes, start, size) for x, dims in zip(self.operands, rule.operands, strict=True)
        ]
        results = [
            type_of(narrow(x, dims, index, sizes, start, size))
            for x, dims in zip(self.whole, rule.results, strict=True)
        ]
        types = [type_of(t) for t in operands]
        attrs = self.entry.split.localize(self.attrs, types, results) if self.entry.split.localize else self.attrs
        assert list(infer(self.entry.name, types, attrs)) == results
        return self.run(operands, attrs)

    @staticmethod
    def join(pieces: list[torch.Tensor], rule: Rule, index: int, position: int) -> torch.Tensor:
        dims = rule.results[position]
        home = next(d for d, factors in enumerate(dims) if index in factors)
        sizes = [f.size for f in rule.factors]
        outer = math.prod(sizes[f] for f in dims[home][: dims[home].index(index)])
        inner = math.prod(sizes[f] for f in dims[home][dims[home].index(index) + 1 :])
        opened = [
            p.reshape(*p.shape[:home], outer, p.shape[home] // outer // inner, inner, *p.shape[home + 1 :])
            for p in pieces
        ]
        return torch.cat(opened, home + 1).flatten(home, home + 2)


def narrow(
    x: torch.Tensor, dims: Sequence[tuple[int, ...]], index: int, sizes: list[int], start: int, size: int
) -> torch.Tensor:
    """The part of `x` with elements `start` to `start + size` of factor `index`; all of it when it has none."""
    for dim, factors in enumerate(dims):
        if index in factors:
            place = factors.index(index)
            outer = math.prod(sizes[f] for f in factors[:place])
            inner = math.prod(sizes[f] for f in factors[place + 1 :])
            opened = x.reshape(*x.shape[:dim], outer, sizes[index], inner, *x.shape[dim + 1 :])
            return opened.narrow(dim + 1, start, size).flatten(dim, dim + 2)
    return x


def type_of(x: torch.Tensor) -> TensorType:
    return TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))
