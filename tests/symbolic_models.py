"""Random torch models with symbolic dims: compiled once, run at several sizes, and compared with torch.

Models are those of `tests.models`, over inputs whose dims are one of three symbols. A model that torch.export fixes to
the sizes of its example is refused; a call with sizes that violate a guard is too.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from distir_relax import Dim, compile
from distir_relax.errors import DistIRError, ImportModelError, RunError
from distir_relax.frontends.torch.graph import REPORT_HINT
from distir_relax.proof import check_projection, check_schedule
from tests.models import Model, Text, _check_nearly, _close, _copies, _runs, _tensor, lengthen

EXAMPLE = {"a": 5, "b": 7, "c": 11}
LARGEST = 13


@dataclass(frozen=True)
class SymbolicModel:
    """A model, and for each input the names of its dims, or their sizes."""

    model: Model
    dims: tuple[tuple[str | int, ...], ...]
    sizes: tuple[Mapping[str, int], ...]

    def __str__(self) -> str:
        return f"{self.model}\n  dims {self.dims}, sizes {[dict(s) for s in self.sizes]}"


def draw(seed: int) -> SymbolicModel:
    """Return the model of a number, with three choices of sizes: one has a 1, one sizes below the number of ranks."""
    rng = random.Random(seed)
    names = rng.sample(sorted(EXAMPLE), 2)
    dims = tuple(
        tuple(name if rng.random() < 0.8 else 3 for name in names if rng.random() < 0.85)
        for _ in range(rng.randint(1, 3))
    )
    inputs = tuple(_tensor(rng, shape) for shape in _shapes(dims, EXAMPLE))
    numbers = {"k": rng.choice((2, -3, 0)), "r": rng.choice((0.5, -1.5))}
    model = Model(inputs, numbers, (), rng.choice((2, 3, 5)), rng.choice(("ragged", "pad")))
    for i, shape in enumerate(dims):
        if shape and rng.random() < 0.8:
            line = f"annotate_sharding(x{i}, MESH, 'S[{rng.randrange(len(shape))}]')"
            model = replace(model, lines=(*model.lines, line))
    model = lengthen(rng, model, rng.randint(1, 5))
    sizes = (
        {name: rng.randint(1, LARGEST) for name in EXAMPLE},
        {name: rng.choice((1, 1, 2, 13)) for name in EXAMPLE},
        {name: rng.choice((2, 3, 4)) for name in EXAMPLE},
    )
    return SymbolicModel(model, dims, sizes) if _runs(model) else draw(seed + 1_000_003)


def check(drawn: SymbolicModel) -> Counter[str]:
    """Compile, and run at all sizes: how many calls are ``right``, or refused, and by what.

    Raises AssertionError for other numbers than torch's, and whatever else is no `DistIRError`.
    """
    model, found = drawn.model, Counter[str]()
    module = Text(model).eval()
    dynamic = {
        f"tensors_{i}": {dim: Dim(n, max=LARGEST) for dim, n in enumerate(shape) if isinstance(n, str)}
        for i, shape in enumerate(drawn.dims)
    }
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            plan = compile(
                module,
                model.inputs,
                model.numbers,
                mesh=model.ranks,
                tail=model.tail,
                dynamic_shapes=dynamic,
                check_import=False,
            )
            check_projection(plan.modules["distributed"], plan.modules["ranked"])
            check_schedule(plan.modules["sharded"], plan.modules["distributed"])
        except DistIRError as error:
            if error.hint == REPORT_HINT:
                raise AssertionError(str(error)) from error
            return Counter({f"compile: {error.message if isinstance(error, ImportModelError) else str(error)}": 1})
        for number, sizes in enumerate((EXAMPLE, *drawn.sizes)):
            inputs = _inputs(drawn, sizes, number)
            try:
                expected = module(*_copies(inputs), **model.numbers)
            except Exception:  # whatever torch raises at this size
                found["not for torch"] += 1
                continue
            try:
                results = plan(*_copies(inputs), **model.numbers)
            except RunError as error:
                found[f"run: {error}"] += 1
                continue
            for i, (a, b) in enumerate(zip(results, expected, strict=True)):
                assert a.shape == b.shape, f"{sizes}: v{module.kept[i]} is {tuple(a.shape)}, expected {tuple(b.shape)}"
                assert a.dtype == b.dtype, f"{sizes}: v{module.kept[i]} is {a.dtype}, expected {b.dtype}"
            if not all(_close(a, b) or _huge_spread(b) for a, b in zip(results, expected, strict=True)):
                _check_nearly(replace(model, inputs=inputs), module, results, expected)
            found["right"] += 1
    return found


def _huge_spread(t: torch.Tensor) -> bool:
    """Whether rounding may decide: infinities and NaN that depend on the order of a sum, and narrow floats."""
    if not t.is_floating_point() or t.dtype in (torch.float16, torch.bfloat16):
        return True
    return not bool(t.isfinite().all()) or float(t.abs().max() if t.numel() else 0) > 1e4


def fails(drawn: SymbolicModel) -> str:
    """What is wrong with a model; nothing where all is well."""
    try:
        check(drawn)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrink(drawn: SymbolicModel) -> SymbolicModel:
    """A model of fewer last lines that fails too."""
    for count in range(1, len(drawn.model.lines)):
        shorter = replace(drawn, model=replace(drawn.model, lines=drawn.model.lines[:count]))
        if fails(shorter):
            return shorter
    return drawn


def _shapes(dims: tuple[tuple[str | int, ...], ...], sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    return [tuple(sizes[n] if isinstance(n, str) else n for n in shape) for shape in dims]


def _inputs(drawn: SymbolicModel, sizes: Mapping[str, int], seed: int) -> list[torch.Tensor]:
    rng = random.Random(seed)
    return [
        _tensor(rng, shape).to(x.dtype) for shape, x in zip(_shapes(drawn.dims, sizes), drawn.model.inputs, strict=True)
    ]
