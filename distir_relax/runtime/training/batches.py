"""Batches of a training run: streamed by a user's function, or sampled from a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from distir_relax.bundle import Manifest, Tensor, TrainingManifest, local_intervals
from distir_relax.bundle.weights import cut_out
from distir_relax.checkpoints import START, DataPosition
from distir_relax.errors import RunError
from distir_relax.layout import is_symbolic, typical_value
from distir_relax.runtime.arrays import as_torch, dtype_name, torch_dtype
from distir_relax.runtime.call_shapes import Call, CallShapes
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.microbatch_io import in_parts, user_inputs
from distir_relax.runtime.training.executor import Batch
from distir_relax.support.learning_rate import is_of_kind
from distir_relax.support.tensor_bytes import tensor_checksum
from distir_relax.support.units import consecutive

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


_NARROW = ("bfloat16", "float16")
"""Dtypes of inputs for which data may be float32."""
_CHECKED = 1 << 20
"""Bytes of the samples of an input, about, whose checksum is compared with those of other ranks."""


class DataSet(Protocol):
    """A data set of single samples, such as torch's map-style data sets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Data(ABC):
    """Source of batches, equal on all processes of a launch, each of which requests the same steps in order."""

    position: DataPosition
    """The position after the last batch."""
    order: Mapping[str, str] = {}
    """Settings that the order of the samples in an epoch follows from, besides the seed, as far as they are known."""

    @abstractmethod
    def left(self, epochs: int) -> int | None:
        """Return the number of batches that are left of the first `epochs` epochs; None if it is not known."""

    @abstractmethod
    def batch(self, step: int) -> Batch | None:
        """Return the next batch, which is that of a step, counted from 0; None at the end of the data.

        Raises RunError for data that do not match the program's inputs.
        """


def data_inputs(manifest: Manifest) -> list[Tensor]:
    """Return the user's data inputs, in the manifest's order: all but the learning rates and the seed of a step."""
    training = manifest.training
    others = () if training is None else (*training.rates, training.seed)
    return [tensor for tensor in user_inputs(manifest) if tensor.name not in others]


def training_of(manifest: Manifest) -> TrainingManifest:
    """Return the manifest's training section. Raises RunError for a bundle that is not a training step."""
    if manifest.training is None:
        raise RunError(
            "the bundle is not a step of training", manifest.name,
            "compile one: distir compile FILE.py:FUNCTION --train, or dr.compile_training(...).save(...)",
        )  # fmt: skip
    return manifest.training


Begin = Callable[[DataPosition], "tuple[Iterator[Any], DataPosition]"]
"""Function of a position that returns the batches from there to the end of the epoch, and the position, complete."""


class Stream(Data):
    """Consecutive batches from the iterators of `begin`, the first of which is at the position `start`.

    At the end of an iterator the next one is requested; one of an epoch without batches ends the data.
    `batches_after(position)` returns how many batches the epoch of a position has after it, or None.
    """

    def __init__(
        self, manifest: Manifest, begin: Begin, start: DataPosition = START,
        batches_after: Callable[[DataPosition], int | None] = lambda at: None, order: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._manifest, self.position, self.order = manifest, start, order or {}
        self._batches_after = batches_after
        self._calls = CallShapes(manifest)
        self._begin = begin
        self._items: Iterator[Any] | None = None

    def left(self, epochs: int) -> int | None:
        """See `Data`."""
        if self._items is None:
            self._items, self.position = self._begin(self.position)
        here, whole = self._batches_after(self.position), self._batches_after(START)
        if self.position.epoch is None or here is None or whole is None:
            return None
        more = epochs - self.position.epoch - 1
        return here + more * whole if more >= 0 else 0

    def batch(self, step: int) -> Batch | None:
        """See `Data`."""
        while True:
            if self._items is None:
                self._items, self.position = self._begin(self.position)
            for item in self._items:
                batch = self.to_batch(item, step)
                self.position = self.position.after(samples_of(batch.call.manifest))
                return batch
            if not self.position.samples:
                return None
            self._items, self.position = None, self.position.next_epoch()

    def to_batch(self, item: Any, step: int) -> Batch:
        """Return a user's batch as that of a step. Raises RunError if it does not match the program's inputs."""
        tensors = data_inputs(self._manifest)
        leaves = named(item, tensors)
        inputs = {t.name: _array(leaves[t.name], t) for t in tensors} | numbers(self._manifest, step)
        call = self._calls.of(inputs)
        in_parts(call.manifest, inputs)
        return _GlobalBatch(call, inputs)


def batches_of(manifest: Manifest, items: Iterable[Any]) -> Iterator[Batch]:
    """Yield the batches of an iterable, once. Raises RunError for one that does not match the program's inputs."""
    stream = Stream(manifest, lambda at: (iter(items), at))
    for item in items:
        yield stream.to_batch(item, 0)


class Samples(Data):
    """Batches drawn from a data set, shuffled each epoch, or in its order without a `seed`.

    Batches of a program that takes some of any size are typical. The last one of an epoch may be smaller if the program
    takes it, otherwise it is dropped. Where dims of samples are symbolic, all samples have the sizes of the first.

    The order follows from `seed`, and is equal on all processes: each reads the rows of its shards. Raises RunError
    for a set with fewer samples than a batch, and for a program whose inputs are not all batches of one size.
    """

    def __init__(self, manifest: Manifest, samples: DataSet, seed: int | None, start: DataPosition = START) -> None:
        self._manifest, self._samples, self._seed = manifest, samples, seed
        self.order = {"samples": str(len(samples)), "order": "a shuffled data set"}
        inputs = data_inputs(manifest)
        sizes = {tensor.shape[:1] for tensor in inputs}
        if len(sizes) != 1 or sizes == {()}:
            shown = ", ".join(f"{t.name} {t.shape}" for t in inputs[:4])
            raise RunError(f"samples make batches of inputs with one first dim, found {shown}", manifest.name)
        self._rows = typical_value(inputs[0].shape[0])
        self._calls = CallShapes(manifest)
        self._shapes = {tensor.name: tensor.shape[1:] for tensor in inputs}
        if len(samples) and any(map(is_symbolic, self._shapes.values())):
            leaves = named(samples[0], inputs)
            self._shapes = {name: _leaf(leaves[name], "float32", f"sample 0, {name}").shape for name in self._shapes}
        count, rest = divmod(len(samples), max(1, self._rows))
        self._batches = count + self._takes(rest)
        """The number of batches of an epoch."""
        self.dropped = 0 if self._takes(rest) else rest
        """The number of samples of an epoch that are in no batch."""
        if self._batches == 0:
            raise RunError(f"expected samples for a batch of {self._rows}, found {len(samples)}", "the data set")
        if start.epoch is None:
            epoch, place = divmod(start.batches, self._batches)
            start = DataPosition(start.batches, epoch, place, place * self._rows)
        self.position = replace(start, rows=self._rows)
        self._order_of = -1, list[int]()

    def left(self, epochs: int) -> int:
        """See `Data`."""
        here, rest = divmod(len(self._samples) - self.position.samples, self._rows)
        more = epochs - (self.position.epoch or 0) - 1
        return here + self._takes(rest) + more * self._batches if more >= 0 else 0

    def batch(self, step: int) -> Batch:
        """See `Data`."""
        left = len(self._samples) - self.position.samples
        if left < self._rows and not self._takes(left):
            self.position = self.position.next_epoch()
        first = self.position.samples
        rows = self._order(self.position.epoch or 0)[first : first + self._rows]
        self.position = self.position.after(len(rows))
        return self._batch(rows, step)

    def epoch(self) -> Iterator[Batch]:
        """Yield the batches of the first epoch."""
        order = self._order(0)
        for place in range(self._batches):
            yield self._batch(order[place * self._rows : (place + 1) * self._rows], 0)

    def _batch(self, rows: Sequence[int], step: int) -> Batch:
        return _SampledBatch(self._call(len(rows)), self._samples, rows, numbers(self._manifest, step))

    def _order(self, epoch: int) -> list[int]:
        """Return the indices of an epoch."""
        import torch

        if self._order_of[0] != epoch:
            order = list(range(len(self._samples)))
            if self._seed is not None:
                generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
                order = torch.randperm(len(order), generator=generator).tolist()
            self._order_of = epoch, order
        return self._order_of[1]

    def _takes(self, rows: int) -> bool:
        """Return whether the program takes a batch of fewer rows than typical ones."""
        if rows == 0 or not is_symbolic(data_inputs(self._manifest)[0].shape[0]):
            return False
        try:
            self._call(rows)
        except RunError:
            return False
        return True

    def _call(self, rows: int) -> Call:
        import torch

        inputs = {
            name: torch.empty((rows, *shape), dtype=torch.float32, device="meta")
            for name, shape in self._shapes.items()
        }
        return self._calls.of(inputs)


def numbers(manifest: Manifest, step: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a step, counted from 0, that are not data: its learning rates, and its seed."""
    import torch

    training = manifest.training
    if training is None:
        return {}
    dtypes = {tensor.name: torch_dtype(tensor.dtype) for tensor in manifest.inputs}
    inputs = {name: torch.tensor(schedule(step), dtype=dtypes[name]) for name, schedule in training.rates.items()}
    if training.seed is not None:
        inputs[training.seed] = torch.tensor(training.first_seed + step, dtype=torch.int64)
    return inputs


def _scaled_rates(manifest: Manifest, inputs: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the learning rates among inputs, times a factor."""
    return {name: inputs[name] * factor for name in training_of(manifest).rates if is_of_kind(name)}


def samples_of(manifest: Manifest) -> int:
    """Return the samples of a batch, all microbatches together: the first dim of its first input that has any."""
    shapes = (tensor.shape for tensor in data_inputs(manifest))
    return next((typical_value(shape[0]) for shape in shapes if shape), 1)


def samples_in(item: Any) -> int:
    """Return the samples of a user's batch: the first dim of its first value that has any."""
    by_name, rest = _leaves(item)
    shapes = (getattr(leaf, "shape", None) or [len(leaf)] for leaf in (*by_name.values(), *rest) if _has_rows(leaf))
    return next((int(shape[0]) for shape in shapes), 1)


def _has_rows(leaf: Any) -> bool:
    return bool(leaf.shape) if hasattr(leaf, "shape") else hasattr(leaf, "__len__")


def named(item: Any, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Return the leaves of a batch or sample by input name: those of dicts by key, others in the order of the inputs.

    Raises RunError if there are more or fewer leaves than inputs.
    """
    by_name, rest = _leaves(item)
    names = [tensor.name for tensor in inputs]
    free = [name for name in names if name not in by_name]
    if len(rest) != len(free) or not set(by_name) <= set(names):
        text = ", ".join([*map(repr, by_name), *[f"{len(rest)} without a name"] * bool(rest)]) or "nothing"
        hint = "a batch is (inputs, targets) in the order of the program's inputs, or a dict by their names"
        if set(names) < set(by_name):
            others = ", ".join(repr(name) for name in by_name if name not in names)
            hint = f"leave out {others}; of a data set of Hugging Face: dataset.select_columns({names})"
        raise RunError(f"expected data for {', '.join(map(repr, names))}, found {text}", "the data", hint)
    return {**by_name, **dict(zip(free, rest, strict=True))}


def _leaves(item: Any) -> tuple[dict[str, Any], list[Any]]:
    if isinstance(item, Mapping):
        return dict(item), []
    if not isinstance(item, (tuple, list)):
        return {}, [item]
    named_: dict[str, Any] = {}
    rest: list[Any] = []
    for part in item:
        inner, more = _leaves(part)
        named_ |= inner
        rest += more
    return named_, rest


@dataclass(frozen=True)
class _GlobalBatch:
    """A batch of global arrays in this process."""

    call: Call
    inputs: dict[str, Array]

    def checksums(self, rank: int) -> dict[str, int]:
        """See `Batch`: every rank has the whole batch."""
        names = [tensor.name for tensor in data_inputs(self.call.manifest)]
        return {name: tensor_checksum(as_torch(self.inputs[name])) for name in names}

    def local(self, rank: int, device: str) -> list[torch.Tensor]:
        """See `Batch`."""
        manifest = self.call.manifest
        return local_inputs(manifest, in_parts(manifest, self.inputs), rank, device)

    def with_rates(self, factor: float) -> Batch:
        """See `Batch`."""
        return replace(self, inputs={**self.inputs, **_scaled_rates(self.call.manifest, self.inputs, factor)})


@dataclass(frozen=True)
class _SampledBatch:
    """A batch of samples, each read only if a rank holds some of its rows, and once for all ranks of this process."""

    call: Call
    samples: DataSet
    rows: Sequence[int]
    numbers: Mapping[str, torch.Tensor]
    _samples_read: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def local(self, rank: int, device: str) -> list[torch.Tensor]:
        """See `Batch`."""
        first, rows_of = self._first_rows(), self._rows_of(rank)
        read = self._read(row for rows in rows_of.values() for row in rows)
        shards = []
        for tensor in self.manifest.inputs:
            if not tensor.is_on(rank):
                continue
            if tensor.name in self.numbers:
                shards.append(self.numbers[tensor.name].to(device))
                continue
            rows = [read[row][first[tensor.name][0]] for row in rows_of[tensor.name]]
            intervals = local_intervals(tensor, self.manifest.mesh, rank)
            stacked = _stacked(rows, tensor)
            shards.append(cut_out(stacked, [[(0, len(rows))], *intervals[1:]]).contiguous().to(device))
        return shards

    def with_rates(self, factor: float) -> Batch:
        """See `Batch`."""
        return replace(self, numbers={**self.numbers, **_scaled_rates(self.manifest, self.numbers, factor)})

    def checksums(self, rank: int) -> dict[str, int]:
        """See `Batch`: ranks that read the same rows of an input have the same numbers."""
        first = self._first_rows()
        rows_of: dict[str, set[int]] = {}
        for name, part_rows in self._rows_of(rank).items():
            rows_of.setdefault(first[name][0], set()).update(part_rows)
        read = self._read(row for rows in rows_of.values() for row in rows)
        sums: dict[str, int] = {}
        for name, rows in rows_of.items():
            places = ",".join(f"{start}:{stop}" for start, stop in consecutive(sorted(rows)))
            crc = 0
            for row in sorted(rows):
                crc = tensor_checksum(read[row][name], crc, _CHECKED // len(rows))
            sums[f"{name} {places}"] = crc
        return sums

    def _rows_of(self, rank: int) -> dict[str, list[int]]:
        """Return the rows of the batch that a rank reads, for each program input with data."""
        first, rows_of = self._first_rows(), dict[str, list[int]]()
        for tensor in self.manifest.inputs:
            if tensor.is_on(rank) and tensor.name not in self.numbers:
                pieces = local_intervals(tensor, self.manifest.mesh, rank)[0]
                rows_of[tensor.name] = [first[tensor.name][1] + row for a, b in pieces for row in range(a, b)]
        return rows_of

    @property
    def manifest(self) -> Manifest:
        """The manifest, with the sizes of this batch."""
        return self.call.manifest

    @cached_property
    def _inputs(self) -> list[Tensor]:
        return data_inputs(self.manifest)

    def _first_rows(self) -> dict[str, tuple[str, int]]:
        """Return, for each program input, the user's input that it is part of, and its first row there."""
        first = {tensor.name: (tensor.name, 0) for tensor in self._inputs}
        sizes = {tensor.name: tensor.shape for tensor in self.manifest.inputs}
        for division in self.manifest.divided_inputs:
            if division.dim != 0:
                raise RunError("samples make batches along the first dim", division.name)
            start = 0
            for part in division.parts:
                first[part] = division.name, start
                start += sizes[part][0]
        return first

    def _read(self, rows: Iterable[int]) -> dict[int, dict[str, torch.Tensor]]:
        for row in sorted({*rows} - self._samples_read.keys()):
            self._samples_read[row] = self._sample(self.rows[row])
        return self._samples_read

    def _sample(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sample by input name, each leaf checked against the program's shape and dtype."""
        leaves = named(self.samples[index], self._inputs)
        sample = {}
        for tensor in self._inputs:
            value = leaves[tensor.name]
            leaf = _leaf(value, tensor.dtype, f"sample {index}, input {tensor.name!r}")
            accepted = (tensor.dtype, "float32") if tensor.dtype in _NARROW else (tensor.dtype,)
            if tuple(leaf.shape) != tensor.shape[1:] or dtype_name(leaf.dtype) not in accepted:
                raise RunError(
                    f"expected {tensor.dtype} {tensor.shape[1:]}, found {dtype_name(leaf.dtype)} {tuple(leaf.shape)}",
                    f"sample {index}, input {tensor.name!r}",
                    "samples have the sizes of the first; return batches for others" if self.call.sizes else "",
                )
            sample[tensor.name] = leaf.to(torch_dtype(tensor.dtype))
        return sample


def _array(value: Any, tensor: Tensor) -> Any:
    """Return an input of a batch: lists of numbers as a tensor, and float32 data as float16 if the program takes it."""
    if not hasattr(value, "shape"):
        return _leaf(value, tensor.dtype, f"input {tensor.name!r}")
    is_wide = tensor.dtype == "float16" and dtype_name(as_torch(value).dtype) == "float32"
    return as_torch(value).to(torch_dtype(tensor.dtype)) if is_wide else value


def _leaf(value: Any, dtype: str, where: str) -> torch.Tensor:
    """Return a leaf of a batch or sample; numbers, and lists of them, have the dtype of the input.

    Raises RunError for anything else.
    """
    import torch

    if hasattr(value, "shape"):
        return as_torch(value)
    try:
        return torch.tensor(value, dtype=torch_dtype(dtype))
    except (TypeError, ValueError, RuntimeError) as error:
        shown = repr(value)
        shown = shown if len(shown) < 60 else f"{shown[:57]}..."
        raise RunError(f"expected numbers, or lists of them of equal lengths, found {shown}", where) from error


def _stacked(rows: Sequence[torch.Tensor], tensor: Tensor) -> torch.Tensor:
    import torch

    return torch.stack(list(rows)) if rows else torch.zeros((0, *tensor.shape[1:]), dtype=torch_dtype(tensor.dtype))
