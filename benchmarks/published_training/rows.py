"""Published throughputs of training on GPUs: `rows.csv`, one configuration a row."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

CSV = Path(__file__).with_name("rows.csv")

SOURCES = {
    "narayanan-1": (
        "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021, "
        "arXiv 2104.04473, table 1; microbatches and chunks are those of Megatron-LM's "
        "examples/academic_paper_scripts/sc21/run_table_1.sh"
    ),
    "narayanan-2": "the same, table 2: ZeRO-3 without model parallelism",
    "korthikanti-5": (
        "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv 2205.05198, "
        "tables 3 and 5: full recomputation, and selective recomputation with sequence parallelism"
    ),
    "korthikanti-6.3": "the same, section 6.3: 8-way data parallelism",
    "smith-2.4": (
        "Smith et al., Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B, 2022, arXiv 2201.11990, "
        "section 2.4"
    ),
    "mosaicml": (
        "MosaicML, llm-foundry, scripts/train/benchmarking/README.md, commit 8c8dd48: MPT of 1 to 70 billion "
        "parameters on at most 64 GPUs in bfloat16, all rows of 2,048 tokens; of 7 billion, those of 8,192 and 32,768"
    ),
}
"""Title and place of each source."""


@dataclass(frozen=True)
class Row:
    """A configuration, and its measured speed.

    `evidence`: ``seen`` if the figures were compared with a copy of the source, ``known`` if they are from memory.
    `global_batch` and `microbatch` are in samples, `microbatch` on a data-parallel rank. `recomputation`: ``none``,
    ``full`` (of blocks), or ``attention`` (of scores and their softmax). `attention` is ``fused`` into one kernel or
    ``unfused``.
    """

    name: str
    source: str
    evidence: str
    gpu: str
    gpus: int
    layers: int
    width: int
    heads: int
    words: int
    sequence: int
    global_batch: int
    microbatch: int
    data: int
    tensor: int
    pipeline: int
    chunks: int
    recomputation: str
    sequence_parallel: str
    zero: int
    attention: str
    measured: float
    unit: str
    note: str

    @property
    def seconds(self) -> float:
        """The measured seconds of a step."""
        match self.unit:
            case "seconds":
                return self.measured
            case "tokens/s":
                return self.global_batch * self.sequence / (self.gpus * self.measured)
            case "TFLOP/s, recomputation counted":
                return self._recomputed_flops / (self.gpus * self.measured * 1e12)
        raise ValueError(f"{CSV.name} has the unit {self.unit!r}")

    @property
    def _recomputed_flops(self) -> float:
        """Operations of a step, with a second forward: equation 3 of Narayanan et al."""
        tokens = self.global_batch * self.sequence
        by_layer = 96 * tokens * self.layers * self.width**2
        relative = 1 + self.sequence / (6 * self.width) + self.words / (16 * self.layers * self.width)
        return by_layer * relative

    @property
    def microbatches(self) -> int:
        """The number of microbatches of each data-parallel rank; the last may be smaller."""
        return -(-self.global_batch // (self.data * self.microbatch))

    @property
    def strategy(self) -> str:
        """The strategy of the row, D/T/P/K and options."""
        options = {
            "zero": self.zero,
            "checkpoint": {"full": "block", "attention": "selective"}.get(self.recomputation),
            "schedule": "interleaved" if self.chunks > 1 else "1f1b" if self.pipeline > 1 else None,
            "chunks": self.chunks if self.chunks > 1 else None,
        }
        text = f"{self.data}/{self.tensor}/{self.pipeline}/{self.microbatches}"
        text += "".join(f",{name}={value}" for name, value in options.items() if value)
        return text + (",sequence_parallel" if self.sequence_parallel == "yes" else "")

    @property
    def profile(self) -> str:
        """The name of the machine profile."""
        return f"dgx-{self.gpu.lower()}:{-(-self.gpus // 8)}"


def read_rows() -> Iterator[Row]:
    """Yield the rows of `rows.csv`."""
    kinds = {"int": int, "float": float, "str": str}
    with CSV.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield Row(**{field.name: kinds[str(field.type)](row[field.name]) for field in fields(Row)})
