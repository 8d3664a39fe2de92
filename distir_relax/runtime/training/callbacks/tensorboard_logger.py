"""TensorBoard log of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.callback import Callback, RunInfo, StepResult
from distir_relax.runtime.training.callbacks.measurements import evaluation_measurements, step_measurements
from distir_relax.runtime.training.callbacks.optional_package import check_installed


class TensorBoardLogger(Callback):
    """Scalars in a folder that TensorBoard reads: ``train/loss``, ``evaluation/loss``, ... by step.

    A resumed run replaces the scalars of the steps after its checkpoint. Raises RunError without the package
    `tensorboard`.
    """

    def __init__(self, folder: str | Path) -> None:
        check_installed("tensorboard", str(folder))
        self.folder = Path(folder)
        self._writer: Any = None
        self._unit = ""

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._unit = run.unit
        with self._writing():
            self._writer = SummaryWriter(str(self.folder), purge_step=run.step + 1 if run.step else None)

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        measurements = step_measurements(result, self._unit)
        self._write({f"train/{name}": value for name, value in measurements.items()}, result.step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        self._write(evaluation_measurements(metrics), step)

    def close(self) -> None:
        """See `Callback`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._writing():
                writer.close()

    def _write(self, values: Mapping[str, float], step: int) -> None:
        with self._writing():
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise RunError for an error of the disk, also one of the thread that writes, which later calls raise."""
        try:
            yield
        except OSError as wrong:
            raise RunError(f"cannot write the log: {wrong.strerror}", str(self.folder)) from None
