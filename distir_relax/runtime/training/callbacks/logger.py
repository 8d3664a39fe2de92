"""Choice of a logger by the name of its file, folder or server."""

from __future__ import annotations

import re
from pathlib import Path

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.callback import Callback
from distir_relax.runtime.training.callbacks.file_loggers import CSVLogger, JSONLogger
from distir_relax.runtime.training.callbacks.mlflow_logger import MLflowLogger
from distir_relax.runtime.training.callbacks.tensorboard_logger import TensorBoardLogger

_MLFLOW = "mlflow:"


def logger(target: str | Path) -> Callback:
    """Return the logger for ``FILE.csv``, ``FILE.jsonl``, a folder (TensorBoard), or ``mlflow:URI``.

    Raises RunError for another ending or another service, a file that cannot be created, and a missing package.
    """
    text = str(target)
    if text.startswith(_MLFLOW):
        return MLflowLogger(text.removeprefix(_MLFLOW) or None)
    if service := re.match(r"[A-Za-z][\w+.-]+:", text):
        raise RunError(
            f"expected a log that ends in .csv or .jsonl, a folder, or mlflow:URI, found {service[0]}", text,
            "write a dr.Callback for another service, and pass it with --callbacks",
        )  # fmt: skip
    path = Path(text)
    if path.suffix == ".csv":
        return CSVLogger(path)
    if path.suffix == ".jsonl":
        return JSONLogger(path)
    if path.is_dir() or text.endswith("/") or not path.suffix:
        return TensorBoardLogger(path)
    raise RunError(
        f"expected a log that ends in .csv or .jsonl, a folder, or mlflow:URI, found {path.suffix}", text,
        "a folder becomes a TensorBoard log; end its name with /",
    )  # fmt: skip
