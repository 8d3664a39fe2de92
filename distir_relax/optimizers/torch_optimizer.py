"""Optimizers written for torch: a `torch.optim.Optimizer` class whose step is elementwise."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError
from distir_relax.ir import TensorType, Value
from distir_relax.ops import Builder, aten_of, cast
from distir_relax.optimizers.optimizer import Numbers, Optimizer
from distir_relax.optimizers.torch_trace import MOST_DIMS, Linear, Result, StepTrace, StepTracer, replace_leaves
from distir_relax.support.learning_rate import LearningRate

if TYPE_CHECKING:
    import torch

# Keyword arguments that determine where a result is stored, not its value.
_PLACEMENT_ARGUMENTS = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
# Factors of the second operand of ops such as `add` and `addcdiv`.
_FACTORS = ("alpha", "value")


class TorchOptimizer(Optimizer):
    """A step of ``kind(parameters, lr=lr, **options)``: ``dr.optim.TorchOptimizer(Lion, lr=1e-4, betas=(0.9, 0.98))``.

    The step is traced once for each dtype and number of dims, on a small parameter, and compared with the optimizer's
    own. It must be elementwise, linear in the learning rate, and the same for parameters of all sizes. `lr` may be a
    `Schedule`. Parameters that match one of the patterns `no_decay` have ``weight_decay=0``. Raises `DistIRError` for
    a class that is not an optimizer of torch, or has no such step.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer], lr: LearningRate = 1e-3, *,
        no_decay: str | tuple[str, ...] = (), **options: Any,
    ) -> None:  # fmt: skip
        import torch

        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            found = kind.__name__ if isinstance(kind, type) else f"an object of type {type(kind).__name__}"
            raise DistIRError(f"expected a class of torch.optim.Optimizer, found {found}", "TorchOptimizer")
        self.kind, self.lr, self.no_decay, self.options = kind, lr, no_decay, options
        self.check(lr=lr)
        if no_decay and "weight_decay" not in options:
            raise DistIRError("expected weight_decay, which no_decay is about, found none", kind.__name__)
        self._tracers = {True: StepTracer(kind, options), False: StepTracer(kind, {**options, "weight_decay": 0.0})}
        self._trace("float64", 2, True)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"TorchOptimizer({self.kind.__name__}, lr={self.lr!r}{options})"

    def __reduce__(self) -> Any:
        # Traces have ops of torch, which cannot be pickled.
        return partial(TorchOptimizer, self.kind, self.lr, no_decay=self.no_decay, **self.options), ()

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the names of the tensors in the optimizer's state of a parameter."""
        return tuple(self._trace("float64", 2, True).states)

    def states(self, parameter: TensorType) -> dict[str, TensorType]:
        """Return the types of the state: those of the parameter's shape, and scalars."""
        states = self._trace(parameter.dtype, len(parameter.shape), True).states
        return {n: TensorType(() if is_scalar else parameter.shape, dtype) for n, (is_scalar, dtype) in states.items()}

    def numbers(self, g: Builder, rate: Value, step: Value | None, dtype: str) -> Numbers:
        """Emit the numbers of the step that depend on the learning rate."""
        wide = cast(g, rate, "float64")
        linear: dict[Linear, None] = {}
        for dims in range(MOST_DIMS + 1):
            for decays in (True, False)[: 1 + bool(self.no_decay)]:
                # A step that cannot be traced is an error if there is such a parameter.
                with suppress(DistIRError):
                    linear |= dict.fromkeys(self._trace(dtype, dims, decays).linear)
        numbers: dict[str, Value] = {}
        for number in linear:
            scaled = g.emit("multiply", wide, g.constant(number.slope, "float64"))
            numbers[repr(number)] = cast(g, g.emit("add", scaled, g.constant(number.constant, "float64")), dtype)
        return numbers

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        decays = not self.no_decay or bool(self.decay_of(parameter))
        trace = self._trace(parameter.tensor.dtype, len(parameter.tensor.shape), decays)
        # In torch, ops write to tensors that have several names: each result is a list with the present value.
        cells: list[list[Any]] = [[value] for value in (parameter, gradient, *(state[name] for name in trace.states))]

        def resolve(x: Any) -> Any:
            if isinstance(x, Result):
                return cells[x.number][0]
            return numbers[repr(x)] if isinstance(x, Linear) else x

        for call in trace.calls:
            args, named = replace_leaves((call.args, dict(call.kwargs)), resolve)
            kwargs = {name: value for name, value in named.items() if name not in _PLACEMENT_ARGUMENTS}
            for name in _FACTORS:
                if isinstance(kwargs.get(name), Value):
                    factor = kwargs.pop(name)
                    args = (args[0], g.aten("mul.Tensor", args[1], factor), *args[2:])
            written = call.target._schema.is_mutable
            result = self._emit(g, str(call.target).removeprefix("aten."), written, args, kwargs)
            if written:
                cell = cells[call.args[0].number]
                cell[0] = g.aten("copy.default", cell[0], result)
                cells.append(cell)
            elif any(a.alias_info is not None for a in call.target._schema.returns):
                cells.append(cells[call.args[0].number])
            else:
                cells.append([result])
        return {name: cells[new.number][0] for name, new in zip(("", *trace.states), trace.new, strict=True)}

    @property
    def weight_decay(self) -> float:  # type: ignore[override]
        """The option of this name."""
        return float(self.options.get("weight_decay", 0.0))

    def _trace(self, dtype: str, dims: int, decays: bool) -> StepTrace:
        return self._tracers[decays].trace(dtype, dims)

    def _emit(self, g: Builder, spelling: str, written: bool, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name, _, overload = spelling.partition(".")
        functional = f"{name.removesuffix('_')}.{overload}" if written else spelling
        convert = aten_of(functional, False) or aten_of(spelling, False)
        if convert is None:
            raise DistIRError(f"the optimizer cannot be imported: there is no aten.{spelling}", self.kind.__name__)
        try:
            return convert(g, *args, **kwargs)
        except (NotImplementedError, TypeError, AttributeError) as error:
            reason = f"aten.{spelling} does not take a number that depends on the rate" if any(
                isinstance(x, Value) for x in kwargs.values()
            ) else f"aten.{spelling}: {error}"  # fmt: skip
            raise DistIRError(f"the optimizer cannot be imported: {reason}", self.kind.__name__) from None
