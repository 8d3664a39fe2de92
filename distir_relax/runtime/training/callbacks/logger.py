"""Choice of a logger by the name of its file, folder or server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.callback import Callback
from distir_relax.runtime.training.callbacks.file_loggers import CSVLogger, JSONLogger
from distir_relax.runtime.training.callbacks.mlflow_logger import MLflowLogger
from distir_relax.runtime.training.callbacks.python_logger import NAME, PythonLogger
from distir_relax.runtime.training.callbacks.tensorboard_logger import TensorBoardLogger
from distir_relax.runtime.training.callbacks.wandb_logger import WandbLogger

_SERVICES: Mapping[str, Callable[[str], Callback]] = {
    "mlflow:": lambda rest: MLflowLogger(rest or None),
    "wandb:": lambda rest: WandbLogger(rest or None),
    "logging:": lambda rest: PythonLogger(rest or NAME),
}
"""The loggers that are no files, by the beginning of their targets."""
_EXPECTED = "a log that ends in .csv or .jsonl, a folder, mlflow:URI, wandb:PROJECT or logging:NAME"


def logger(target: str | Path) -> Callback:
    """Return the logger for ``FILE.csv``, ``FILE.jsonl``, a folder (TensorBoard), ``mlflow:URI``, ``wandb:PROJECT``, or
    ``logging:NAME``, a logger of Python's `logging`.

    Raises RunError for another ending or another service, a file that cannot be created, and a missing package.
    """
    text = str(target)
    for prefix, made in _SERVICES.items():
        if text.startswith(prefix):
            return made(text.removeprefix(prefix))
    if service := re.match(r"[A-Za-z][\w+.-]+:", text):
        raise RunError(
            f"expected {_EXPECTED}, found {service[0]}", text,
            "write a dr.callbacks.Tracker for another service, three methods, and pass it with --callbacks",
        )  # fmt: skip
    path = Path(text)
    if path.suffix == ".csv":
        return CSVLogger(path)
    if path.suffix == ".jsonl":
        return JSONLogger(path)
    if path.is_dir() or text.endswith("/") or not path.suffix:
        return TensorBoardLogger(path)
    raise RunError(
        f"expected {_EXPECTED}, found {path.suffix}", text, "a folder becomes a TensorBoard log; end its name with /"
    )
