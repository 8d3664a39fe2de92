"""Tensors of a trained model by its own names: taken from a state dict, and copied into a torch module."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distir_relax.checkpoints import common_prefix
from distir_relax.errors import CheckpointError
from distir_relax.frontends.imported_model import Imported
from distir_relax.support.units import listed

if TYPE_CHECKING:
    import torch

_OTHER = (
    "they may be of another model, or have names that transformers changes: load them with from_pretrained, and pass "
    "model.state_dict()"
)


@dataclass(frozen=True)
class ModelTensors:
    """The names of a model's tensors: those of `values` are weights of the program, others are not.

    `values` maps names of parameters, tied ones each, and of buffers that training changes, to the program's. Of them,
    `loss_names` belong to the loss, `buffers` are buffers, and `unsaved` those that a state dict does not have.
    `unused` are parameters that the loss does not depend on. `constants` are buffers that do not change, whose numbers
    the program contains.
    """

    values: Mapping[str, str]
    loss_names: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    unsaved: frozenset[str] = frozenset()
    unused: Mapping[str, torch.Tensor] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: torch.nn.Module, imported: Imported) -> ModelTensors:
        """Return the tensors of a model which was imported with its loss."""
        roles = {item.value.name: item.role for item in imported.module.main.inputs}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        values = {
            name: value
            for name, value in imported.names.items()
            if roles.get(value) == "parameter" or (roles.get(value) == "state" and name in {**buffers, **parameters})
        }
        saved = model.state_dict(keep_vars=True).keys()
        return cls(
            values,
            frozenset(values.keys() - parameters.keys() - buffers.keys()),
            frozenset(values.keys() & buffers.keys()),
            frozenset(values.keys() & buffers.keys() - saved),
            {name: p.detach().clone() for name, p in parameters.items() if name in imported.unused},
            {n: b.detach().clone() for n, b in buffers.items() if n not in values and n in saved and not b.is_meta},
        )

    @property
    def parameter_values(self) -> dict[str, str]:
        """The names of `values` that are parameters."""
        return {name: value for name, value in self.values.items() if name not in self.buffers}

    @property
    def model_values(self) -> dict[str, str]:
        """The names of `values` that are the model's, not its loss's."""
        return {name: value for name, value in self.values.items() if name not in self.loss_names}

    @property
    def saved_values(self) -> dict[str, str]:
        """The names of `values` that the model's state dict has."""
        return {name: value for name, value in self.model_values.items() if name not in self.unsaved}

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return (*self.values, *self.unused, *self.constants)

    def with_unused(self, tensors: Mapping[str, torch.Tensor]) -> ModelTensors:
        """Return the same with other unused parameters."""
        return replace(self, unused={**self.unused, **tensors})

    def match(
        self, tensors: Mapping[str, Any], program: Imported, optional: Collection[str], where: str, strict: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the values of the program, and the unused parameters, that tensors by the model's names have.

        They are converted to the dtypes of the weights. Tied weights need one of their names. Values that are
        `optional`, and those of the loss, may be missing. With `strict`, no other tensor is expected and none may be
        missing. Raises CheckpointError, with `where` the tensors come from, for tensors that do not fit.
        """
        import torch

        self._check_names(tensors, optional, where, strict)
        values: dict[str, torch.Tensor] = {}
        first: dict[str, str] = {}
        for name, value in self.values.items():
            if name not in tensors:
                continue
            found = _fitting(name, tensors[name], program.tensors[value], where)
            if value in values and not torch.equal(values[value], found):
                raise CheckpointError(
                    f"expected equal tensors for {first[value]!r} and {name!r}, which are tied, found different ones",
                    where, "compile a model in which they are not tied",
                )  # fmt: skip
            values[value], first[value] = found, first.get(value, name)
        for name, constant in self.constants.items():
            if name in tensors and not torch.equal(_fitting(name, tensors[name], constant, where), constant):
                raise CheckpointError(
                    f"the buffer {name!r} has other numbers than at compilation, which the program contains", where,
                    "load the tensors into the model, and compile it again",
                )  # fmt: skip
        unused = {n: _fitting(n, tensors[n], old, where) for n, old in self.unused.items() if n in tensors}
        return values, unused

    def _check_names(self, tensors: Mapping[str, Any], optional: Collection[str], where: str, strict: bool) -> None:
        if not tensors.keys() & set(self.names):
            prefix = common_prefix(self.names, tensors)
            raise CheckpointError(
                f"expected tensors by the model's names, such as {listed(list(self.values), 3)}, found "
                f"{listed(list(tensors), 3) or 'none'}", where,
                f"remove the prefix {prefix!r} of the names" if prefix else _OTHER,
            )  # fmt: skip
        if not strict:
            return
        if unknown := [name for name in tensors if name not in self.names]:
            near = difflib.get_close_matches(unknown[0], self.names, 1)
            raise CheckpointError(
                f"the model has no {listed(unknown, 3)}", where,
                f"did you mean {near[0]!r}? " * bool(near) + "strict=False ignores other names",
            )  # fmt: skip
        given = {value for name, value in self.values.items() if name in tensors}
        needed = {n: v for n, v in self.saved_values.items() if v not in given and v not in optional}
        if needed:
            raise CheckpointError(
                f"expected tensors for {listed(list(needed), 3)}, found none", where,
                "strict=False leaves them as they are",
            )  # fmt: skip


def copy_tensors(tensors: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Copy tensors by name into the parameters and buffers of a module, with their dtypes and devices.

    Raises CheckpointError, and changes nothing, if the module lacks one, has one in another shape or without data, or
    has parameters of other names.
    """
    import torch

    where = type(model).__name__
    parameters = dict(model.named_parameters(remove_duplicate=False))
    targets = {**dict(model.named_buffers(remove_duplicate=False)), **parameters}
    if missing := [name for name in tensors if name not in targets]:
        raise CheckpointError(f"the model has no {listed(missing, 3)}", where, "give the model that was compiled")
    if others := [name for name in parameters if name not in tensors]:
        raise CheckpointError(
            f"expected a model of the step's parameters, found {listed(others, 3)}, too", where,
            "give the model that was compiled",
        )  # fmt: skip
    for name, tensor in tensors.items():
        target = targets[name]
        if target.shape != tensor.shape or target.is_meta:
            found = "one without data" if target.is_meta else tuple(target.shape)
            raise CheckpointError(f"expected a tensor of {tuple(tensor.shape)} for {name!r}, found {found}", where)
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)


def _fitting(name: str, tensor: Any, expected: torch.Tensor, where: str) -> torch.Tensor:
    """Return a tensor in the dtype of another, on the CPU. Raises CheckpointError if it does not fit."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"expected a tensor for {name!r}, found {type(tensor).__name__}", where)
    if tensor.shape != expected.shape:
        raise CheckpointError(
            f"expected {tuple(expected.shape)} for {name!r}, found {tuple(tensor.shape)}", where, _OTHER
        )
    floats = tensor.is_floating_point(), expected.is_floating_point()
    if tensor.dtype != expected.dtype and floats != (True, True):
        raise CheckpointError(f"expected {expected.dtype} for {name!r}, found {tensor.dtype}", where)
    if tensor.is_meta:
        raise CheckpointError(f"expected data for {name!r}, found a tensor on the meta device", where)
    return tensor.detach().to("cpu", expected.dtype, copy=True).contiguous()
