"""Bundle manifest: the mesh, the programs, and the layout of every tensor.

All classes are frozen and validated on construction, so every `Manifest` is consistent.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from distir_relax.bundle.call_signature import CallManifest
from distir_relax.bundle.provenance import Provenance
from distir_relax.bundle.training_manifest import TrainingManifest
from distir_relax.errors import BundleError, DistIRError, PlacementError
from distir_relax.layout import (
    DTYPES,
    DeviceMesh,
    Guard,
    Interval,
    Symbol,
    SymbolicSize,
    evaluate_size,
    intersect,
    is_always,
    is_symbolic,
    parse_size,
    typical_value,
)
from distir_relax.support import MOST, Fields, check_name
from distir_relax.support.units import count

FORMAT = 11
BACKENDS = ("torch", "tvm")
"""The backends whose code a compilation checks."""


@dataclass(frozen=True)
class Shard:
    """Partition of a dim by a mesh axis: index `i` along the axis holds the `[start, stop)` pieces `intervals[i]`."""

    axis: int
    dim: int
    intervals: tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class Tensor:
    """A global tensor and its layout. `placement` is for display; the runtime uses `shards`. Sizes may be symbolic.

    `ranks` are the holders if not all ranks hold some of it: the tensors of a pipeline stage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: str = "R"
    shards: tuple[Shard, ...] = ()
    ranks: tuple[int, ...] | None = None

    def at(self, values: Mapping[str, int]) -> Tensor:
        """Return the tensor with these values of all symbols."""

        def evaluate(item: Any) -> Any:
            return tuple(map(evaluate, item)) if isinstance(item, tuple) else evaluate_size(item, values)

        shards = tuple(Shard(s.axis, s.dim, evaluate(s.intervals)) for s in self.shards)
        return replace(self, shape=evaluate(self.shape), shards=shards)

    def is_on(self, rank: int) -> bool:
        """Whether `rank` holds some of the tensor."""
        return self.ranks is None or rank in self.ranks

    def check(self, mesh: DeviceMesh) -> None:
        """Raise BundleError unless dtype, dims, axes and intervals fit the tensor and `mesh`."""
        if self.dtype not in DTYPES:
            raise BundleError(f"unknown dtype {self.dtype!r}", self.name, f"known: {', '.join(DTYPES)}")
        if math.prod(map(typical_value, self.shape)) * DTYPES[self.dtype][1] > MOST:
            raise BundleError(f"no machine holds a tensor of shape {self.shape}", self.name)
        if self.ranks is not None and not all(0 <= rank < mesh.size for rank in self.ranks):
            raise BundleError(f"expected ranks below {mesh.size}, found {list(self.ranks)}", self.name)
        if self.ranks is not None and (not self.ranks or tuple(sorted(set(self.ranks))) != self.ranks):
            raise BundleError(f"expected ranks in ascending order, found {list(self.ranks)}", self.name)
        axes = set()
        for shard in self.shards:
            if not 0 <= shard.axis < len(mesh.shape) or not 0 <= shard.dim < len(self.shape):
                raise BundleError(
                    f"a shard of dim {shard.dim} along mesh axis {shard.axis} does not fit shape {self.shape} "
                    f"on a mesh of shape {mesh.shape}", self.name)  # fmt: skip
            if shard.axis in axes:
                raise BundleError(f"mesh axis {shard.axis} splits the tensor twice", self.name)
            axes.add(shard.axis)
            if len(shard.intervals) != mesh.shape[shard.axis]:
                raise BundleError(
                    f"{len(shard.intervals)} interval lists along mesh axis {shard.axis} of size "
                    f"{mesh.shape[shard.axis]}", self.name)  # fmt: skip
            size = self.shape[shard.dim]
            for start, stop in itertools.chain.from_iterable(shard.intervals):
                bounds = ((0, start), (start, stop), (stop, size))
                if any(is_always(a, "<=", b) is False for a, b in bounds):
                    raise BundleError(f"interval [{start}, {stop}) leaves dim {shard.dim} of size {size}", self.name)
            for pieces in shard.intervals:
                for (_, stop), (start, _) in itertools.pairwise(pieces):
                    if is_always(start, "<", stop) is True:
                        raise BundleError(f"intervals that begin at {start} and end at {stop} overlap", self.name)


@dataclass(frozen=True)
class State:
    """What a program that continues a sequence keeps between calls: its layout before a call.

    If it `grows`, dim `dim` has one element per earlier position. Programs take the states after their inputs, and
    return their next values, with the same layout, after their outputs.
    """

    tensor: Tensor
    dim: int = 0
    grows: bool = True

    @property
    def output(self) -> str:
        """The output of the programs with its next value."""
        return f"{self.tensor.name}.next"


@dataclass(frozen=True)
class Encoder:
    """What an encoder-decoder model has besides: the encoder's `input`, and the token that its decoder begins with.

    The encoder is a bundle of its own, within the other. Its outputs are the next values of states that are the same in
    each call for a sequence.
    """

    input: Tensor
    start: int


@dataclass(frozen=True)
class Program:
    """One distinct rank program: the path of its torch module, if there is one, and the order of its arguments.

    The module is for reading: a rank runs one generated from the text of the ranked stage.
    """

    name: str
    torch: str | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Division:
    """Division of a user's input or output along `dim` into `parts`, the names of program inputs or outputs."""

    name: str
    dim: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file outside of the bundle: its path from there, its bytes and its SHA-256, in hex.

    `tensors` maps the bundle's weights that it holds to their names in it.
    """

    path: str
    size: int
    checksum: str
    tensors: Mapping[str, str]

    def check(self) -> None:
        """Raise BundleError unless the path is one of a safetensors file, relative to the bundle."""
        if not self.path.isprintable() or self.path.startswith("/") or not self.path.endswith(".safetensors"):
            raise BundleError(f"expected the relative path of a .safetensors file, found {self.path!r}", "weight_files")


@dataclass(frozen=True, repr=False)
class Manifest:
    """The table of contents of a bundle. Raises BundleError when its parts do not fit each other.

    `updates` maps each weight that the programs update to the output with its new value. `divided_inputs` and
    `divided_outputs` are those split into microbatches. `states` are those of a program that continues a sequence.
    `symbols` are those of the sizes of inputs and outputs, and `guards` the comparisons of them that every call must
    meet. `encoder` is set if an encoder computes some of the states, `training` if the programs are a training step,
    `call` if they are a model with arguments by position and by name. `weight_files` hold weights that the bundle does
    not. `parameters` maps the weights that belong to the model, not to its program, to their names in the model's
    files: others can take their place. With `fast_math` the tvm backend need not preserve NaN. `provenance` is for
    people: nothing else depends on it.
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
    weight_files: tuple[WeightFile, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    updates: Mapping[str, str] = field(default_factory=dict)
    divided_inputs: tuple[Division, ...] = ()
    divided_outputs: tuple[Division, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    guards: tuple[Guard, ...] = ()
    states: tuple[State, ...] = ()
    encoder: Encoder | None = None
    training: TrainingManifest | None = None
    call: CallManifest | None = None
    fast_math: bool = False
    provenance: Provenance = field(default_factory=Provenance)
    checksums: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def __repr__(self) -> str:
        parts = zip((self.inputs, self.outputs, self.weights), ("input", "output", "weight"), strict=True)
        sizes = ", ".join(count(len(tensors), what) for tensors, what in parts)
        programs = count(len(self.programs), "distinct program")
        return f"<manifest of {self.name}: {count(self.mesh.size, 'rank')} on {self.mesh}, {programs}, {sizes}>"

    def __post_init__(self) -> None:
        world = self.mesh.size
        if len(self.ranks) != world:
            raise BundleError(f"the mesh has {world} ranks, but programs are given for {len(self.ranks)}")
        if not all(0 <= index < len(self.programs) for index in self.ranks):
            raise BundleError(
                f"expected an index below {len(self.programs)} for each rank's program, found {list(self.ranks)}"
            )
        for tensor in (*self.inputs, *self.outputs, *self.weights, *(state.tensor for state in self.states)):
            tensor.check(self.mesh)
        for state in self.states:
            if not 0 <= state.dim < len(state.tensor.shape):
                raise BundleError(f"expected a dim of {state.tensor.shape}, found {state.dim}", state.tensor.name)
        for tensor in self.outputs:
            _check_covered(tensor)
        for tensors in (self.inputs, self.outputs, self.weights):
            if repeated := [name for name, count in Counter(t.name for t in tensors).items() if count > 1]:
                raise BundleError(f"duplicate names: {', '.join(sorted(repeated))}")
        self._check_names()
        for divisions, tensors in ((self.divided_inputs, self.inputs), (self.divided_outputs, self.outputs)):
            _check_divisions(divisions, tensors)
        weights, outputs = {t.name for t in self.weights}, {t.name for t in self.outputs}
        for weight, output in self.updates.items():
            if weight not in weights or output not in outputs:
                raise BundleError(f"expected an update from a weight to an output, found {weight!r} to {output!r}")
        if unknown := sorted(self.parameters.keys() - weights):
            raise BundleError(f"expected weights as parameters, found {unknown[0]!r}")
        self._check_weight_files(weights)
        if self.training is not None:
            self._check_training(self.training)

    def _check_names(self) -> None:
        if not self.name.isprintable():
            raise BundleError(f"expected a name of printable characters, found {self.name!a}")
        for name in (*self.checksums, *self.program_files):
            check_name(name, BundleError)

    def _check_weight_files(self, weights: Collection[str]) -> None:
        placed: set[str] = set()
        for file in self.weight_files:
            file.check()
            if wrong := sorted(name for name in file.tensors if name not in weights or name in placed):
                raise BundleError(f"expected weights in one file each, found {wrong[0]!r} in {file.path}")
            placed |= file.tensors.keys()

    def _check_training(self, training: TrainingManifest) -> None:
        if unknown := sorted(set(training.names.values()) - {tensor.name for tensor in self.weights}):
            raise BundleError(f"expected weights under the names of the model, found {unknown[0]!r}")
        numbers = {(t.name, t.dtype) for t in (*self.inputs, *self.outputs) if t.shape == ()}
        floats = ("float64", "float32", "float16", "bfloat16")
        for what, name, dtypes in (
            *(("loss", name, floats) for name in (training.loss, *training.losses)),
            *(("learning rate", name, ("float64", "float32")) for name in training.rates),
            ("seed", training.seed, ("int64",)),
            ("gradient norm", training.gradient_norm, ("float64", "float32")),
        ):
            if name is not None and not any((name, dtype) in numbers for dtype in dtypes):
                raise BundleError(
                    f"expected a scalar of {' or '.join(dtypes)} as the {what} of training, found {name!r}"
                )

    def at(self, values: Mapping[str, int]) -> Manifest:
        """Return the manifest of a call with these values of all symbols, within their bounds.

        Raises BundleError if its inputs and outputs do not fit the mesh.
        """
        result = copy(self)
        inputs, outputs = (tuple(t.at(values) for t in tensors) for tensors in (self.inputs, self.outputs))
        states = tuple(replace(state, tensor=state.tensor.at(values)) for state in self.states)
        for tensor in (*inputs, *outputs, *(state.tensor for state in states)):
            tensor.check(self.mesh)
        for tensor in outputs:
            _check_covered(tensor)
        changed = {"inputs": inputs, "outputs": outputs, "states": states, "symbols": (), "guards": ()}
        for name, value in changed.items():
            object.__setattr__(result, name, value)
        return result

    @property
    def program_files(self) -> tuple[str, ...]:
        """The paths of the programs' torch modules, relative to the bundle."""
        return tuple(program.torch for program in self.programs if program.torch is not None)

    def program_of(self, rank: int) -> Program:
        """Return the program that `rank` runs."""
        return self.programs[self.ranks[rank]]

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain dicts and lists, as in docs/bundle.md."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return {"format": plain.pop("format"), **plain}

    @classmethod
    def from_json(cls, data: object) -> Manifest:
        """Parse the result of `to_json`. Raises BundleError naming the field that is missing or of the wrong type."""
        top = Fields.of(data, BundleError)
        if (version := top.whole("format")) != FORMAT:
            raise BundleError(
                f"the bundle has format {version}, this version reads format {FORMAT}",
                hint="compile the model again with this version, or run with the version that wrote it",
            )
        mesh = top.fields("mesh")
        try:
            devices = DeviceMesh(mesh.wholes("shape"), mesh.texts("axes"))
        except PlacementError as wrong:
            raise BundleError(f"invalid mesh: {wrong.message}") from None
        symbols = _symbols(top.rows("symbols", []))
        return cls(
            name=top.text("name"),
            mesh=devices,
            tail=top.text("tail"),
            schedule_hash=top.text("schedule_hash"),
            programs=tuple(
                Program(p.text("name"), p.text_or_none("torch"), p.texts("arguments", [])) for p in top.rows("programs")
            ),
            ranks=top.wholes("ranks"),
            inputs=tuple(_tensor(row, symbols) for row in top.rows("inputs")),
            outputs=tuple(_tensor(row, symbols) for row in top.rows("outputs")),
            weights=tuple(_tensor(row, {}) for row in top.rows("weights", [])),
            weight_files=tuple(
                WeightFile(row.text("path"), row.whole("size"), row.text("checksum"), row.by_name("tensors"))
                for row in top.rows("weight_files", [])
            ),
            parameters=top.by_name("parameters"),
            updates=top.by_name("updates"),
            divided_inputs=tuple(map(_division, top.rows("divided_inputs", []))),
            divided_outputs=tuple(map(_division, top.rows("divided_outputs", []))),
            symbols=tuple(symbols.values()),
            guards=tuple(_guard(row, symbols) for row in top.rows("guards", [])),
            states=tuple(
                State(_tensor(row.fields("tensor"), symbols), row.whole("dim"), row.flag("grows"))
                for row in top.rows("states", [])
            ),
            encoder=_encoder(top, symbols),
            training=_training(top),
            call=None if top.table.get("call") is None else CallManifest.from_json(top.fields("call")),
            fast_math=top.flag("fast_math"),
            provenance=Provenance.from_json(top.fields("provenance")),
            checksums=top.by_name("checksums"),
        )


def _encoder(top: Fields, symbols: Mapping[str, Symbol]) -> Encoder | None:
    if top.table.get("encoder") is None:
        return None
    encoder = top.fields("encoder")
    return Encoder(_tensor(encoder.fields("input"), symbols), encoder.whole("start"))


def _division(row: Fields) -> Division:
    return Division(row.text("name"), row.whole("dim"), row.texts("parts"))


def _check_divisions(divisions: Sequence[Division], tensors: Sequence[Tensor]) -> None:
    """Raise BundleError unless the parts of each division differ in the divided dim only."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for division in divisions:
        parts = [by_name[name] for name in division.parts if name in by_name]
        other_dims = {(t.dtype, t.shape[: division.dim], t.shape[division.dim + 1 :]) for t in parts}
        fits = parts and len(parts) == len(division.parts) and 0 <= division.dim < len(parts[0].shape)
        if not fits or len(other_dims) != 1 or division.name in by_name:
            raise BundleError(
                f"{division.name!r} cannot be the concatenation of {', '.join(division.parts)} along dim {division.dim}"
            )


def local_intervals(tensor: Tensor, mesh: DeviceMesh, rank: int) -> list[list[Interval]]:
    """Return the `[start, stop)` pieces of each dim that `rank` holds, in order, without empty pieces.

    Two mesh axes that split the same dim give the intersection of their intervals.
    """
    local: list[list[Interval]] = [[(0, size)] if size != 0 else [] for size in tensor.shape]
    coordinates = mesh.coordinates(rank)
    for shard in tensor.shards:
        local[shard.dim] = intersect(local[shard.dim], shard.intervals[coordinates[shard.axis]])
    return local


def local_shape(tensor: Tensor, mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
    """Return the shape of the shard of `tensor` on `rank`, which must hold some of it."""
    return tuple(sum(stop - start for start, stop in pieces) for pieces in local_intervals(tensor, mesh, rank))


def local_bytes(tensor: Tensor, mesh: DeviceMesh, rank: int) -> int:
    """Return the bytes of the shard of `tensor` on `rank`."""
    return tensor.is_on(rank) * math.prod(local_shape(tensor, mesh, rank)) * DTYPES[tensor.dtype][1]


def _check_covered(tensor: Tensor) -> None:
    """Raise BundleError for an output of which no rank holds some index; if it is symbolic, calls check it."""
    by_dim: dict[int, list[list[Interval]]] = {}
    for shard in () if any(is_symbolic((tensor.shape[s.dim], s.intervals)) for s in tensor.shards) else tensor.shards:
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
    if isinstance(value, (TrainingManifest, CallManifest)):
        return value.to_json()
    if isinstance(value, SymbolicSize):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _training(top: Fields) -> TrainingManifest | None:
    return None if top.table.get("training") is None else TrainingManifest.from_json(top.fields("training"))


def _symbols(rows: Sequence[Fields]) -> dict[str, Symbol]:
    symbols: dict[str, Symbol] = {}
    for row in rows:
        symbol = _symbol(row)
        if symbol.name in symbols:
            raise row.refuse("one symbol of each name", "name", symbol.name)
        symbols[symbol.name] = symbol
    return symbols


def _symbol(row: Fields) -> Symbol:
    high = None if row.table.get("high") is None else row.whole("high")
    try:
        return Symbol(row.text("name"), row.whole("low"), high, row.whole("typical"))
    except DistIRError as wrong:
        raise BundleError(wrong.message) from None


def _guard(row: Fields, symbols: Mapping[str, Symbol]) -> Guard:
    relation = row.text("relation")
    if relation not in ("<", "<=", "=="):
        raise row.refuse("<, <= or ==", "relation", relation)
    first, second = (_size(row, key, row.table.get(key), symbols) for key in ("first", "second"))
    return Guard(first, relation, second, row.flag("holds"), row.text("location", ""))  # type: ignore[arg-type]


def _size(row: Fields, key: str, value: object, symbols: Mapping[str, Symbol]) -> int:
    """Return a size: a whole number, or the text of a symbolic one."""
    if type(value) is int and 0 <= value <= MOST:
        return value
    if not isinstance(value, str):
        raise row.refuse("a size", key, value)
    try:
        return parse_size(value, symbols)
    except DistIRError as wrong:
        raise row.refuse(f"a size of {', '.join(symbols) or 'no symbols'} ({wrong.message})", key, value) from None


def _tensor(row: Fields, symbols: Mapping[str, Symbol]) -> Tensor:
    shards = tuple(
        Shard(
            s.whole("axis"), s.whole("dim"), tuple(_intervals(s, i, symbols) for i in range(len(s.items("intervals"))))
        )
        for s in row.rows("shards", [])
    )
    shape = tuple(_size(row, f"shape[{i}]", n, symbols) for i, n in enumerate(row.items("shape")))
    placement = row.text("placement", "R")
    ranks = row.wholes("ranks") if row.table.get("ranks") is not None else None
    return Tensor(row.text("name"), row.text("dtype"), shape, placement, shards, ranks)


def _intervals(shard: Fields, index: int, symbols: Mapping[str, Symbol]) -> tuple[Interval, ...]:
    """Return the intervals of index `index` along the axis."""
    intervals: list[Interval] = []
    pieces = shard.items("intervals")[index]
    if not isinstance(pieces, list):
        raise shard.refuse("a list of pieces [start, stop]", f"intervals[{index}]", pieces)
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 2:
            raise shard.refuse("a piece [start, stop]", f"intervals[{index}]", piece)
        start, stop = (_size(shard, f"intervals[{index}]", n, symbols) for n in piece)
        intervals.append((start, stop))
    return tuple(intervals)
