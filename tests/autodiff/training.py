"""Models imported for training: programs with gradients, run whole and on ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import distir_relax as dr
from distir_relax.autodiff import Differentiate
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret import interpret
from distir_relax.ir import Module, verify
from distir_relax.ops import check
from distir_relax.runtime.execute import run_bundle


class Training:
    """The program of a model's loss and of all its parameters' gradients."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        self.imported: Imported = import_torch(model, args, kwargs, check=True, training=True)
        self.module: Module = Differentiate().run(Outline(self.imported.scopes).run(self.imported.module))
        verify(self.module, check)
        self.inputs = self.imported.flatten(args, dict(kwargs or {}))
        if seed is not None:
            self.inputs["seed"] = torch.tensor(seed)

    def whole(self) -> dict[str, torch.Tensor]:
        """The outputs on one device."""
        return interpret(self.module, {**self.imported.tensors, **self.inputs})

    def on_ranks(self, mesh: Any, shardings: Mapping[str, str], backend: str = "torch", tail: str = "ragged") -> Any:
        """The outputs of ranks that are threads."""
        tensors = {name: tensor.detach() for name, tensor in self.imported.tensors.items()}
        plan = dr.compile((self.module, tensors), shardings=shardings, mesh=mesh, tail=tail)
        return run_bundle(plan.bundle((backend,)), self.inputs, backend)
