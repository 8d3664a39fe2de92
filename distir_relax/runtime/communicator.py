"""Collectives over mesh axes, as called by rank programs.

A collective along an axis runs in the group of ranks that differ from each other along that axis only. Sizes are per
index along the axis; they may be uneven, and 0. Below, `[a|b]` is a on the first rank of the group and b on the second.

    all_reduce       [a | b]          =>  [a+b | a+b]
    all_gather       [a | b]          =>  [ab  | ab]
    reduce_scatter   [a0 a1 | b0 b1]  =>  [a0+b0 | a1+b1]
    all_to_all       [a0 a1 | b0 b1]  =>  [a0 b0 | a1 b1]
    shard            [ab | ab]        =>  [a | b]

Subclasses move flat, contiguous torch tensors (the methods with an underscore); dims are handled here.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from distir_relax.errors import RunError
from distir_relax.layout import REDUCTIONS, Collective, DeviceMesh
from distir_relax.runtime.arrays import (
    as_ordered,
    as_torch,
    bytes_of,
    dtype_name,
    flat_target,
    flatten,
    from_ordered,
    like,
    row_bytes,
    split,
    torch_dtype,
    with_sizes,
)
from distir_relax.runtime.collective_check import NUMBERS, check_peer_step
from distir_relax.runtime.native_waits import in_call
from distir_relax.runtime.point_to_point import Messages, Step
from distir_relax.runtime.progress import Traffic
from distir_relax.runtime.started_collectives import CommunicationThread, Started

if TYPE_CHECKING:
    import torch

    from distir_relax.kernels.recording import Recording
    from distir_relax.runtime.arrays import Array


class Communicator(Messages):
    """Collectives of one rank of a mesh.

    Arrays are torch tensors or numpy arrays, contiguous or not; a result has the array type of `x`. `step` is the index
    into the program's STEPS, for the watchdog and the check that peers execute the same communication. `out`, if not
    None, receives the result and is returned; for `all_reduce` it may be `x` itself. Methods raise RunError when sizes
    do not fit `x`, or a peer has failed.
    """

    drops_nan: ClassVar[bool] = True
    """Whether the transport's own min and max may drop NaN."""

    def __init__(self, rank: int, mesh: DeviceMesh, device: str = "cpu") -> None:
        super().__init__(rank, mesh.size, device)
        self.mesh = mesh
        self.local_size = mesh.size
        """Number of ranks that share this node's cores."""
        self._coordinates = mesh.coordinates(rank)
        self._axes = {name: index for index, name in enumerate(mesh.axes)}
        self._communication_thread: CommunicationThread | None = None

    def all_reduce(self, x: Array, axis: str, op: str, step: Step = None, out: Array | None = None) -> Any:
        """Combine `x` over the group with `op` (sum, mean, min or max); every rank gets the result.

        float16 and bfloat16 are reduced in float32. Raises RunError for the mean of integers.
        """
        index, n, _ = self._place(axis)
        source = as_torch(x)
        check_reduction(op, source)
        with self._step(step, "all_reduce", all_reduce_bytes(n, source), index):
            if n == 1 or not source.numel():
                result = source.clone()
            else:
                result = self._reduced(source, index, op, None if out is None else as_torch(out))
            return self._finish_result(result, x, out)

    def sum_recorded(self, recording: Recording, x: torch.Tensor, axis: str, step: Step) -> torch.Tensor | None:
        """Add the sum of `x` over a group to a recorded step, by native code in memory that its ranks share.

        Returns the sum, None where they do not share memory, or have not yet (`share_memory`).
        """
        index, n, _ = self._place(axis)
        if n == 1 or step is None or not x.numel() or not x.is_contiguous():
            return None
        result = self._sum_natively(x, index, in_call(step, recording.times(step)))
        if result is not None:
            numbers = 1, all_reduce_bytes(n, x)
            self._count_native_sums(*numbers)
            recording.count(self._count_native_sums, *numbers)
        return result

    def share_memory(self) -> None:
        """Let ranks of one machine sum in memory that they share, where they can; all ranks call this together."""

    def all_gather(
        self, x: Array, axis: str, dim: int, sizes: Sequence[int], step: Step = None, out: Array | None = None
    ) -> Any:
        """Concatenate the shards of the group along `dim`, in rank order; shard i has size `sizes[i]` along `dim`."""
        index, n, me = self._place(axis)
        source = as_torch(x)
        self._check_sizes("all_gather", sizes, n, axis, source, dim, sizes[me] if me < len(sizes) else -1)
        row = row_bytes(source, dim)
        with self._step(
            step, "all_gather", row * Collective.ALL_GATHER.volume(n, sum(sizes), 0, sizes[(me + 1) % n]), index
        ):
            shapes = [with_sizes(source.shape, {dim: size}) for size in sizes]
            counts = [math.prod(shape) for shape in shapes]
            target = flat_target(out, dim, source, with_sizes(source.shape, {dim: sum(sizes)}))
            flat = self._all_gather(source.contiguous().view(-1), counts, index, target)
            return self._join(flat, counts, shapes, dim, x, out)

    def reduce_scatter(
        self,
        x: Array,
        axis: str,
        dim: int,
        sizes: Sequence[int],
        op: str,
        step: Step = None,
        out: Array | None = None,
    ) -> Any:
        """Combine `x` over the group with `op`; rank i keeps part i along `dim`, of size `sizes[i]`."""
        index, n, me = self._place(axis)
        source = as_torch(x)
        check_reduction(op, source)
        self._check_sizes("reduce_scatter", sizes, n, axis, source, dim, sum(sizes))
        row = row_bytes(source, dim)
        with self._step(
            step, "reduce_scatter", row * Collective.REDUCE_SCATTER.volume(n, sum(sizes), sizes[me]), index
        ):
            shape = with_sizes(source.shape, {dim: sizes[me]})
            if n == 1 or not source.numel():
                return self._finish_result(source.reshape(shape).clone(), x, out)
            pieces = split(source, sizes, dim)
            wide = _accumulator(source.dtype, op)
            flat = flatten(pieces, source, dim).to(wide)
            counts = [piece.numel() for piece in pieces]
            coded = self._is_coded(flat, op)
            flat = as_ordered(flat, op) if coded else flat
            part = self._reduce_scatter(flat, counts, index, "sum" if op == "mean" else op)
            if coded:
                part = from_ordered(part, wide)
            elif op == "mean":
                part = part / n
            return self._finish_result(part.to(source.dtype).view(shape), x, out)

    def start_all_reduce(self, x: Array, axis: str, op: str, step: Step = None, out: Array | None = None) -> Any:
        """Start an `all_reduce`, whose result `finish_collective` returns; `x` must not change before.

        Ranks of a group start the same collectives in the same order. With `out` it is complete when this returns.
        """
        if out is not None:
            return self.all_reduce(x, axis, op, step, out)
        return self._start_all_reduce(x, axis, op, step)

    def start_all_gather(
        self, x: Array, axis: str, dim: int, sizes: Sequence[int], step: Step = None, out: Array | None = None
    ) -> Any:
        """Start an `all_gather`; see `start_all_reduce`."""
        if out is not None:
            return self.all_gather(x, axis, dim, sizes, step, out)
        return self._start_in_thread("all_gather", x, axis, dim, sizes, step=step)

    def start_reduce_scatter(
        self, x: Array, axis: str, dim: int, sizes: Sequence[int], op: str, step: Step = None,
        out: Array | None = None,
    ) -> Any:  # fmt: skip
        """Start a `reduce_scatter`; see `start_all_reduce`."""
        if out is not None:
            return self.reduce_scatter(x, axis, dim, sizes, op, step, out)
        return self._start_in_thread("reduce_scatter", x, axis, dim, sizes, op, step=step)

    def start_resplit(
        self, x: Array, axis: str, dim: int, pieces: Sequence[Sequence[int]], step: Step = None,
        out: Array | None = None,
    ) -> Any:  # fmt: skip
        """Start a `resplit`; see `start_all_reduce`."""
        if out is not None:
            return self.resplit(x, axis, dim, pieces, step, out)
        return self._start_in_thread("resplit", x, axis, dim, pieces, step=step)

    def finish_collective(self, x: Any, step: Step = None, out: Array | None = None) -> Any:
        """Return the result of a collective once it is complete; `x` is what its start returned.

        Raises what the collective raises.
        """
        if isinstance(x, Started):
            with self._waiting(step):
                result, traffic = x.result()
            self.traffic.merge(traffic)
        else:
            result = as_torch(x)
        return result if out is None else self._write_to(result, out)

    def forget_started(self) -> None:
        """See `Messages.forget_started`; wait for the collectives that others' failures have released."""
        super().forget_started()
        if self._communication_thread is not None:
            self._communication_thread.wait()

    def _start_all_reduce(self, x: Array, axis: str, op: str, step: Step) -> Started:
        return self._start_in_thread("all_reduce", x, axis, op, step=step)

    def _start_in_thread(self, kind: str, x: Array, axis: str, *arguments: Any, step: Step) -> Started:
        """Start the collective `kind` in a thread, or execute it here if the transport has no channel for one."""
        channel = self._channel(axis)
        if channel is None:
            result = getattr(self, kind)(x, axis, *arguments, step=step)
            return Started(lambda: (result, Traffic()))
        if self._communication_thread is None:
            self._communication_thread = CommunicationThread(channel._execute)
        return self._communication_thread.start(kind, x, axis, arguments, step, self.checks_steps)

    def _channel(self, axis: str) -> Communicator | None:
        """Return the rank's communicator for a thread, None if collectives along the axis are to run at their start."""
        return None

    def _execute(
        self, kind: str, x: Array, axis: str, arguments: tuple[Any, ...], step: Step, checks_steps: bool
    ) -> tuple[Any, Traffic]:
        """Execute a collective in the thread of started ones; return its result, and the bytes sent."""
        self.checks_steps, self.traffic = checks_steps, Traffic()
        self._wait_for_group(axis)
        return getattr(self, kind)(x, axis, *arguments, step=step), self.traffic

    def _wait_for_group(self, axis: str) -> None:
        """Wait for the ranks of the group without using the processor, where waiting in a collective does."""

    def all_to_all(
        self, x: Array, axis: str, split_dim: int, split_sizes: Sequence[int], concat_dim: int,
        concat_sizes: Sequence[int], step: Step = None, out: Array | None = None,
    ) -> Any:  # fmt: skip
        """Move the split from `concat_dim` to `split_dim`.

        Rank i holds `concat_sizes[i]` along `concat_dim` and all of `split_dim`; it ends with `split_sizes[i]` along
        `split_dim` and all of `concat_dim`.
        """
        index, n, me = self._place(axis)
        source = as_torch(x)
        self._check_sizes("all_to_all", split_sizes, n, axis, source, split_dim, sum(split_sizes))
        self._check_sizes("all_to_all", concat_sizes, n, axis, source, concat_dim, concat_sizes[me])
        if split_dim == concat_dim:
            raise RunError(f"all_to_all needs two dims, found dim {split_dim} twice")
        row = row_bytes(source, split_dim)
        with self._step(
            step, "all_to_all", row * Collective.ALL_TO_ALL.volume(n, sum(split_sizes), split_sizes[me]), index
        ):
            pieces = split(source, split_sizes, split_dim)
            shapes = [with_sizes(source.shape, {split_dim: split_sizes[me], concat_dim: size}) for size in concat_sizes]
            counts = [math.prod(shape) for shape in shapes]
            sent = [piece.numel() for piece in pieces]
            rest = math.prod(size for d, size in enumerate(source.shape) if d not in (split_dim, concat_dim))
            largest = rest * max(sum(split_sizes) * max(concat_sizes), max(split_sizes) * sum(concat_sizes))
            flat = self._all_to_all(flatten(pieces, source, split_dim), sent, counts, index, largest)
            return self._join(flat, counts, shapes, concat_dim, x, out)

    def resplit(
        self,
        x: Array,
        axis: str,
        dim: int,
        pieces: Sequence[Sequence[int]],
        step: Step = None,
        out: Array | None = None,
    ) -> Any:
        """Change the partition of `dim` from one to another.

        Rank i sends its interval j, of `pieces[i][j]` elements along `dim`, to rank j.
        The intervals of a rank are contiguous and in order; the result is the received intervals in rank order.
        """
        index, n, me = self._place(axis)
        source = as_torch(x)
        sizes, received = list(pieces[me]), [row[me] for row in pieces]
        self._check_sizes("resplit", sizes, n, axis, source, dim, sum(sizes))
        row = row_bytes(source, dim)
        with self._step(step, "resplit", row * Collective.ALL_TO_ALL.volume(n, sum(sizes), sizes[me]), index):
            parts = split(source, sizes, dim)
            shapes = [with_sizes(source.shape, {dim: size}) for size in received]
            counts = [math.prod(shape) for shape in shapes]
            rest = math.prod(size for d, size in enumerate(source.shape) if d != dim)
            largest = rest * sum(map(sum, pieces))
            flat = self._all_to_all(
                flatten(parts, source, dim), [part.numel() for part in parts], counts, index, largest
            )
            return self._join(flat, counts, shapes, dim, x, out)

    def shard(
        self, x: Array, axis: str, dim: int, sizes: Sequence[int], step: Step = None, out: Array | None = None
    ) -> Any:
        """Return this rank's part of `x` along `dim`, contiguous; rank i has size `sizes[i]`. No communication."""
        _, n, me = self._place(axis)
        source = as_torch(x)
        self._check_sizes("shard", sizes, n, axis, source, dim, sum(sizes))
        part = source.narrow(dim, sum(sizes[:me]), sizes[me])
        return self._finish_result(part.contiguous(), x, out)

    def shard_start(self, axis: str, sizes: Sequence[int], dtype: str, out: Array | None = None) -> Any:
        """Return the offset of this rank's part in a dim partitioned into `sizes` along `axis`, as a scalar tensor.

        No communication.
        """
        import torch

        _, _, me = self._place(axis)
        start = torch.tensor(sum(sizes[:me]), dtype=torch_dtype(dtype), device=self.device)
        return start if out is None else self._write_to(start, out)

    def index(self, axis: str) -> int:
        """Return this rank's index along a mesh axis, which is its rank in its group."""
        return self._place(axis)[2]

    def barrier(self, step: Step = None) -> None:
        """Wait for every rank of the mesh."""
        with self._step(step, "barrier", 0):
            self._barrier()

    def _check_group_step(self, axis: int) -> None:
        if self.mesh.shape[axis] == 1:
            return
        mine = self._point()
        points = self._all_gather(mine, [NUMBERS] * self.mesh.shape[axis], axis, None).view(-1, NUMBERS)
        for peer, theirs in zip(self.mesh.group(self.rank, axis), points.tolist(), strict=True):
            check_peer_step(self.rank, mine.tolist(), peer, theirs)

    def _place(self, axis: str) -> tuple[int, int, int]:
        index = self._axes.get(axis)
        if index is None:
            raise RunError(f"the mesh has no axis {axis!r}", hint=f"its axes: {', '.join(self.mesh.axes)}")
        return index, self.mesh.shape[index], self._coordinates[index]

    def _check_sizes(
        self, kind: str, sizes: Sequence[int], n: int, axis: str, x: torch.Tensor, dim: int, expected: int
    ) -> None:
        if len(sizes) != n or not 0 <= dim < x.dim() or x.shape[dim] != expected:
            raise RunError(
                f"{kind} along {axis!r} (size {n}) of a tensor of shape {tuple(x.shape)} on rank {self.rank}: "
                f"sizes {list(sizes)} do not fit its dim {dim}"
            )

    def _is_coded(self, x: torch.Tensor, op: str) -> bool:
        """Whether a transport that drops NaN reduces `x` as integers."""
        return self.drops_nan and op in ("min", "max") and x.is_floating_point()

    def _reduced(self, x: torch.Tensor, axis: int, op: str, out: torch.Tensor | None) -> torch.Tensor:
        """Return the reduction of `x`, in the memory of `out` if that fits it."""
        # The mean of narrow floats is divided before it is rounded.
        is_sum = op == "sum" or (op == "mean" and x.dtype.itemsize == 4)
        if is_sum and x.is_floating_point() and x.is_contiguous():
            fits = out is not None and out.dtype == x.dtype and out.is_contiguous()
            target = out if out is not None and fits else x.new_empty(x.shape)
            if self._sum_in_shared_memory(x, target, axis):
                return target if op == "sum" else target.div_(self.mesh.shape[axis])
        work, finish = self._prepared(x, op, self.mesh.shape[axis])
        if work is not x:
            result = work
        elif out is not None and out.dtype == x.dtype and out.is_contiguous():
            result = work if out.data_ptr() == work.data_ptr() else out
        else:
            result = work.new_empty(work.shape)
        self._all_reduce(work, result, axis, "sum" if op == "mean" else op)
        return finish(result)

    def _prepared(
        self, x: torch.Tensor, op: str, n: int
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Return the contiguous operand of a transport's reduction of `x` over `n` ranks: `x` or a new tensor.

        The function returns the result from the transport's, in its memory if that has the dtype of `x`.
        """
        dtype, wide = x.dtype, _accumulator(x.dtype, op)
        work = (x if dtype == wide else x.to(wide)).contiguous()
        coded = self._is_coded(work, op)

        def finish(result: torch.Tensor) -> torch.Tensor:
            if coded:
                result = from_ordered(result, wide)
            elif op == "mean":
                result /= n
            return result if dtype == wide else result.to(dtype)

        return as_ordered(work, op) if coded else work, finish

    def _join(
        self,
        flat: torch.Tensor,
        counts: list[int],
        shapes: list[tuple[int, ...]],
        dim: int,
        x: Array,
        out: Array | None,
    ) -> Any:
        import torch

        total = with_sizes(shapes[0], {dim: sum(shape[dim] for shape in shapes)})
        if math.prod(total[:dim]) == 1:
            return self._finish_result(flat.view(total), x, out)
        parts = [part.view(shape) for part, shape in zip(split(flat, counts), shapes, strict=True)]
        return self._finish_result(torch.cat(parts, dim), x, out)

    def _finish_result(self, result: torch.Tensor, x: Array, out: Array | None) -> Any:
        return like(result, x) if out is None else self._write_to(result, out)

    @abstractmethod
    def _all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: int, op: str) -> None:
        """Reduce `x` with sum, min or max over the group along mesh axis `axis` into `out`, which may be `x`.

        Both are contiguous, and not flat.
        """

    def _sum_in_shared_memory(self, x: torch.Tensor, out: torch.Tensor, axis: int) -> bool:
        """Write the sum of `x` over the group to `out`, of the same dtype, if all ranks can; return whether they did.

        Both are contiguous, and may be the same.
        """
        return False

    def _sum_natively(self, x: torch.Tensor, axis: int, step: int) -> torch.Tensor | None:
        """Return the sum of `x` over the group by one kernel, which tells where it waits; None if that cannot be."""
        return None

    def _count_native_sums(self, calls: int, sent: int) -> None:
        self.traffic.add("all_reduce", sent, calls)

    @abstractmethod
    def _all_gather(self, x: torch.Tensor, counts: list[int], axis: int, out: torch.Tensor | None) -> torch.Tensor:
        """Return the concatenated flat shards of the group, in `out` unless it is None; `counts` are elements."""

    @abstractmethod
    def _reduce_scatter(self, x: torch.Tensor, counts: list[int], axis: int, op: str) -> torch.Tensor:
        """Return this rank's part of the flat `x` (parts of `counts` elements), combined over the group."""

    @abstractmethod
    def _all_to_all(
        self, x: torch.Tensor, sent: list[int], received: list[int], axis: int, largest: int
    ) -> torch.Tensor:
        """Send part i of the flat `x` (of `sent[i]` elements) to rank i; return the received parts, in rank order.

        No rank of the group sends or receives more than `largest` elements, so all choose the same algorithm by it.
        """

    @abstractmethod
    def _barrier(self) -> None:
        """Wait for all ranks."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def collective(method: _Method) -> _Method:
    """Register a function of the communicator, an op's operands and attributes as a method of every communicator.

    The method has the op's name and uses existing methods only, so it works on every transport and is counted and
    watched through them. Raises ValueError when communicators have that name already.
    """
    if hasattr(Communicator, method.__name__):
        raise ValueError(f"communicators have {method.__name__!r} already")
    setattr(Communicator, method.__name__, method)
    return method


_all_reduce_volume = lru_cache(maxsize=256)(Collective.ALL_REDUCE.volume)


def all_reduce_bytes(n: int, x: torch.Tensor) -> int:
    """Return the bytes that one of `n` ranks sends."""
    return int(_all_reduce_volume(n, bytes_of(x)))


def check_reduction(op: str, x: torch.Tensor) -> None:
    """Raise RunError unless `x` can be reduced by `op`."""
    import torch

    if op not in REDUCTIONS:
        raise RunError(f"unknown reduction {op!r}", hint=f"known: {', '.join(REDUCTIONS)}")
    if op == "mean" and not x.is_floating_point():
        raise RunError(f"the mean of {dtype_name(x.dtype)} over ranks is not a {dtype_name(x.dtype)}")
    if op == "sum" and x.dtype == torch.bool:
        raise RunError("truth values cannot be summed over ranks", hint="use max for or, min for and")


def _accumulator(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype in which values of `dtype` are reduced: supported by every transport, wide enough for a sum."""
    import torch

    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.uint8 if dtype == torch.bool else dtype
