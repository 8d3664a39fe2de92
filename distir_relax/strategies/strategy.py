"""Distribution strategy: degrees of parallelism, microbatches and memory options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from distir_relax.errors import DistIRError
from distir_relax.layout import DeviceMesh
from distir_relax.schedules import schedule_named

CHECKPOINTS = ("none", "block", "selective")
EXPERTS = ("hidden", "data", "tensor")
PLACEMENTS = ("rules", "auto")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a model is distributed: ``Strategy.parse("4/2/2/32,zero=1")`` is for 16 devices.

    `data`, `tensor`, `pipeline` and `microbatches` are the D/T/P/K of the DistIR paper. `schedule` is the order of
    pipeline tasks, `chunks` the number of stages per device. `zero` is what is sharded along the data axis: 1 the
    optimizer's state, 2 gradients too, 3 parameters too (Rajbhandari et al., ZeRO, 2020). `checkpoint` selects the
    activations that are recomputed in the backward: ``none``, all inside of a ``block``, or ``selective``, those of a
    block that are cheap to recompute (Korthikanti et al., 2022). With `sequence_parallel`, activations between blocks
    are split along the sequence over the tensor axis (same). `experts` of a mixture are split along their ``hidden``
    dim, like other layers, or by expert along the ``data`` or the ``tensor`` axis. `placements` selects the layouts
    within a stage: the ``rules`` of data and tensor parallelism, or ``auto``, the fastest layouts (`autosharding`);
    then the first two degrees are only the shape of the mesh.

    Raises `DistIRError` for a degree or a number of microbatches below one, and for an invalid value of an option: an
    unknown schedule, or chunks that it does not support; for options of ``rules`` together with ``placements=auto``.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    checkpoint: str = "none"
    sequence_parallel: bool = False
    experts: str = "hidden"
    placements: str = "rules"

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline, self.microbatches, self.chunks) < 1:
            raise DistIRError(f"the degrees of a strategy are at least 1, found {self}")
        if self.zero not in range(4):
            raise DistIRError(f"zero is 0, 1, 2 or 3, found {self.zero}", f"strategy {self}")
        if self.checkpoint not in CHECKPOINTS:
            raise DistIRError(f"checkpoint is {', '.join(CHECKPOINTS)}, found {self.checkpoint!r}", f"strategy {self}")
        try:
            schedule_named(self.schedule).check_chunks(self.chunks)
        except DistIRError as error:
            raise DistIRError(error.message, f"strategy {self}", error.hint) from None
        if self.experts not in EXPERTS:
            raise DistIRError(f"experts is {', '.join(EXPERTS)}, found {self.experts!r}", f"strategy {self}")
        if self.placements not in PLACEMENTS:
            raise DistIRError(f"placements is {', '.join(PLACEMENTS)}, found {self.placements!r}", f"strategy {self}")
        if self.placements == "auto" and (self.zero or self.sequence_parallel or self.experts != "hidden"):
            raise DistIRError(
                "placements=auto cannot be combined with zero, sequence_parallel or experts", f"strategy {self}",
                "remove them",
            )  # fmt: skip

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.data * self.tensor * self.pipeline

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh of one stage: data x tensor."""
        return DeviceMesh((self.data, self.tensor), ("data", "tensor"))

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Parse ``D/T/P/K``, followed by options: ``2/4/1/8,zero=1,checkpoint=block,sequence_parallel``.

        Raises `DistIRError` for other texts.
        """
        degrees, *options = (part.strip() for part in text.split(","))
        if not re.fullmatch(r"[0-9]+(/[0-9]+){3}", degrees):
            raise DistIRError(f"expected a strategy D/T/P/K such as 4/2/2/32, found {text!r}")
        if len(degrees) > 64:
            raise DistIRError("expected a strategy D/T/P/K such as 4/2/2/32, found numbers of too many digits")
        data, tensor, pipeline, microbatches = map(int, degrees.split("/"))
        return cls(data, tensor, pipeline, microbatches, **dict(_option(part, text) for part in options))

    def __str__(self) -> str:
        text = f"{self.data}/{self.tensor}/{self.pipeline}/{self.microbatches}"
        for name, default in _OPTIONS.items():
            value = getattr(self, name)
            if value != default:
                text += f",{name}" if value is True else f",{name}={value}"
        return text


_OPTIONS: Mapping[str, Any] = {f.name: f.default for f in fields(Strategy)[4:]}
_PARSERS: Mapping[type, Callable[[str], Any]] = {
    int: lambda text: int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None,
    str: lambda text: text or None,
    bool: {"": True, "true": True, "false": False, "1": True, "0": False}.get,
}


def as_strategy(strategy: Strategy | str) -> Strategy:
    """Return a strategy from its text or itself. Raises `DistIRError` for an invalid text."""
    return strategy if isinstance(strategy, Strategy) else Strategy.parse(strategy)


def _option(part: str, text: str) -> tuple[str, Any]:
    name, _, value = (word.strip() for word in part.partition("="))
    if name not in _OPTIONS:
        raise DistIRError(f"expected {', '.join(_OPTIONS)} after D/T/P/K, found {part!r}", f"strategy {text!r}")
    type_ = type(_OPTIONS[name])
    parsed = _PARSERS[type_](value.lower())
    if parsed is None:
        expected = {int: "a number", str: "a word", bool: "true or false"}[type_]
        raise DistIRError(f"expected {expected} for {name}, found {value!r}", f"strategy {text!r}")
    return name, parsed
