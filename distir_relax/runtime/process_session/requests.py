"""Requests of the driver to all ranks, and their replies."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.runtime.arrays import bytes_of
from distir_relax.runtime.error_messages import error_from_json, name_rank
from distir_relax.runtime.process_session.connection import Disconnected, Frame
from distir_relax.runtime.process_session.rank_processes import RankProcesses
from distir_relax.runtime.process_session.shared_memory import Segment
from distir_relax.runtime.process_session.tensor_frames import pack, shared_size, unpack
from distir_relax.runtime.watchdog import stall_error

if TYPE_CHECKING:
    import torch

# Seconds: interval of checks while waiting; for all ranks to report an error that one has.
_LOOK, _GRACE = 0.5, 2.0
_LEAST_SEGMENT = 1 << 20


class RanksLost(Exception):
    """The ranks cannot handle further requests, because of `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Reply:
    """The answer of one rank: values of JSON's types, and tensors that the receiver owns."""

    values: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass
class _Pending:
    """A request without a reply; `errors` are those of ranks, `since` is when the first one came."""

    started: float
    timeout: float
    reply: Frame | None = None
    errors: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    since: float = 0.0
    is_abandoned: bool = False

    def is_done(self, ranks: int) -> bool:
        """Whether a rank has replied, or all ranks have the same error."""
        errors = [
            (error["error"].get("fields"), error["error"].get("text"), error["at"]) for error in self.errors.values()
        ]
        if self.reply is not None:
            return not errors
        return len(errors) == ranks and all(error == errors[0] for error in errors)


class Requests:
    """Requests to the ranks of a session, which handle them in order. Several may be in flight; thread-safe.

    Each rank gets each request, and one of them replies. An error that all ranks have alike leaves them usable, and is
    that of the request; any other error of a rank, and its end, raises `RanksLost`, now and for all further requests.
    """

    def __init__(self, ranks: RankProcesses) -> None:
        self._connections = {connection.socket.fileno(): connection for connection in ranks.connections}
        self._ranks = {file: rank for rank, file in enumerate(self._connections)}
        self._processes, self._lost_error, self._shares = ranks.processes, ranks.lost, ranks.are_local
        self._events = select.poll()
        for file in self._connections:
            self._events.register(file, select.POLLIN)
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._next = 0
        self._inputs: Segment | None = None
        self._outputs: Segment | None = None
        self._lost: Exception | None = None
        self._is_torn = False

    def submit(
        self, kind: str, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], timeout: float, room: int = 0
    ) -> int:
        """Send a request, and return its number, for `result` or `abandon`.

        `room` is the size of shared memory for the reply's tensors, in bytes. Shared memory is used while no other
        request is in flight. A rank that waits for others for more than `timeout` seconds (0: never) ends the session.
        """
        with self._sending:
            if self._lost is not None or self._is_torn:
                raise RanksLost(self._lost or RunError("a request was interrupted while it was sent to the ranks"))
            if self._pending:
                self._drain()
            is_alone = not self._pending and self._shares
            segments = self._resize(shared_size(map(bytes_of, tensors.values())), room) if is_alone else {}
            descriptors, payload = pack(tensors, self._inputs if is_alone else None)
            number, self._next = self._next, self._next + 1
            header = {
                **values, "kind": kind, "number": number, "timeout": timeout, "tensors": descriptors,
                "segments": list(segments), "shares": is_alone,
            }  # fmt: skip
            self._pending[number] = _Pending(time.monotonic(), timeout)
            self._is_torn = True
            try:
                for connection in self._connections.values():
                    connection.send(header, payload, [segment.file for segment in segments.values()])
            except Disconnected:
                # The reason follows from what the ranks have sent last.
                pass
            self._is_torn = False
        return number

    def result(self, number: int) -> Reply:
        """Wait for the reply to a request. Raises the error of all ranks, and RanksLost."""
        with self._reading:
            while not (pending := self._pending[number]).is_done(len(self._processes)):
                if self._lost is None:
                    self._read(_LOOK)
                    self._check_ranks()
                if self._lost is not None:
                    raise RanksLost(self._lost)
            del self._pending[number]
            if pending.reply is None:
                raise error_from_json(dict(pending.errors[0]["error"]))
            header = pending.reply.header
            return Reply(header, unpack(header["tensors"], pending.reply.payload, self._outputs, copy=True))

    def abandon(self, number: int) -> None:
        """Drop the reply to a request, which the ranks handle all the same."""
        with self._reading:
            if number in self._pending:
                self._pending[number].is_abandoned = True
                self._drop_abandoned()

    def close(self) -> None:
        """Release the shared memory; ranks and tensors that use it keep it."""
        for segment in (self._inputs, self._outputs):
            if segment is not None:
                segment.close()
        self._inputs = self._outputs = None

    def _resize(self, inputs: int, outputs: int) -> dict[str, Segment]:
        """Return the segments that are new, of those that hold this many bytes."""
        new = {}
        if inputs > (self._inputs.size if self._inputs else 0):
            new["inputs"] = self._inputs = _replaced(self._inputs, inputs)
        if outputs > (self._outputs.size if self._outputs else 0):
            new["outputs"] = self._outputs = _replaced(self._outputs, outputs)
        return new

    def _drain(self) -> None:
        """Take the messages that have arrived, unless another thread does."""
        if self._reading.acquire(blocking=False):
            try:
                self._read(0)
            finally:
                self._reading.release()

    def _read(self, seconds: float) -> None:
        """Wait for messages of ranks, and take them."""
        files = [file for file, _ in self._events.poll(seconds * 1e3)]
        ended = [file for file in files if not self._take(file)]
        if ended:
            # The rank that has ended the others has told the reason before.
            for file in self._connections:
                self._take(file)
            if self._lost is None:
                self._lost = self._lost_error([self._ranks[file] for file in ended])
        self._drop_abandoned()

    def _take(self, file: int) -> bool:
        """Take the messages of a rank; return False when it has ended."""
        connection = self._connections[file]
        is_open = connection.fill()
        while (frame := connection.take()) is not None:
            if "fatal" in frame.header:
                self._lost = self._lost or error_from_json(frame.header["fatal"])
                continue
            pending = self._pending.get(frame.header["number"])
            if pending is None:
                # An error after rank 0 has replied.
                self._lost = self._lost or self._error_of(frame.header, self._ranks[file])
            elif "error" in frame.header:
                pending.since = pending.since or time.monotonic()
                pending.errors[self._ranks[file]] = frame.header
            else:
                pending.reply = frame
        return is_open

    def _check_ranks(self) -> None:
        """Find errors that not all ranks have, and ranks that are all stopped."""
        now = time.monotonic()
        for pending in self._pending.values():
            if pending.is_done(len(self._processes)):
                continue
            if pending.errors and (len(pending.errors) == len(self._processes) or now - pending.since > _GRACE):
                rank = min(pending.errors)
                self._lost = self._lost or self._error_of(pending.errors[rank], rank)
            elif 0 < pending.timeout < now - pending.started and all(map(_is_stopped, self._processes)):
                lines = [f"rank {r} is stopped (process {process.pid})" for r, process in enumerate(self._processes)]
                self._lost = self._lost or stall_error(pending.timeout, lines, silent=True)

    def _error_of(self, header: Mapping[str, Any], rank: int) -> Exception:
        return name_rank(error_from_json(dict(header["error"])), rank, len(self._processes))

    def _drop_abandoned(self) -> None:
        ranks = len(self._processes)
        self._pending = {
            number: one for number, one in self._pending.items() if not (one.is_abandoned and one.is_done(ranks))
        }


def _replaced(segment: Segment | None, size: int) -> Segment:
    """Return a segment of at least `size` bytes; ranks have their own files of the old one, which is closed."""
    new = Segment.create(max(_LEAST_SEGMENT, 1 << (size - 1).bit_length()))
    if segment is not None:
        segment.close()
    return new


def _is_stopped(process: Any) -> bool:
    import psutil

    # Of a rank on another host its agent knows that.
    with suppress(psutil.Error):
        return process is not None and bool(process.status() == psutil.STATUS_STOPPED)
    return False
