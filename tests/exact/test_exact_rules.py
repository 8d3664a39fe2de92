"""Ops in parts give the numbers of the whole op, in exact arithmetic: factor rules, linearity and `Split.expand`."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from distir_relax.layout import DeviceMesh
from distir_relax.ops import OpDef, evaluate, lookup
from tests.exact.exact_numbers import OMEGA, Field, Numbers, P, Q, simplest
from tests.exact.exact_rules import Task, run
from tests.exact.exact_tensors import Exact, drawn, lifted
from tests.ops.samples import of
from tests.ops.validator import MESHES, SAMPLES, Setting, validate, validated

FOREIGN = {"call_tir", "call_dps_packed"}
"""Ops that run machine code: they have no exact form."""
TRUNCATING = {"astype", "image.grid_sample"}
"""Ops that truncate floats to integers, which is a function without properties of exact numbers."""


@pytest.mark.drawn(33)
@pytest.mark.parametrize("name", sorted({name for name, _ in validated()}))
def test_no_combination_is_wrong(name: str) -> None:
    """A draw of the combinations of each sample on 3 devices; `make exact` runs all of them."""
    for number in range(len(SAMPLES[name])):
        if (name, number) not in validated():
            continue
        outcome = run(Task(name, number, MESHES[1], 2))
        assert not outcome.wrong
        assert bool(outcome.unsupported) == (name in FOREIGN), outcome.unsupported


def is_wrong(name: str, number: int, mesh: DeviceMesh) -> tuple[bool, bool]:
    """Whether a mistake in the entry of an op is found in floats, and in exact arithmetic."""
    return bool(validate(name, number, mesh)[0]), bool(run(Task(name, number, mesh)).wrong)


def test_mistakes_below_the_tolerance_of_floats_are_found(change: Callable[..., OpDef]) -> None:
    """An epsilon that is larger on shards, and a mean over a little more than all elements."""
    change("nn.rms_norm", split={"localize": lambda attrs, types, results: {
        **attrs, "epsilon": attrs["epsilon"] * (1 + 1e-9)}})  # fmt: skip
    assert is_wrong("nn.rms_norm", 0, MESHES[0]) == (False, True)
    expand = lookup("mean").split.expand["*"]

    def of_more(x: Any) -> Any:
        (mean,) = expand(x)
        return (x.emit("multiply", mean, x.emit("constant", value=1 - 1e-10, dtype="float64")),)

    change("mean", split={"expand": {"*": of_more}})
    assert is_wrong("mean", 1, MESHES[1]) == (False, True)


def test_padding_that_is_nearly_neutral_is_found(change: Callable[..., OpDef]) -> None:
    """A device without elements gives a maximum that is less than all floats drawn, but not the lowest number."""
    expand = lookup("max").split.expand["*"]

    class Finite:
        """An expansion in which a large number is written for the lowest one."""

        def __init__(self, x: Any) -> None:
            self.x = x

        def __getattr__(self, name: str) -> Any:
            return getattr(self.x, name)

        def emit(self, name: str, *operands: Any, **attrs: Any) -> Any:
            changed = {k: -1e9 if isinstance(v, float) and v < -1e300 else v for k, v in attrs.items()}
            return self.x.emit(name, *operands, **changed)

    change("max", split={"expand": {"*": lambda x: expand(Finite(x))}})
    SAMPLES["max"].append(of("f64[2,31]", axis=(0,), keepdims=False))
    try:
        number = len(SAMPLES["max"]) - 1
        assert is_wrong("max", number, MESHES[1]) == (False, True)
    finally:
        SAMPLES["max"].pop()


def test_what_floats_find_is_found(change: Callable[..., OpDef]) -> None:
    change("nn.softmax", split={"rule": "a b c -> a b c"})
    assert is_wrong("nn.softmax", 0, MESHES[0]) == (True, True)
    change("nn.relu", semantics={"linear": (frozenset({0}),)})
    assert is_wrong("nn.relu", 0, MESHES[1]) == (True, True)


def test_the_field() -> None:
    """Its order is prime, as is that of the powers of `OMEGA`; a float stands for a simple fraction."""
    sympy = pytest.importorskip("sympy")
    assert sympy.isprime(P)
    assert sympy.isprime(Q)
    assert (P - 1) % Q == 0
    assert pow(OMEGA, Q, P) == 1 != OMEGA
    assert simplest(0.1, False) == simplest(1 - 0.9, False) == Fraction(1, 10)
    assert simplest(1e-5, False) == Fraction(1, 10**5) != simplest(1e-5 + 1e-14, False)
    assert simplest(float(torch.tensor(-1 / 3, dtype=torch.float32)), True) == Fraction(-1, 3)


def test_softmax_does_not_depend_on_a_shift() -> None:
    """Exponentials of sums are products, as for real numbers, and other functions have no such properties."""
    numbers = Field()
    x = drawn(numbers, torch.zeros(3, 5, dtype=torch.float64), "x")
    shift = drawn(numbers, torch.zeros(3, 1, dtype=torch.float64), "shift")

    def values(y: Exact) -> list[int]:
        return [numbers.values[i][0] for i in y.ids.reshape(-1).tolist()]

    assert values(torch.softmax(x - shift, 1)) == values(torch.softmax(x, 1))  # type: ignore[arg-type]
    assert values(torch.logsumexp(x, 1)) != values(torch.logsumexp(x + shift, 1))  # type: ignore[arg-type]
    assert values(torch.tanh(x + shift)) != values(torch.tanh(x) + torch.tanh(shift))  # type: ignore[arg-type]
    assert values((x + shift) * x) == values(x * x + x * shift)  # type: ignore[arg-type]


class Floats(Numbers[float]):
    """Floats, to compare exact tensors with torch's own."""

    is_ordered = True

    def of_fraction(self, value: Fraction) -> float:
        return float(value)

    def infinity(self, value: float) -> float:
        return value

    def function(self, name: str, *operands: float) -> float:
        tensors = [torch.tensor(x, dtype=torch.float64) for x in operands]
        one = torch.tensor(1.0, dtype=torch.float64)
        forms: dict[str, Callable[..., torch.Tensor]] = {
            "add": torch.add, "mul": torch.mul, "inv": torch.reciprocal, "inverse": lambda x: 1 - x,
            "gelu none": F.gelu, "gelu tanh": partial(F.gelu, approximate="tanh"),
            "slope of gelu none": partial(torch.ops.aten.gelu_backward, one),
            "slope of gelu tanh": partial(torch.ops.aten.gelu_backward, one, approximate="tanh"),
            "slope of silu": partial(torch.ops.aten.silu_backward, one), "truncate": torch.trunc,
            "div floor": partial(torch.div, rounding_mode="floor"),
            "div trunc": partial(torch.div, rounding_mode="trunc"),
        }  # fmt: skip
        return float((forms.get(name) or getattr(torch, name))(*tensors))

    def order(self, index: int) -> float:
        return self.values[index]


@pytest.mark.drawn(40)
@pytest.mark.parametrize("name", sorted({name for name, _ in validated()} - FOREIGN - TRUNCATING))
def test_exact_tensors_are_right(name: str) -> None:
    """With floats for numbers, the code of an op gives its result on torch's own tensors."""
    numbers = Floats()
    for number, sample in enumerate(SAMPLES[name]):
        if (name, number) not in validated():
            continue
        setting = Setting(name, sample, MESHES[0])
        expected = evaluate(setting.op, setting.operands)
        operands = [
            Exact(lifted(numbers, x), numbers, x.dtype) if x.is_floating_point() else x for x in setting.operands
        ]
        for found, whole in zip(evaluate(setting.op, operands), expected, strict=True):
            if isinstance(found, Exact):
                values = [numbers.values[i] for i in found.ids.reshape(-1).tolist()]
                found = torch.tensor(values, dtype=whole.dtype).reshape(whole.shape)
            torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
