"""Traces of a step of a `torch.optim.Optimizer`: its ATen ops on one parameter, whose numbers may depend on the rate.

The step is traced at three rates, and after one and two steps. Numbers that differ between rates must be linear in the
rate; those that differ between steps are refused. The trace is then compared with the optimizer over four steps from a
new state, at other rates.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    import torch

_SIZES = 3, 5, 2, 4, 1, 2
MOST_DIMS = len(_SIZES)
"""The largest number of dims of a parameter."""
# Powers of two: slopes of numbers such as -rate are exact.
_RATES = 0.25, 0.5, 0.125
_CHECKED_RATES = 0.3, 0.07, 0.19, 0.11
_HINT = "use an optimizer such as dr.optim.AdamW, or write it as a dr.optim.Optimizer (docs/training.md#optimizers)"
# Ops of one operand that torch does not call pointwise, but which are for tensors of equal shapes.
_COPIES = (
    "detach", "alias", "clone", "_to_copy", "lift_fresh_copy", "copy_", "zero_", "fill_", "zeros_like", "ones_like",
    "full_like", "empty_like",
)  # fmt: skip


@dataclass(frozen=True)
class Linear:
    """A number that is linear in the learning rate."""

    constant: float
    slope: float

    def at(self, rate: float) -> float:
        """Return its value."""
        return self.constant + self.slope * rate


@dataclass(frozen=True)
class Result:
    """An argument: the parameter (0), its gradient (1), a state (2 and on), or the result of a call, in this order."""

    number: int


@dataclass(frozen=True)
class Call:
    """A call of an ATen op. Arguments are numbers, `Linear` or `Result`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class StepTrace:
    """A step: `states` maps names of state to whether it is a scalar, and its dtype; `new` has the results."""

    states: Mapping[str, tuple[bool, str]]
    calls: tuple[Call, ...]
    new: tuple[Result, ...]

    def at(self, rate: float) -> StepTrace:
        """Return the trace with the numbers of a learning rate."""
        calls = [
            Call(
                c.target,
                *replace_leaves((c.args, dict(c.kwargs)), lambda x: x.at(rate) if isinstance(x, Linear) else x),
            )
            for c in self.calls
        ]
        return StepTrace(self.states, tuple(calls), self.new)

    @property
    def linear(self) -> list[Linear]:
        """The numbers that depend on the learning rate."""
        found: dict[Linear, None] = {}
        for call in self.calls:
            replace_leaves(
                (call.args, dict(call.kwargs)), lambda x: found.setdefault(x) if isinstance(x, Linear) else x
            )
        return list(found)


class StepTracer:
    """The traces of an optimizer with some options, each made once."""

    def __init__(self, kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
        self._kind, self._options = kind, options
        self._made: dict[tuple[str, int], StepTrace] = {}
        self._firsts: list[tuple[str, StepTrace, StepTrace]] = []

    def trace(self, dtype: str, dims: int) -> StepTrace:
        """Trace the step of a parameter of a dtype and a number of dims, at most `MOST_DIMS`.

        Raises `DistIRError` in one line if its step is not elementwise, reads numbers from tensors, depends on the
        number of the step, is not linear in the learning rate, or begins with a state that is not zero.
        """
        if (dtype, dims) not in self._made:
            self._made[dtype, dims] = self._trace(dtype, dims)
        return self._made[dtype, dims]

    def _trace(self, dtype: str, dims: int) -> StepTrace:
        if dtype != "float64":
            # It is compared with the optimizer in float64.
            self.trace("float64", dims)
        first = self._traced(dtype, dims, _RATES[0], 1)
        # Most steps are the same for all dims.
        same = (found for other, one, found in self._firsts if other == dtype and _is_equal(first, one))
        found = next(same, None) or self._combined(first, dtype, dims)
        if dtype == "float64":
            _compare(self._kind, self._options, _SIZES[:dims], found)
        self._firsts.append((dtype, first, found))
        return found

    def _combined(self, first: StepTrace, dtype: str, dims: int) -> StepTrace:
        """Return the trace with numbers that depend on the rate."""
        later = self._traced(dtype, dims, _RATES[0], 2)
        if not _is_equal(first, later):
            raise _refused(self._kind, "its step depends on the number of steps in Python")
        second, third = (self._traced(dtype, dims, rate, 1) for rate in _RATES[1:])
        if not _forms(first) == _forms(second) == _forms(third):
            raise _refused(self._kind, "its ops depend on the learning rate")
        combined = _with_slopes(first, second)
        expected = _numbers(combined.at(_RATES[2]))
        if not all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(expected, _numbers(third), strict=True)):
            raise _refused(self._kind, "its step is not linear in the learning rate")
        return combined

    def _traced(self, dtype: str, dims: int, rate: float, steps: int) -> StepTrace:
        import torch

        return _traced(self._kind, self._options, (getattr(torch, dtype), _SIZES[:dims]), rate, steps)


def replace_leaves(item: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested lists, tuples and dicts with their leaves changed."""
    if isinstance(item, (list, tuple)):
        return type(item)(replace_leaves(x, change) for x in item)
    if isinstance(item, dict):
        return {key: replace_leaves(x, change) for key, x in item.items()}
    return change(item)


def _traced(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    like: tuple[Any, tuple[int, ...]],
    rate: float,
    steps: int,
) -> StepTrace:
    """Trace the step of a parameter `like` a dtype and a shape, after `steps` others."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            parameter, optimizer = _started(kind, options, like, rate)
            for _ in range(steps):
                _step(parameter, optimizer)
            state = optimizer.state[parameter]
            tensors = {str(name): x for name, x in state.items() if isinstance(x, torch.Tensor)}

            def step(parameter: torch.Tensor, gradient: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
                optimizer.param_groups[0]["params"] = [parameter]
                kept = {**copy.deepcopy(others), **dict(zip(tensors, values, strict=True))}
                optimizer.state = defaultdict(dict, {parameter: kept})
                parameter.grad = gradient
                optimizer.step()
                return [parameter, *(optimizer.state[parameter][name] for name in tensors)]

            others = {name: x for name, x in state.items() if name not in tensors}
            operands = [
                parameter.detach().clone(),
                torch.randn_like(parameter),
                *map(torch.clone, tensors.values()),
            ]
            module = make_fx(step)(*operands)
    except Exception as error:  # whatever the optimizer's code raises
        reads = "value out of a tracing tensor" in str(error)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _refused(kind, "its step reads a number from a tensor" if reads else reason) from None
    if wrong := [name for name, x in tensors.items() if x.shape not in ((), like[1])]:
        raise _refused(kind, f"its state {wrong[0]!r} has another shape than the parameter")
    states = {name: (x.shape != like[1], str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()}
    return StepTrace(states, *_calls(kind, module))


def _started(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], like: Any, rate: float) -> Any:
    import torch

    parameter = torch.nn.Parameter(torch.randn(like[1], dtype=like[0]))
    return parameter, kind([parameter], lr=rate, **options)  # type: ignore[call-arg]


def _step(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Make a step with a random gradient; return a copy of the gradient, which a step may change."""
    import torch

    parameter.grad = torch.randn_like(parameter)
    gradient = parameter.grad.clone()
    optimizer.step()
    return gradient


def _calls(kind: type[torch.optim.Optimizer], module: torch.fx.GraphModule) -> tuple[tuple[Call, ...], Any]:
    import torch

    results: dict[Any, Any] = {}
    calls: list[Call] = []
    inputs = sum(node.op == "placeholder" for node in module.graph.nodes)

    def resolve(item: Any) -> Any:
        return replace_leaves(item, lambda x: results[x] if isinstance(x, torch.fx.Node) else x)

    for node in module.graph.nodes:
        if node.op == "placeholder":
            results[node] = Result(len(results))
        elif node.op == "get_attr":
            constant = getattr(module, str(node.target))
            if constant.dim():
                raise _refused(kind, "its step uses a tensor that is neither the parameter's nor state")
            results[node] = constant.item()
        elif node.op == "output":
            return tuple(calls), resolve(tuple(node.args[0]))
        elif str(node.target).startswith("profiler."):
            results[node] = None
        else:
            target: Any = node.target
            name = str(target).removeprefix("aten.")
            if torch.Tag.pointwise not in target.tags and name.partition(".")[0] not in _COPIES:
                raise _refused(kind, f"aten.{name} is not elementwise")
            if name.startswith("lift_fresh_copy"):
                results[node] = resolve(node.args[0])
                continue
            calls.append(Call(target, resolve(tuple(node.args)), resolve(dict(node.kwargs))))
            results[node] = Result(inputs + len(calls) - 1)
    raise AssertionError("a graph has an output")


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _forms(trace: StepTrace) -> Any:
    """Return the trace without its numbers."""
    calls = [
        (c.target, replace_leaves((c.args, dict(c.kwargs)), lambda x: 0 if _is_number(x) else x)) for c in trace.calls
    ]
    return trace.states, calls, trace.new


def _numbers(trace: StepTrace) -> list[float]:
    """Return the numbers of a trace, in order."""
    found: list[float] = []
    for call in trace.calls:
        replace_leaves((call.args, dict(call.kwargs)), lambda x: found.append(x) if _is_number(x) else x)
    return found


def _is_equal(first: StepTrace, second: StepTrace) -> bool:
    return (_forms(first), _numbers(first)) == (_forms(second), _numbers(second))


def _with_slopes(first: StepTrace, second: StepTrace) -> StepTrace:
    """Return the trace in which numbers that differ between the rates are linear."""
    others = iter(_numbers(second))

    def change(x: Any) -> Any:
        if not _is_number(x):
            return x
        other = next(others)
        slope = (other - x) / (_RATES[1] - _RATES[0])
        return x if x == other else Linear(x - slope * _RATES[0], slope)

    calls: list[Call] = []
    for call in first.calls:
        args, kwargs = replace_leaves((call.args, dict(call.kwargs)), change)
        calls.append(Call(call.target, args, kwargs))
    return StepTrace(first.states, tuple(calls), first.new)


def _compare(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], shape: tuple[int, ...], trace: StepTrace
) -> None:
    """Raise `DistIRError` unless the trace, with a state of zeros, computes what the optimizer does."""
    import torch

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        parameter, optimizer = _started(kind, options, (torch.float64, shape), _CHECKED_RATES[0])
        values = [parameter.detach().clone()]
        for is_scalar, dtype in trace.states.values():
            values.append(torch.zeros(() if is_scalar else shape, dtype=getattr(torch, dtype)))
        for number, rate in enumerate(_CHECKED_RATES):
            for group in optimizer.param_groups:
                group["lr"] = rate
            gradient = _step(parameter, optimizer)
            values = _replay(trace, [values[0], gradient, *values[1:]], rate)
            if not torch.allclose(values[0], parameter.detach(), rtol=1e-9, atol=1e-9):
                reason = "it depends on the number of the step" if number else "its first state is not zero"
                raise _refused(kind, f"its step {number + 1} differs from the one that was traced: {reason}")


def _replay(trace: StepTrace, operands: Sequence[torch.Tensor], rate: float) -> list[torch.Tensor]:
    results = list(operands)
    for call in trace.at(rate).calls:
        args, kwargs = replace_leaves(
            (call.args, dict(call.kwargs)), lambda x: results[x.number] if isinstance(x, Result) else x
        )
        results.append(call.target(*args, **kwargs))
    return [results[result.number] for result in trace.new]


def _refused(kind: type[torch.optim.Optimizer], reason: str) -> DistIRError:
    return DistIRError(f"the optimizer cannot be imported: {reason}", kind.__name__, _HINT)
