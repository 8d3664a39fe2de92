"""Arguments of other training loops: transformers' `TrainingArguments`, and the `Trainer` of Lightning.

They are read by their attributes; transformers is imported if its arguments are passed, Lightning is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch.lightning_trainer import settings_of_lightning
from distir_relax.frontends.torch.trainer_settings import TrainerSettings
from distir_relax.frontends.torch.transformers_arguments import settings_of_transformers

if TYPE_CHECKING:
    import torch


def read_arguments(arguments: Any, model: torch.nn.Module, steps_per_epoch: int | None) -> TrainerSettings:
    """Return the settings of `transformers.TrainingArguments`, for a model, or of a `Trainer` of Lightning.

    Raises `ImportModelError` for another object, for an option or a callback that changes a run and has no equal here,
    by its name, and for epochs without `steps_per_epoch`.
    """
    if _is_of(arguments, "TrainingArguments", ("transformers",)):
        return settings_of_transformers(arguments, model, steps_per_epoch)
    if _is_of(arguments, "Trainer", ("pytorch_lightning", "lightning")):
        return settings_of_lightning(arguments, steps_per_epoch)
    raise ImportModelError(
        f"expected transformers.TrainingArguments or a lightning.Trainer, found {type(arguments).__name__}", "arguments"
    )


def _is_of(arguments: Any, name: str, packages: tuple[str, ...]) -> bool:
    return any(c.__name__ == name and c.__module__.split(".")[0] in packages for c in type(arguments).__mro__)
