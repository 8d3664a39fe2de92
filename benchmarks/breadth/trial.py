"""One trial: a model with a few weights marked, compiled for 3 ranks and compared with eager."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from distir_relax import DeviceMesh, compile
from distir_relax.errors import DistIRError

RANKS = 3
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Example:
    """A model in evaluation mode with random weights, and a call of it."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a model.

    `verdict` is ``right``, ``wrong``, ``refused`` (by an error for users), ``crashed``, ``slow`` (no answer in time),
    ``no export`` (`torch.export` cannot capture it) or ``no example`` (no small configuration ran in eager torch).
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
        with torch.no_grad():
            expected = list(_tensors(example.model(*example.args, **example.kwargs)))
    except Exception as problem:
        return outcome("no example", f"{type(problem).__name__}: {problem}")
    try:
        shardings = marked_weights(example.model)
        plan = compile(example.model, example.args, example.kwargs, shardings=shardings, mesh=DeviceMesh((RANKS,)))
        found = list(_tensors(plan(*example.args, **example.kwargs)))
    except DistIRError as problem:
        return outcome("no export" if "torch.export cannot capture" in str(problem) else "refused", problem)
    except Exception as problem:
        return outcome("crashed", f"{type(problem).__name__}: {problem}")
    error = difference(expected, found)
    return outcome(
        "right" if error <= TOLERANCE else "wrong", "" if error <= TOLERANCE else f"off by {error:.1e}", error
    )


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
