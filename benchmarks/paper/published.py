"""What the DistIR paper (arXiv 2111.05426) prints in its tables 1 to 4, to stand beside what is found here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Searched:
    """A row of table 1: a model, and how long its search was simulated, in minutes, on a machine of 56 cores."""

    model: str
    gigabytes: float
    configurations: int
    minutes: str


@dataclass(frozen=True)
class Best:
    """A row of table 2 or 3: the configuration that the paper's search found the best for a batch, or for all, and by
    how much it was faster, as measured, than pure data, tensor and pipeline parallelism; None where that did not
    fit."""

    model: str
    batch: int
    strategy: str
    data: float | None
    tensor: float | None
    pipeline: float | None

    @property
    def times(self) -> tuple[float | None, float | None, float | None]:
        """How many times as fast as pure data, tensor, pipeline."""
        return self.data, self.tensor, self.pipeline


@dataclass(frozen=True)
class Correlation:
    """A row of table 4: Spearman's correlation of simulated and measured throughput over random configurations."""

    model: str
    configurations: int
    spearman: float


TABLE_1 = (
    Searched("MLP 1B", 2.2, 75, "<1"),
    Searched("MLP 17B", 34.4, 75, "1"),
    Searched("MLP 103B", 206.2, 75, "2"),
    Searched("GPT-2 1.6B", 3.2, 1035, "35"),
    Searched("GPT-2 13B", 25.8, 1035, "58"),
    Searched("GPT-2 175B", 394.4, 1035, "138"),
)

TABLE_2 = (
    Best("MLP 1B", 128, "1/16/1/1", 7.5, 1.1, 21.7),
    Best("MLP 1B", 256, "1/16/1/1", 6.3, 1.1, 21.2),
    Best("MLP 1B", 512, "1/16/1/1", 4.1, 1.0, 12.9),
    Best("MLP 1B", 1024, "1/16/1/1", 2.9, 1.0, 9.5),
    Best("MLP 1B", 2048, "2/8/1/1", 2.2, 1.2, 7.2),
    Best("MLP 1B", 4096, "4/4/1/1", 1.7, 1.4, 5.1),
    Best("MLP 1B", 8192, "4/4/1/1", 1.3, 1.6, 3.6),
    Best("MLP 1B", 16384, "8/2/1/1", 1.1, 1.9, 2.7),
    Best("MLP 1B", 32768, "8/2/1/1", 1.0, 2.1, 2.3),
    Best("MLP 1B", 65536, "16/1/1/1", 1.0, None, 2.3),
    Best("MLP 1B", 131072, "16/1/1/1", 1.0, None, 2.4),
    Best("MLP 1B", 262144, "16/1/1/1", 1.0, None, 2.4),
    Best("MLP 17B", 128, "1/16/1/1", None, 1.1, 43.8),
    Best("MLP 17B", 256, "1/16/1/1", None, 1.0, 35.3),
    Best("MLP 17B", 512, "1/16/1/1", None, 1.0, 22.4),
    Best("MLP 17B", 1024, "1/16/1/1", None, 1.0, 15.6),
    Best("MLP 17B", 2048, "1/16/1/1", None, 1.0, 10.0),
    Best("MLP 17B", 4096, "2/8/1/1", None, 1.1, 6.1),
    Best("MLP 17B", 8192, "4/4/1/1", None, 1.2, 3.7),
    Best("MLP 17B", 16384, "4/4/1/1", None, None, 2.4),
    Best("MLP 17B", 32768, "2/4/2/8", None, None, 1.5),
    Best("MLP 17B", 65536, "4/2/2/8", None, None, 1.3),
    Best("MLP 17B", 131072, "4/2/2/32", None, None, None),
    Best("MLP 103B", 128, "1/16/1/1", None, 1.0, 61.7),
    Best("MLP 103B", 256, "1/16/1/1", None, 1.0, None),
    Best("MLP 103B", 512, "1/16/1/1", None, 1.0, None),
    Best("MLP 103B", 1024, "1/16/1/1", None, 1.0, None),
)

TABLE_3 = (
    Best("GPT-2 1.6B", 32768, "16/1/1/1", 1.0, 3.7, 2.9),
    Best("GPT-2 13B", 16384, "16/1/1/1", 1.0, 2.6, 2.0),
    Best("GPT-2 175B", 1024, "1/8/2/2", None, 1.3, 5.6),
)

TABLE_4 = (
    Correlation("MLP 1B", 94, 0.97),
    Correlation("MLP 17B", 94, 0.98),
    Correlation("MLP 103B", 71, 0.99),
    Correlation("GPT-2 1.6B", 94, 0.98),
    Correlation("GPT-2 13B", 75, 0.94),
    Correlation("GPT-2 175B", 78, 0.84),
)

THEIR_ERRORS = {"16/1/1/1": 0.33, "1/16/1/1": 0.54, "1/1/16/128": 1.31}
"""By how much the paper's own predictions of MLP 1B are off from what its authors measured: means over the batches of
a strategy, from the simulation results that they published."""
