"""What a bundle's manifest says: the mesh, the programs, and where every rank's piece of every tensor lies.

All classes are frozen and are checked when made, so a `Manifest` in hand is a consistent one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from distir_relax.errors import BundleError, PlacementError
from distir_relax.layout import DTYPES, DeviceMesh, Interval, intersect

FORMAT = 2
BACKENDS = ("torch", "tvm")
"""The backends that a bundle can hold programs for."""


@dataclass(frozen=True)
class Shard:
    """How one mesh axis splits one dim: `intervals[i]` are the `[start, stop)` pieces that index `i` along it holds."""

    axis: int
    dim: int
    intervals: tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class Tensor:
    """A global tensor and its layout. `placement` is for people; `shards` is what the runtime follows.

    `ranks` are those that hold some of it, where not all do: the tensors of a pipeline stage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: str = "R"
    shards: tuple[Shard, ...] = ()
    ranks: tuple[int, ...] | None = None

    def is_on(self, rank: int) -> bool:
        """Whether `rank` holds some of the tensor."""
        return self.ranks is None or rank in self.ranks

    def check(self, mesh: DeviceMesh) -> None:
        """Raise BundleError unless dtype, dims, axes and intervals fit the tensor and `mesh`."""
        if self.dtype not in DTYPES:
            raise BundleError(f"unknown dtype {self.dtype!r}", self.name, f"known: {', '.join(DTYPES)}")
        if self.ranks is not None and not all(0 <= rank < mesh.size for rank in self.ranks):
            raise BundleError(f"ranks {list(self.ranks)} are not all of the {mesh.size} there are", self.name)
        seen = set()
        for shard in self.shards:
            if not 0 <= shard.axis < len(mesh.shape) or not 0 <= shard.dim < len(self.shape):
                raise BundleError(
                    f"a shard of dim {shard.dim} along mesh axis {shard.axis} does not fit shape {self.shape} "
                    f"on a mesh of shape {mesh.shape}", self.name)  # fmt: skip
            if shard.axis in seen:
                raise BundleError(f"mesh axis {shard.axis} splits the tensor twice", self.name)
            seen.add(shard.axis)
            if len(shard.intervals) != mesh.shape[shard.axis]:
                raise BundleError(
                    f"{len(shard.intervals)} interval lists along mesh axis {shard.axis} of size "
                    f"{mesh.shape[shard.axis]}", self.name)  # fmt: skip
            size = self.shape[shard.dim]
            for start, stop in itertools.chain.from_iterable(shard.intervals):
                if not 0 <= start <= stop <= size:
                    raise BundleError(f"interval [{start}, {stop}) leaves dim {shard.dim} of size {size}", self.name)


@dataclass(frozen=True)
class Program:
    """One distinct rank program: the paths of its texts, and the order in which the Relax function takes arguments."""

    name: str
    torch: str | None = None
    relax: str | None = None
    arguments: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The program's files, relative to the bundle."""
        return tuple(path for path in (self.torch, self.relax) if path is not None)


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a bundle. Raises BundleError when its parts do not fit each other.

    `updates` leads from each weight that the programs change to the output that is its new value.
    """

    name: str
    mesh: DeviceMesh
    tail: str
    schedule_hash: str
    programs: tuple[Program, ...]
    ranks: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    updates: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        world = self.mesh.size
        if len(self.ranks) != world:
            raise BundleError(f"the mesh has {world} ranks, but programs are given for {len(self.ranks)}")
        if not all(0 <= index < len(self.programs) for index in self.ranks):
            raise BundleError(f"ranks {list(self.ranks)} name programs beyond the {len(self.programs)} there are")
        for tensor in (*self.inputs, *self.outputs, *self.weights):
            tensor.check(self.mesh)
        for tensor in self.outputs:
            _check_covered(tensor)
        for tensors in (self.inputs, self.outputs, self.weights):
            names = [tensor.name for tensor in tensors]
            if repeated := {name for name in names if names.count(name) > 1}:
                raise BundleError(f"names are given twice: {', '.join(sorted(repeated))}")

    def program_of(self, rank: int) -> Program:
        """The program that `rank` runs."""
        return self.programs[self.ranks[rank]]

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain dicts and lists, as in docs/bundle.md."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return {"format": plain.pop("format"), **plain}

    @classmethod
    def from_json(cls, data: object) -> Manifest:
        """Read what `to_json` gives. Raises BundleError naming the field that is missing or of the wrong type."""
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise BundleError("not a bundle's manifest: it has no format number")
        if data["format"] != FORMAT:
            raise BundleError(
                f"the bundle has format {data['format']}, this version reads format {FORMAT}",
                hint="compile the model again with this version, or run with the version that wrote it",
            )
        try:
            return cls(
                name=_text(data["name"]),
                mesh=DeviceMesh(_ints(data["mesh"]["shape"]), _texts(data["mesh"]["axes"])),
                tail=_text(data["tail"]),
                schedule_hash=_text(data["schedule_hash"]),
                programs=tuple(
                    Program(_text(p["name"]), p.get("torch"), p.get("relax"), _texts(p.get("arguments", ())))
                    for p in data["programs"]
                ),
                ranks=_ints(data["ranks"]),
                inputs=tuple(map(_tensor, data["inputs"])),
                outputs=tuple(map(_tensor, data["outputs"])),
                weights=tuple(map(_tensor, data.get("weights", ()))),
                updates={_text(k): _text(v) for k, v in data.get("updates", {}).items()},
                checksums={_text(k): _text(v) for k, v in data.get("checksums", {}).items()},
            )
        except KeyError as missing:
            raise BundleError(f"the manifest lacks the field {missing}") from None
        except PlacementError as wrong:
            raise BundleError(f"the manifest has a mesh that cannot be: {wrong.message}") from None
        except (TypeError, ValueError, AttributeError) as wrong:
            raise BundleError(f"the manifest has a field of the wrong type: {wrong}") from None


def local_intervals(tensor: Tensor, mesh: DeviceMesh, rank: int) -> list[list[Interval]]:
    """For each dim, the `[start, stop)` pieces that `rank` holds, in order; empty pieces are left out.

    Two mesh axes that split the same dim give the intersection of what each holds.
    """
    held: list[list[Interval]] = [[(0, size)] if size else [] for size in tensor.shape]
    coordinates = mesh.coordinates(rank)
    for shard in tensor.shards:
        held[shard.dim] = intersect(held[shard.dim], shard.intervals[coordinates[shard.axis]])
    return held


def local_shape(tensor: Tensor, mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
    """The shape of what `rank` holds of `tensor`, which is on it."""
    return tuple(sum(stop - start for start, stop in pieces) for pieces in local_intervals(tensor, mesh, rank))


def local_bytes(tensor: Tensor, mesh: DeviceMesh, rank: int) -> int:
    """The bytes of what `rank` holds of `tensor`."""
    return tensor.is_on(rank) * math.prod(local_shape(tensor, mesh, rank)) * DTYPES[tensor.dtype][1]


def _check_covered(tensor: Tensor) -> None:
    by_dim: dict[int, list[list[Interval]]] = {}
    for shard in tensor.shards:
        by_dim.setdefault(shard.dim, []).append([piece for pieces in shard.intervals for piece in pieces])
    for dim, splits in by_dim.items():
        for pieces in splits:
            reached = 0
            for start, stop in sorted(piece for piece in pieces if piece[0] < piece[1]):
                if start > reached:
                    break
                reached = max(reached, stop)
            if reached < tensor.shape[dim]:
                raise BundleError(f"no rank holds index {reached} of dim {dim} of this output", tensor.name)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _tensor(data: Mapping[str, Any]) -> Tensor:
    shards = tuple(
        Shard(_int(s["axis"]), _int(s["dim"]),
              tuple(tuple((_int(a), _int(b)) for a, b in pieces) for pieces in s["intervals"]))
        for s in data.get("shards", ())
    )  # fmt: skip
    ranks = data.get("ranks")
    return Tensor(
        _text(data["name"]), _text(data["dtype"]), _ints(data["shape"]), _text(data.get("placement", "R")), shards,
        None if ranks is None else _ints(ranks),
    )  # fmt: skip


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected a whole number >= 0, found {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return value


def _ints(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(_int(value) for value in values)


def _texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(_text(value) for value in values)
