"""Weights & Biases log of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.optional_package import check_installed
from distir_relax.runtime.training.callbacks.tracker import FINISHED, Tracker


class WandbLogger(Tracker):
    """A run of a project of Weights & Biases: options as its config, measurements of steps and evaluations by ``step``.

    The project has the program's name unless another is passed; `options` are those of ``wandb.init``, such as ``id``
    and ``resume="allow"`` to continue a run. Its variables count, too: ``WANDB_MODE=offline`` writes files alone.
    Raises RunError without the package `wandb`, and for its errors.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        check_installed("wandb", f"wandb:{project or ''}")
        self.project, self.options = project, options
        self._run: Any = None

    def begin(self, name: str, parameters: Mapping[str, float | str]) -> None:
        """See `Tracker`."""
        import wandb

        try:
            self._run = wandb.init(project=self.project or name, config=dict(parameters), **self.options)
            # Steps of a resumed run may be smaller than the last one that was logged.
            self._run.define_metric("*", step_metric="step")
        except (wandb.Error, OSError, TypeError) as wrong:
            raise RunError(
                f"Weights & Biases reports an error: {wrong}", f"wandb:{self.project or ''}",
                "log in with wandb login, or set WANDB_MODE=offline",
            ) from None  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log({**values, "step": step})

    def end(self, status: str) -> None:
        """See `Tracker`."""
        if self._run is not None:
            self._run.finish(exit_code=int(status != FINISHED))
