"""Point-to-point messages and progress tracking, the base of communicators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.runtime.arrays import as_torch, bytes_of, torch_dtype
from distir_relax.runtime.collective_check import as_numbers, check_peer_step
from distir_relax.runtime.native_waits import NativeWaits
from distir_relax.runtime.progress import Progress, Traffic

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array

Step = int | None
"""The number of a step of a program; None outside of the program."""


class _Communication:
    """The context of a communication, which records its begin and, unless it raises, its end with the bytes sent.

    Along an axis, peers check that they execute the same one. A generator as context takes as long as an all-reduce of
    a few rows.
    """

    __slots__ = ("_axis", "_kind", "_messages", "_sent", "_step")

    def __init__(self, messages: Messages, step: Step, kind: str, sent: int, axis: int | None) -> None:
        self._messages, self._step, self._kind, self._sent, self._axis = messages, step, kind, sent, axis

    def __enter__(self) -> None:
        messages, step = self._messages, self._step
        messages.progress.enter(self._kind if step is None else step, self._kind)
        if messages.checks_steps and step is not None and self._axis is not None:
            messages._check_group_step(self._axis)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._messages.progress.leave()
            self._messages.traffic.add(self._kind, self._sent)


class Messages(ABC):
    """Point-to-point messages of one of the `world_size` ranks."""

    def __init__(self, rank: int, world_size: int, device: str = "cpu") -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.native_waits = NativeWaits()
        """What kernels record that wait for other ranks."""
        self.start_counting()
        self.checks_steps = True
        """Whether peers compare step numbers before each communication; the first run of a program is enough."""
        self.copies_sends = False
        """Whether a program may overwrite a sent buffer as soon as the send returns."""
        self._has_pending_sends = False
        """Whether a started send may be incomplete."""
        self._pending_receives: defaultdict[tuple[int, int], deque[Callable[[], None]]] = defaultdict(deque)
        """By peer and step, in order: a step of several requests starts one for each before it finishes the first."""

    def start_counting(self) -> None:
        """Begin to record `progress` and `traffic` anew."""
        self.traffic = Traffic()
        self.progress = Progress(self.native_waits)

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """Record that the rank begins a task of a pipeline."""
        self.progress.begin(stage, kind, microbatch)

    def end(self) -> None:
        """Record that the rank has finished its task."""
        self.progress.end()

    def send(self, x: Array, peer: int, step: Step = None) -> None:
        """Send `x` to the world rank `peer`, which must `recv` it with the same shape and dtype."""
        self._check_peer(peer)
        source = as_torch(x).contiguous()
        with self._step(step, "send", bytes_of(source)):
            if self.checks_steps and step is not None:
                self._send(self._point(), peer)
            self._send(source.view(-1), peer)

    def recv(self, shape: Sequence[int], dtype: str, peer: int, step: Step = None, out: Array | None = None) -> Any:
        """Receive a torch tensor of `shape` and `dtype` ("float32") from the world rank `peer`, into `out` if given."""
        self._check_peer(peer)
        with self._step(step, "recv", 0):
            if self.checks_steps and step is not None:
                self._check_sender_step(peer)
            target = self._receive_buffer(shape, dtype, out)
            self._recv(target.view(-1), peer)
            return target if out is None else self._write_to(target, out)

    def start_send(self, x: Array, peer: int, copy: bool, step: int) -> None:
        """Start to send `x` to the world rank `peer`, which starts to receive it at the same step.

        With `copy`, `x` may change as soon as this returns; else not before `finish_sends`.
        """
        import torch

        self._check_peer(peer)
        source = as_torch(x)
        if copy or self.copies_sends:
            # By default a clone keeps the strides, of a transposed tensor too.
            source = source.clone(memory_format=torch.contiguous_format)
        source = source.contiguous()
        with self._step(step, "start_send", bytes_of(source)):
            self._has_pending_sends = True
            self._start_send(source.view(-1), peer, step)

    def start_recv(self, shape: Sequence[int], dtype: str, peer: int, step: int, out: Array | None = None) -> Any:
        """Start to receive from `peer`'s send of the same step; return the target, `out` or a new tensor.

        The target is undefined before `finish_recv`.
        """
        self._check_peer(peer)
        with self._step(step, "start_recv", 0):
            target = self._receive_buffer(shape, dtype, out)
            self._pending_receives[peer, step].append(self._start_recv(target.view(-1), peer, step))
            return target if out is None else out

    def finish_recv(self, x: Array, peer: int, step: int, out: Array | None = None) -> Any:
        """Return `x`, the result of `start_recv`, once it is complete."""
        with self._step(step, "finish_recv", 0):
            self._pending_receives[peer, step].popleft()()
            # A peer that answers has mostly received earlier messages: free their buffers now, not at the next send.
            if self._has_pending_sends:
                self._release_completed_sends()
            return x if out is None else self._write_to(as_torch(x), out)

    def forget_started(self) -> None:
        """Forget the communication that a failed run has started and not finished."""
        self._pending_receives.clear()

    def finish_sends(self) -> None:
        """Wait until all started sends are complete."""
        if self._has_pending_sends:
            self.progress.enter("the completion of its sends", "finish_sends")
            self._finish_sends()
            self.progress.leave()
            self._has_pending_sends = False

    def _step(self, step: Step, kind: str, sent: int, axis: int | None = None) -> _Communication:
        return _Communication(self, step, kind, sent, axis)

    @contextmanager
    def _waiting(self, step: Step) -> Iterator[None]:
        """Record that the rank waits for a communication that it has started."""
        self.progress.resume("the end of a collective" if step is None else step, "finish_collective")
        yield
        self.progress.leave()

    @abstractmethod
    def _check_group_step(self, axis: int) -> None:
        """Raise RunError unless the ranks of the group along an axis execute the same communication."""

    def _check_sender_step(self, peer: int) -> None:
        mine, theirs = self._point(), self._point()
        self._recv(theirs, peer)
        check_peer_step(self.rank, mine.tolist(), peer, theirs.tolist())

    def _point(self) -> torch.Tensor:
        import torch

        assert self.progress.current is not None
        return torch.tensor(as_numbers(self.progress.current), device=self.device)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise RunError(f"rank {self.rank} cannot exchange with rank {peer} of {self.world_size}")

    def _receive_buffer(self, shape: Sequence[int], dtype: str, out: Array | None) -> torch.Tensor:
        """Return a receive buffer: `out` if it is contiguous, else a new tensor."""
        import torch

        if out is not None and (target := as_torch(out)).is_contiguous():
            return target
        return torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=self.device)

    def _write_to(self, result: torch.Tensor, out: Array) -> Array:
        target = as_torch(out)
        if target.data_ptr() != result.data_ptr() or target.stride() != result.stride():
            target.copy_(result)
        return out

    @abstractmethod
    def _send(self, x: torch.Tensor, peer: int) -> None:
        """Send the flat `x`."""

    @abstractmethod
    def _recv(self, x: torch.Tensor, peer: int) -> None:
        """Receive into the flat `x`."""

    @abstractmethod
    def _start_send(self, x: torch.Tensor, peer: int, step: int) -> None:
        """Start to send the flat `x`, which must not change until `_finish_sends`."""

    @abstractmethod
    def _start_recv(self, x: torch.Tensor, peer: int, step: int) -> Callable[[], None]:
        """Start to receive into the flat `x` from `peer`'s send of this step; return a function that waits for it."""

    @abstractmethod
    def _release_completed_sends(self) -> None:
        """Free the buffers of sends that are complete."""

    @abstractmethod
    def _finish_sends(self) -> None:
        """Wait for all started sends."""
