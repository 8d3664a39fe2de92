"""TensorBoard log of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.measurements import EVALUATION
from distir_relax.runtime.training.callbacks.optional_package import check_installed
from distir_relax.runtime.training.callbacks.tracker import Tracker


class TensorBoardLogger(Tracker):
    """Scalars in a folder that TensorBoard reads: ``train/loss``, ``evaluation/loss``, ... by step.

    A resumed run replaces the scalars of the steps after its checkpoint. Raises RunError without the package
    `tensorboard`.
    """

    def __init__(self, folder: str | Path) -> None:
        check_installed("tensorboard", str(folder))
        self.folder = Path(folder)
        self._writer: Any = None

    def begin(self, name: str, parameters: Mapping[str, float | str]) -> None:
        """See `Tracker`."""
        from torch.utils.tensorboard.writer import SummaryWriter

        first = parameters["first_step"]
        with self._writing():
            self._writer = SummaryWriter(str(self.folder), purge_step=first if first != 1 else None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        with self._writing():
            for name, value in values.items():
                self._writer.add_scalar(name if name.startswith(EVALUATION) else f"train/{name}", value, step)

    def end(self, status: str) -> None:
        """See `Tracker`."""
        if self._writer is not None:
            with self._writing():
                self._writer.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise RunError for an error of the disk, also one of the thread that writes, which later calls raise."""
        try:
            yield
        except OSError as wrong:
            raise RunError(f"cannot write the log: {wrong.strerror}", str(self.folder)) from None
