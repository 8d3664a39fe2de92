"""Random torch models of odd sizes and dtypes, with numbers as arguments: compiled, run, and compared with torch.

A model is text: one line a step, each an expression over the values before it, which the ordinary call of torch takes.
A number draws a model, so that one that fails is drawn again; fewer lines of it that fail too are looked for.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from distir_relax import DeviceMesh, annotate_sharding, compile
from distir_relax.errors import DistIRError
from distir_relax.frontends.torch.graph import REPORT_HINT
from distir_relax.proof import check_projection, check_schedule

SIZES = (0, 1, 3, 7)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTS = (torch.int64, torch.int32, torch.int8, torch.uint8)
NUMBERS = ("0", "1", "2", "3", "-1", "-2", "7", "0.5", "-1.5", "2.5", "True", "k", "r")

# Expressions over a value {a}, others {b} and {c}, dims {d} and {e}, numbers {n} and {m}, small integers {i} and {j}.
# They are parted by semicolons.
UNARY = """
-{a} ; ~{a} ; {a}.abs() ; {a}.sign() ; {a}.square() ; {a}.sqrt() ; {a}.exp() ; {a}.floor() ; {a}.round() ;
{a}.sum({d}) ; {a}.sum() ; {a}.mean({d}) ; {a}.mean() ; {a}.amax({d}) ; {a}.amin({d}, True) ; {a}.prod({d}) ;
{a}.max({d})[{i}] ; {a}.min() ; {a}.max() ; {a}.argmax({d}) ; {a}.argmin() ; {a}.any({d}) ; {a}.all() ; {a}.var({d}) ;
{a}.std({d}, correction={i}) ; torch.var_mean({a}, {d}, correction=0)[{i}] ; {a}.var() ; {a}.cumsum({d}) ;
{a}.softmax({d}) ; {a}.log_softmax({d}) ; {a}.logsumexp({d}) ; {a}.norm() ; {a}.norm(1, {d}) ; F.relu({a}) ;
F.gelu({a}) ; F.silu({a}) ; F.leaky_relu({a}) ; F.hardtanh({a}) ; F.softplus({a}) ; {a}.tanh() ;
{a}.to(torch.float32) ; {a}.half() ; {a}.bfloat16() ; {a}.long() ; {a}.int() ; {a}.bool() ; {a}.double() ;
{a}.to(torch.uint8) ; {a}.to(torch.int8) ; {a}.isnan() ; {a}.logical_not() ; {a}.clone() ; {a}.sigmoid() ;
{a}.clamp({n}, {m}) ; {a}.clamp(min={n}) ; {a}.clamp(max={n}) ; {a}.clamp({b}, {c}) ;
{a}.sort(dim={d}, stable=True)[{i}] ; {a}.flip({d}) ;
{a}.transpose({d}, {e}) ; {a}.reshape(-1) ; {a}.unsqueeze({d}) ; {a}.squeeze() ; {a}.T ;
{a}[{i}:{j}] ; {a}[::2] ; {a}[..., {i}] ; {a}[-{i}:] ; {a}[None] ; {a}.narrow({d}, {i}, {j}) ; {a}[{i}] ;
{a}.expand(3, *{a}.shape) ; {a}.repeat(2, *[1] * ({a}.dim() - 1)) ; {a}.roll({i}, {d}) ; {a}.tril() ; {a}.triu({i}) ;
F.pad({a}, ({i}, {j})) ; F.pad({a}, (1, 0), value={n}) ; {a}.split(2, {d})[0] ; {a}.chunk(3, {d})[-1] ;
{a}.topk({i}, {d})[0] ; {a}.flatten() ; {a}.unbind({d})[0] ; {a}.movedim({d}, {e}) ; {a} + {n} ; {a} - {n} ;
{n} - {a} ; {a} * {n} ; {a} / {n} ; {n} / {a} ; {a} // {n} ; {a} % {n} ; {a} ** {n} ; {a} & {i} ; {a} | {i} ;
{a} ^ {i} ; {a} << {i} ; {a} >> {i} ; {a} == {n} ; {a} < {n} ; {a} >= {n} ; torch.fmod({a}, {n}) ;
torch.div({a}, {n}, rounding_mode='trunc') ; torch.div({a}, {n}, rounding_mode='floor') ; torch.full_like({a}, {n}) ;
torch.zeros_like({a}) ; {a}.new_ones(3) ; torch.where({a} > {n}, {a}, {n}) ; F.one_hot({a}.long() % 3, 3) ;
F.layer_norm({a}, {a}.shape[-1:]) ; F.normalize({a}, dim={d}) ; {a}.masked_fill({a} < {n}, {m}) ;
annotate_sharding({a}, MESH, 'S[{i}]') ; annotate_sharding({a}, MESH, 'R') ; {a}.clone().add_({n}) ;
{a}.clone().clamp_({n}, {m})
"""
BINARY = """
{a} + {b} ; {a} - {b} ; {a} * {b} ; {a} / {b} ; {a} // {b} ; {a} % {b} ; {a} ** {b} ; {a} @ {b} ; {a} & {b} ;
{a} | {b} ; {a} ^ {b} ; {a} == {b} ; {a} < {b} ; {a} != {b} ; {a} << ({b} & 3) ; torch.maximum({a}, {b}) ;
torch.minimum({a}, {b}) ; torch.where({a} > {n}, {b}, {c}) ; torch.where({a}, {b}, {n}) ; torch.cat([{a}, {b}], {d}) ;
torch.stack([{a}, {a}], {d}) ; F.linear({a}, {b}) ; {a}.add({b}, alpha={n}) ; {a}.sub({b}, alpha={n}) ;
torch.addmm({a}, {b}, {c}, beta={n}) ; torch.fmod({a}, {b}) ; {a}[{b}.long() % {a}.shape[0]] ;
{a}.index_select({d}, {b}.long() % {a}.shape[{d}]) ; {a}.gather({d}, {b}.long() % 3) ;
{a}.scatter_add({d}, {b}.long() % 3, {c}) ; {a}.index_add({d}, {b}.long() % 3, {c}) ;
{a}.masked_fill({b} > {n}, {m}) ; torch.div({a}, {b}, rounding_mode='floor') ;
torch.div({a}, {b}, rounding_mode='trunc') ; {a}.lerp({b}, 0.5) ; torch.einsum('...i,...i->...', {a}, {b}) ;
F.scaled_dot_product_attention({a}, {b}, {b}) ; torch.addcmul({a}, {b}, {c}, value={n}) ; {a}.clone().add_({b}) ;
{a}.clone().copy_({b}) ; torch.logical_and({a}, {b}) ; torch.atan2({a}, {b}) ; {a}.dot({b})
"""


@dataclass(frozen=True)
class Model:
    """A model as text: its inputs ``x0``, ``x1``, … and numbers ``k`` and ``r``, and the expressions of ``v0``, …."""

    inputs: tuple[torch.Tensor, ...]
    numbers: dict[str, Any]
    lines: tuple[str, ...]
    ranks: int
    tail: str

    def __str__(self) -> str:
        kinds = [f"x{i}: {t.dtype} {tuple(t.shape)}" for i, t in enumerate(self.inputs)]
        lines = [f"v{i} = {line}" for i, line in enumerate(self.lines)]
        return "\n  ".join([f"{', '.join(kinds)}, {self.numbers}, {self.ranks} ranks, {self.tail}", *lines])


class Text(torch.nn.Module):
    """Runs a model's lines; gives the values that no line uses."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.scope = {
            "__builtins__": {},
            "torch": torch,
            "F": F,
            "annotate_sharding": annotate_sharding,
            "MESH": DeviceMesh((model.ranks,)),
        }
        self.code = [__import__("builtins").compile(line, f"<v{i}>", "eval") for i, line in enumerate(model.lines)]
        text = " ".join(model.lines)
        self.kept = [i for i in range(len(model.lines)) if f"v{i}" not in text]

    def forward(self, *tensors: torch.Tensor, k: int = 2, r: float = 0.5) -> list[torch.Tensor]:
        values = self.values(tensors, k, r)
        return [values[f"v{i}"] for i in self.kept]

    def values(self, tensors: Sequence[torch.Tensor], k: int = 2, r: float = 0.5) -> dict[str, torch.Tensor]:
        """What each line gives, and the inputs."""
        values: dict[str, Any] = {f"x{i}": t for i, t in enumerate(tensors)}
        for i, code in enumerate(self.code):
            values[f"v{i}"] = eval(code, self.scope, {**values, "k": k, "r": r})
        return values


def draw(seed: int) -> Model:
    """The model of a number: one to three inputs, and up to seven steps that torch takes as they are."""
    rng = random.Random(seed)
    base = [rng.choice(SIZES) for _ in range(3)]
    inputs = tuple(_tensor(rng, [n for n in base if rng.random() < 0.7]) for _ in range(rng.randint(1, 3)))
    numbers = {"k": rng.choice((2, -3, 0, True)), "r": rng.choice((0.5, -1.5))}
    model = Model(inputs, numbers, (), rng.choice((2, 3, 5)), rng.choice(("ragged", "pad")))
    for i, tensor in enumerate(inputs):
        dims = [d for d, n in enumerate(tensor.shape) if n > 1]
        if dims and rng.random() < 0.8:
            line = f"annotate_sharding(x{i}, MESH, 'S[{rng.choice(dims)}]')"
            model = replace(model, lines=(*model.lines, line))
    model = lengthen(rng, model, rng.randint(1, 7))
    return model if _runs(model) else draw(seed + 1_000_003)


def lengthen(rng: random.Random, model: Model, count: int) -> Model:
    """The model with up to `count` more steps that torch takes as they are."""
    wanted = len(model.lines) + count
    for _ in range(60):
        if len(model.lines) >= wanted:
            break
        longer = replace(model, lines=(*model.lines, _line(rng, model)))
        if _runs(longer):
            model = longer
    return model


def check(model: Model) -> str:
    """Compile and run `model`: ``right``, or the kind of `DistIRError` that it gave.

    Raises AssertionError for other numbers than torch's, and whatever else is no `DistIRError`.
    """
    module = Text(model).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = module(*_copies(model.inputs), **model.numbers)
        try:
            plan = compile(module, model.inputs, model.numbers, mesh=model.ranks, tail=model.tail)
            check_projection(plan.modules["distributed"], plan.modules["ranked"])
            check_schedule(plan.modules["sharded"], plan.modules["distributed"])
            found = plan(*_copies(model.inputs), **model.numbers)
        except DistIRError as error:
            if "exported the model incorrectly" in error.message or error.hint == REPORT_HINT:
                raise AssertionError(str(error)) from error
            return type(error).__name__
        for a, b in zip(found, expected, strict=True):
            if not _close(a, b):
                _check_nearly(model, module, found, expected)
                return "unstable"
    return "right"


def shrink(model: Model) -> Model:
    """A model of fewer lines that fails too."""
    for i in reversed(range(len(model.lines))):
        if any(f"v{i}" in line for line in model.lines):
            continue
        lines = [line for j, line in enumerate(model.lines) if j != i]
        for j in range(i, len(lines)):
            lines[j] = _renamed(lines[j], i)
        smaller = replace(model, lines=tuple(lines))
        if lines and fails(smaller):
            return shrink(smaller)
    return model


def fails(model: Model) -> str:
    """What is wrong with a model; nothing where all is well."""
    try:
        check(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _renamed(line: str, gone: int) -> str:
    for k in range(gone + 1, gone + 40):
        line = line.replace(f"v{k}", f"v{k - 1}")
    return line


def _tensor(rng: random.Random, shape: Sequence[int]) -> torch.Tensor:
    """Small multiples of a quarter, all of whose sums are exact; integers, and truth values."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    dtype = rng.choice((*FLOATS, *INTS, torch.float32, torch.int64, torch.bool))
    data = torch.randint(-9, 10, tuple(shape), generator=generator)
    if dtype.is_floating_point:
        return (data / 4).to(dtype)
    return data > 0 if dtype == torch.bool else (data.abs() if dtype == torch.uint8 else data).to(dtype)


def _line(rng: random.Random, model: Model) -> str:
    names = [f"x{i}" for i in range(len(model.inputs))] + [f"v{i}" for i in range(len(model.lines))] * 2
    a, b, c = rng.choice(names[-4:]), rng.choice(names), rng.choice(names)
    return rng.choice((UNARY if rng.random() < 0.65 else BINARY).split(";")).strip().format(
        a=a, b=b, c=c, d=rng.choice((-1, 0, 0, 1)), e=rng.choice((0, -1)),
        n=rng.choice(NUMBERS), m=rng.choice(NUMBERS), i=rng.choice((0, 1, 1, 2)), j=rng.choice((0, 1, 2, 3)),
    )  # fmt: skip


def _runs(model: Model) -> bool:
    """Whether torch takes the model, gives tensors of moderate size, and no infinity (which a sum in parts may not)."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            results = Text(model)(*_copies(model.inputs), **model.numbers)
    except Exception:  # whatever torch raises: this is no model
        return False
    return bool(results) and all(
        isinstance(t, torch.Tensor) and t.numel() < 5000 and not t.is_complex() and not _huge(t) for t in results
    )


def _huge(t: torch.Tensor) -> bool:
    numbers = t.double()[~t.isnan()] if t.is_floating_point() else t.double()
    return bool(numbers.numel()) and float(numbers.abs().max()) > 1e4


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    return torch.allclose(a.double(), b.double(), *_tolerance(a.dtype), equal_nan=True)


def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    return {torch.float64: (1e-9, 1e-9), torch.float32: (1e-4, 1e-4)}.get(dtype, (4e-2, 4e-2))


def _check_nearly(model: Model, module: Text, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raise AssertionError unless the model is as far from its results where its inputs are rounded otherwise."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape, f"v{module.kept[i]} has the shape {tuple(a.shape)}, expected {tuple(b.shape)}"
        assert a.dtype == b.dtype, f"v{module.kept[i]} is {a.dtype}, expected {b.dtype}"
    others = list(_rounded_otherwise(model, module))
    floats = [t.dtype for t in module.values(model.inputs, **model.numbers).values() if t.is_floating_point()]
    coarsest = max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        spread = torch.stack([(o[i].double() - b.double()).abs().nan_to_num(math.inf) for o in others]).amax(0)
        apart = (a.double() - b.double()).abs()
        apart = torch.where(a.isnan() & b.isnan(), 0.0, apart.nan_to_num(math.inf))
        rtol, atol = _tolerance(coarsest) if b.is_floating_point() else (0, 0)
        allowed = 20 * spread + atol + rtol * b.double().abs().nan_to_num(0)
        assert bool((apart <= allowed).all()), f"v{module.kept[i]} is {a}, expected {b}"


def _rounded_otherwise(model: Model, module: Text) -> Iterator[list[torch.Tensor]]:
    """The results of the model where its floating inputs are a little larger or smaller."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        inputs = []
        for t in model.inputs:
            if t.is_floating_point():
                noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
                t = (t.double() * (1 + noise * torch.finfo(t.dtype).eps * 2)).to(t.dtype)
            inputs.append(t.clone())
        yield module(*inputs, **model.numbers)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]
