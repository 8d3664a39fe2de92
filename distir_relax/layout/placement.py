"""Placements of a tensor on a device mesh, one per mesh axis.

=================  ==========================================================================
``R``              replicated: every device along the axis has the whole tensor
``S[dim]``         sharded along ``dim``, with a cut chosen later
``S[dim: a|b]``    sharded along ``dim``: ``a`` elements on index 0 along the axis, ``b`` on index 1
``S[dim: 2:1]``    sharded along ``dim`` in proportion: twice as much on index 0 as on index 1
``S[dim: /64]``     sharded along ``dim`` at multiples of 64 elements; ``S[dim: 2:1/64]`` in proportion, too
``S[dim: chunk]``  sharded along ``dim`` into blocks of ``ceil(n / ranks)``, as in torch and TVM
``I[op]``          intermediate: each device has a term of a pending reduction (partial sum)
``Routed[dim]``    each device has all rows of ``dim``, only those of its own groups valid (data-dependent)
``At[i]``          only index ``i`` along the axis has it: an input or output of one pipeline stage
=================  ==========================================================================

A cut may have several segments, each split by itself: ``S[1: 3*(384|384)]`` is a fused QKV weight of
2304 columns whose three parts are each cut in two, so a device holds three slices, not one block.

``I`` is the TVM RFC's intermediate type; ``I_SUM``, ``P(sum)`` and ``Partial(sum)`` are accepted too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from distir_relax.errors import DistIRError, PlacementError
from distir_relax.layout.cut import Cut, Segment
from distir_relax.layout.symbolic_size import Symbol, parse_size

MAX_INTERVALS = 1 << 20
"""Maximum number of intervals of a cut: they are listed explicitly."""
REDUCTIONS = ("sum", "mean", "min", "max")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device along the axis has the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Sharded along `dim`. `cut` has the sizes; None leaves them to propagation.

    Without sizes, `chunk` requests ceil-sized blocks, `shares` sizes in proportion, and `multiple` shards that begin at
    multiples of so many elements.
    """

    dim: int
    cut: Cut | None = None
    chunk: bool = False
    shares: tuple[float, ...] = ()
    multiple: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dim, self.cut, self.chunk, self.shares, self.multiple)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.cut:
            return f"S[{self.dim}: {self.cut}]"
        how = "chunk" if self.chunk else ":".join(f"{share:.6g}" for share in self.shares)
        how += f"/{self.multiple}" if self.multiple > 1 else ""
        return f"S[{self.dim}: {how}]" if how else f"S[{self.dim}]"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each device along the axis has one term; reducing them with `reduction` gives the value."""

    reduction: str = "sum"

    def __str__(self) -> str:
        return f"I[{self.reduction}]"


@dataclass(frozen=True, slots=True)
class At:
    """Only the devices at `index` along the axis have the tensor, as shards in a distributed program."""

    index: int

    def __str__(self) -> str:
        return f"At[{self.index}]"


@dataclass(frozen=True, slots=True)
class Routed:
    """Each device along the axis has all rows of `dim`, of which only those of its own groups (experts) are valid.

    Only ops that dispatch rows create this placement, and only ops that combine rows end it.
    """

    dim: int

    def __str__(self) -> str:
        return f"Routed[{self.dim}]"


Placement = Replicate | Shard | Partial | Routed | At
R = Replicate()


def parse_placement(text: str, symbols: Sequence[Symbol] = ()) -> Placement:
    """Parse one placement, in our spelling, the RFC's, or torch's; `symbols` are those that its sizes may name.

    Raises `PlacementError` for any other text.
    """
    stripped = text.strip()
    if stripped in ("R", "Replicate()"):
        return R
    if stripped in ("I", "P"):
        return Partial("sum")
    if match := _SHARD.fullmatch(stripped):
        how, dim = (match["how"] or "").strip(), _number(match["dim"] or match["torch"], text)
        if how == "chunk":
            return Shard(dim, chunk=True)
        if match := _IN_MULTIPLES.fullmatch(how):
            shares = _parse_shares(match["shares"], text) if match["shares"] else ()
            return Shard(dim, shares=shares, multiple=_parse_multiple(match["multiple"], text))
        return Shard(dim, _parse_cut(how, text, symbols) if how else None)
    if match := _AT.fullmatch(stripped):
        return At(_number(match["index"], text))
    if match := _ROUTED.fullmatch(stripped):
        return Routed(_number(match["dim"], text))
    if match := _PARTIAL.fullmatch(stripped):
        reduction = (match["ours"] or match["rfc"] or match["torch"]).lower()
        if reduction in REDUCTIONS:
            return Partial(reduction)
    raise PlacementError(
        f"{text!r} is not a placement",
        hint="write R, S[dim], S[dim: 64|63], or I[sum] (also I[mean], I[min], I[max])",
    )


@lru_cache(maxsize=4096)
def parse_placements(text: str, symbols: tuple[Symbol, ...] = ()) -> tuple[Placement, ...]:
    """Parse comma-separated placements, one per mesh axis: ``"S[0], R"``."""
    return tuple(parse_placement(part, symbols) for part in re.split(r",(?![^(\[]*[)\]])", text))


def print_placements(placements: tuple[Placement, ...]) -> str:
    """The inverse of `parse_placements`."""
    return ", ".join(map(str, placements))


_SHARD = re.compile(r"S\[\s*(?P<dim>-?\d+)\s*(?::(?P<how>[^\]]+))?\]|(?:S|Shard)\((?:dim=)?(?P<torch>-?\d+)\)")
_AT = re.compile(r"At\[\s*(?P<index>\d+)\s*\]")
_ROUTED = re.compile(r"Routed\[\s*(?P<dim>\d+)\s*\]")
_PARTIAL = re.compile(r"I\[(?P<ours>\w+)\]|I_(?P<rfc>[a-zA-Z]+)|(?:P|Partial)\(['\"]?(?P<torch>\w+)['\"]?\)")
_IN_MULTIPLES = re.compile(r"(?P<shares>[^:/|]+(:[^:/|]+)+)?\s*(/(?P<multiple>[^:/|]*))?")
_SHARE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?(e[+-]?[0-9]{1,2})?")
_REPEATED = re.compile(r"(?:(?P<repeat>[\w ]+|\(.*\))\s*\*\s*)?\((?P<sizes>.*)\)", re.ASCII)


def _parse_cut(text: str, spec: str, symbols: Sequence[Symbol]) -> Cut:
    known = {symbol.name: symbol for symbol in symbols}

    def size(part: str) -> int:
        return _number(part, spec) if part.strip().isdecimal() else parse_size(part, known)

    segments = []
    for part in _split(text, "+"):
        match = _REPEATED.fullmatch(part.strip())
        if match and (match["repeat"] is None or "|" not in match["repeat"]) and _is_balanced(match["sizes"]):
            repeat, sizes = match["repeat"] or "1", match["sizes"]
        else:
            repeat, sizes = "1", part
        try:
            segments.append(Segment(size(repeat), tuple(map(size, _split(sizes, "|")))))
        except PlacementError:
            raise
        except DistIRError as error:
            hint = error.hint or "write S[1: 64|63]"
            raise PlacementError(
                f"{spec[:60]!r} is not a placement: cannot read the sizes {text[:60]!r}", hint=hint
            ) from None
    if len({len(s.sizes) for s in segments}) > 1:
        raise PlacementError(f"{spec!r}: every segment must list one size per device along the axis")
    if sum(s.repeat for s in segments if isinstance(s.repeat, int)) > MAX_INTERVALS:
        raise PlacementError(f"{spec[:60]!r}: expected at most {MAX_INTERVALS:,} intervals of a dim")
    return Cut(tuple(segments))


def _split(text: str, mark: str) -> list[str]:
    """Split a text at a mark outside of parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _is_balanced(text: str) -> bool:
    """Whether every parenthesis that a text closes is opened in it."""
    depths = list(accumulate((letter == "(") - (letter == ")") for letter in text))
    return min(depths, default=0) >= 0


def _parse_shares(text: str, spec: str) -> tuple[float, ...]:
    parts = [part.strip() for part in text.split(":")]
    shares = tuple(float(part) for part in parts if _SHARE.fullmatch(part))
    if len(shares) < len(parts) or not all(1e-6 <= share <= 1e6 for share in shares):
        raise PlacementError(
            f"{spec[:60]!r} is not a placement: cannot read the shares {text[:30]!r}",
            hint="write S[0: 2:1], numbers between 1e-6 and 1e6",
        )
    return shares


def _parse_multiple(text: str | None, spec: str) -> int:
    if text is None:
        return 1
    number = text.strip()
    if not (number.isascii() and number.isdecimal() and len(number) <= 9 and int(number)):
        raise PlacementError(
            f"{spec[:60]!r} is not a placement: cannot read {text[:30]!r}",
            hint="write S[0: /64], so that shards begin at multiples of 64 elements",
        )
    return int(number)


def _number(text: str, spec: str) -> int:
    if len(text.strip()) > 18:
        raise PlacementError(f"{spec[:60]!r} is not a placement: {text[:30]!r} is larger than any dim")
    return int(text)
