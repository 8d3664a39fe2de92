"""One trial: a model with a few weights marked, compiled for 3 ranks and compared with eager."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from distir_relax import DeviceMesh, compile
from distir_relax.errors import DistIRError

RANKS = 3
TOLERANCE = 1e-4
_DETERMINED = 1e-2


@dataclass(frozen=True)
class Example:
    """A model in evaluation mode with random weights, a call of it, and its shardings: by default some weights."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shardings: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a model.

    `verdict` is ``right``, ``wrong``, ``refused`` (by an error for users), ``crashed``, ``slow`` (no answer in time),
    ``no export`` (`torch.export` cannot capture it), ``no example`` (no small configuration ran in eager torch) or
    ``undetermined`` (rounding alone makes eager's results others: it picks among equal values).
    `reason` is one line, `error` the largest difference relative to eager's largest value, `seconds` the whole trial.
    """

    library: str
    family: str
    verdict: str
    reason: str = ""
    error: float | None = None
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """The outcome as JSON data."""
        return asdict(self)


def try_model(library: str, family: str, build: Callable[[], Example]) -> Outcome:
    """Build a family's example and take it through export, compilation and a run on 3 ranks."""
    began = time.perf_counter()

    def outcome(verdict: str, reason: object = "", error: float | None = None) -> Outcome:
        return Outcome(library, family, verdict, _line(reason), error, round(time.perf_counter() - began, 1))

    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    try:
        example = build()
        expected = _eager(example)
    except Exception as problem:
        return outcome("no example", f"{type(problem).__name__}: {problem}")
    try:
        error = difference(expected, _on_ranks(example))
        if error <= TOLERANCE:
            return outcome("right", error=error)
        # Where a model picks the largest of nearly equal values, rounding decides.
        exact = _in_float64(example)
        own = difference(expected, wide := _eager(exact))
        if own > _DETERMINED:
            return outcome("undetermined", f"eager's own results in float32 and in float64 differ by {own:.1e}", error)
        if difference(wide, _on_ranks(exact)) <= TOLERANCE:
            return outcome("right", f"in float64; off by {error:.1e} in float32", error)
    except DistIRError as problem:
        return outcome("no export" if "torch.export cannot capture" in str(problem) else "refused", problem)
    except Exception as problem:
        return outcome("crashed", f"{type(problem).__name__}: {problem}")
    return outcome("wrong", f"off by {error:.1e}", error)


def _eager(example: Example) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(_tensors(example.model(*example.args, **example.kwargs)))


def _on_ranks(example: Example) -> list[torch.Tensor]:
    shardings = example.shardings or marked_weights(example.model)
    plan = compile(example.model, example.args, example.kwargs, shardings=shardings, mesh=DeviceMesh((RANKS,)))
    return list(_tensors(plan(*example.args, **example.kwargs)))


def _in_float64(example: Example) -> Example:
    def wide(item: Any) -> Any:
        floats = isinstance(item, torch.Tensor) and item.is_floating_point()
        return item.double() if floats else item

    args, kwargs = torch.utils._pytree.tree_map(wide, (example.args, dict(example.kwargs)))
    return replace(example, model=example.model.double(), args=args, kwargs=kwargs)


def marked_weights(model: torch.nn.Module) -> dict[str, str]:
    """Placements for four weights spread over the model: rows of one, columns of the next.

    They are patterns, of one name each: so a weight that this call does not use is no mistake.
    """
    names = [name for name, p in model.named_parameters() if p.dim() >= 2 and min(p.shape[:2]) >= 2]
    chosen = sorted({names[int(len(names) * part)] for part in (0.1, 0.35, 0.6, 0.85)}) if names else []
    return {f"{name[:-1]}[{name[-1]}]": f"S[{i % 2}]" for i, name in enumerate(chosen)}


def difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference of two calls' tensors, each relative to the largest finite value expected (at least 1)."""
    if [t.shape for t in expected] != [t.shape for t in found]:
        return float("inf")
    return max((_off(a, b) for a, b in zip(expected, found, strict=True)), default=0.0)


def _off(expected: torch.Tensor, found: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    if expected.is_complex():
        expected, found = torch.view_as_real(expected), torch.view_as_real(found)
    a, b = expected.double(), found.double()
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a[finite], b[finite]
    if not a.numel():
        return 0.0
    return float((a - b).abs().max() / max(1.0, float(a.abs().max())))


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result, in the order of `torch.export`'s."""
    for leaf in torch.utils._pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _line(reason: object) -> str:
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return lines[0][:240] if lines else ""
