"""Callbacks of training runs: logs, progress, and early stopping; ``dr.callbacks`` in a user's program."""

from distir_relax.runtime.training.callbacks.callback import Callback, Ended, RunInfo, StepResult
from distir_relax.runtime.training.callbacks.early_stopping import EarlyStopping
from distir_relax.runtime.training.callbacks.file_loggers import CSVLogger, JSONLogger
from distir_relax.runtime.training.callbacks.logger import logger
from distir_relax.runtime.training.callbacks.mlflow_logger import MLflowLogger
from distir_relax.runtime.training.callbacks.progress import Progress
from distir_relax.runtime.training.callbacks.python_logger import PythonLogger
from distir_relax.runtime.training.callbacks.reduce_on_plateau import ReduceOnPlateau
from distir_relax.runtime.training.callbacks.samples import Samples
from distir_relax.runtime.training.callbacks.tensorboard_logger import TensorBoardLogger
from distir_relax.runtime.training.callbacks.time_limit import TimeLimit
from distir_relax.runtime.training.callbacks.tracker import Tracker
from distir_relax.runtime.training.callbacks.wandb_logger import WandbLogger

__all__ = [
    "CSVLogger", "Callback", "EarlyStopping", "Ended", "JSONLogger", "MLflowLogger", "Progress", "PythonLogger",
    "ReduceOnPlateau", "RunInfo", "Samples", "StepResult", "TensorBoardLogger", "TimeLimit", "Tracker", "WandbLogger",
    "logger",
]  # fmt: skip
