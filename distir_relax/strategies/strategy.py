"""A distribution strategy: degrees of data, tensor and pipeline parallelism, and the number of microbatches."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distir_relax.errors import DistIRError


@dataclass(frozen=True, slots=True)
class Strategy:
    """D/T/P/K of the DistIR paper: ``Strategy.parse("4/2/2/32")`` is for 16 devices.

    Raises `DistIRError` for a degree or a number of microbatches below one.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline, self.microbatches) < 1:
            raise DistIRError(f"the degrees of a strategy are at least 1, found {self}")

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return self.data * self.tensor * self.pipeline

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read ``D/T/P/K``. Raises `DistIRError` for other texts."""
        if not re.fullmatch(r"\d+/\d+/\d+/\d+", text.strip()):
            raise DistIRError(f"expected a strategy D/T/P/K such as 4/2/2/32, found {text!r}")
        return cls(*map(int, text.strip().split("/")))

    def __str__(self) -> str:
        return f"{self.data}/{self.tensor}/{self.pipeline}/{self.microbatches}"
