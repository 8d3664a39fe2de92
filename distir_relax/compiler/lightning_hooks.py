"""Hooks of a Lightning module that a compiled step calls, as callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distir_relax.runtime.training.callbacks import Callback, StepResult

if TYPE_CHECKING:
    import torch


class BatchEndHook(Callback):
    """Calls `on_train_batch_end` of a module after each step, with the step's weights, which it may change.

    The module has the weights of the step afterwards. `outputs` has the loss, `batch_idx` counts the steps of the run,
    and `batch` is None: its tensors are on the ranks.
    """

    weights_every = 1

    def __init__(self, module: Any) -> None:
        self._module = module
        self._loss = 0.0

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        self._loss = result.loss

    def weights(self, step: int, tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `Callback`."""
        import torch

        self._module.load_state_dict(tensors, strict=False)
        self._module.on_train_batch_end({"loss": torch.tensor(self._loss, dtype=torch.float64)}, None, step - 1)
        present = self._module.state_dict()
        return {name: present[name] for name, before in tensors.items() if not torch.equal(present[name], before)}
