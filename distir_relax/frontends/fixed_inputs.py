"""Inputs with a value that is fixed at compile time: they become constants, and control flow on them is decided."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError, RunError
from distir_relax.support import shown

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FixedInputs:
    """The inputs of `model` with fixed values, by name: numbers, truth values, lists of them, or tensors."""

    values: Mapping[str, Any]
    model: str

    def check_names(self, inputs: Sequence[str]) -> None:
        """Raise `ImportModelError` for a name that is none of the inputs."""
        for name in self.values:
            if name not in inputs:
                raise ImportModelError(
                    f"the model has no input {name!r} to be constant", self.model, f"its inputs are {', '.join(inputs)}"
                )

    def tensor(self, name: str, dtype: str, shape: Sequence[int] | None) -> torch.Tensor:
        """Return the value of an input of this type; a number fills the shape.

        A size of -1 is any, a shape of None too. Raises `ImportModelError` for a value that does not fit the type.
        """
        import torch

        expected = dtype if shape is None else f"{dtype} ({', '.join('any' if n < 0 else str(n) for n in shape)})"
        error = ImportModelError(
            f"expected {expected} for the constant {name!r}, found {shown(self.values[name])}", self.model
        )
        try:
            given = torch.as_tensor(self.values[name])
        except (TypeError, ValueError, RuntimeError):
            raise error from None
        sizes = shape if shape is not None and given.ndim else given.shape
        if len(sizes) != given.ndim or any(n not in (-1, m) for n, m in zip(sizes, given.shape, strict=True)):
            raise error
        value = given.to(getattr(torch, dtype))
        if not value.is_floating_point() and not torch.equal(value.to(given.dtype), given):
            raise error
        if shape is not None and not given.ndim:
            value = value.expand([1 if n < 0 else n for n in shape]).clone()
        return value

    def without(
        self, order: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call without those of fixed inputs; `order` are the names of all inputs.

        A call passes either all inputs, or only those that are not fixed. Raises `RunError` if a fixed input has
        another value.
        """
        names = [name for name in order if name not in self.values]
        if len(args) + len(kwargs) == len(order):
            names = list(order)
        passed = dict(zip(names, args, strict=False))
        for name in self.values:
            if name in passed or name in kwargs:
                self.check(name, passed[name] if name in passed else kwargs[name])
        rest = tuple(item for i, item in enumerate(args) if i >= len(names) or names[i] not in self.values)
        return rest, {name: item for name, item in kwargs.items() if name not in self.values}

    def bind(
        self, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call of a function with these `values` of fixed parameters.

        Raises TypeError for arguments that do not match the signature.
        """
        bound = signature.bind_partial(*args, **kwargs)
        arguments = {**bound.arguments, **values}
        # In the order of the parameters: a fixed one may precede others.
        bound.arguments = {name: arguments[name] for name in signature.parameters if name in arguments}
        return bound.args, bound.kwargs

    def check(self, name: str, value: Any) -> None:
        """Raise `RunError` if the value of an input differs from its fixed one."""
        import torch

        try:
            first, second = torch.as_tensor(self.values[name]), torch.as_tensor(value)
            # The model may declare more dims than the number has.
            same = (first.ndim == 0 or first.shape == second.shape) and bool((first == second).all())
        except (TypeError, ValueError, RuntimeError):
            same = self.values[name] == value
        if not same:
            raise RunError(
                f"the input {name!r} is {shown(self.values[name])} in the compiled model, found {shown(value)}",
                hint="leave it out, or compile the model again for this value",
            )


NONE_FIXED = FixedInputs({}, "")
