"""MPI transport: ranks are processes of an MPI job. The program's buffers are passed to MPI without a copy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from distir_relax.errors import RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.arrays import split
from distir_relax.runtime.launcher_detection import launch_size
from distir_relax.runtime.transports.mpi_texts import gather_texts
from distir_relax.runtime.transports.process_communicator import ProcessCommunicator
from distir_relax.runtime.transports.shared_sums import SharedSums
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch


# MPI counts and displacements are 32-bit: larger buffers are sent in pieces of this many elements.
MAX_COUNT = 2**30
_CONTROL_TAG = 7
_EXCHANGE_TAG = 8
_POLL_SECONDS = 5e-5


class MPIWorld(World):
    """MPI_COMM_WORLD. Raises RunError when mpi4py finds no MPI library, or one that cannot use the launcher's PMI."""

    kind = "mpi"

    def __init__(self) -> None:
        super().__init__()
        self._mpi = MPI = _start()
        self.finalize = MPI.Finalize
        self._world = MPI.COMM_WORLD
        self.rank = self._world.Get_rank()
        self.size = self._world.Get_size()
        _check_joined(MPI, self.size)
        node = self._world.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = node.Get_rank()
        self.local_size = node.Get_size()
        first = np.array([self.rank])
        node.Bcast(first)
        node.Free()
        self.host_of = [int(text) for text in gather_texts(self._world, str(first[0]))]
        self._control = self._world.Dup()
        self._unfinished: list[Any] = []

    def communicator(self, mesh: DeviceMesh, device: str = "cpu") -> MPICommunicator:
        """See `World.communicator`."""
        return MPICommunicator(self._mpi, self._world, mesh, device)

    def _exchange(self, text: str) -> list[str]:
        return gather_texts(self._world, text)

    def abort(self, code: int) -> NoReturn:
        """See `World.abort`."""
        self.announce()
        self._world.Abort(code)
        raise AssertionError("MPI_Abort returned")

    def send_message(self, peer: int, message: str) -> None:
        """See `World.send_message`."""
        self._unfinished = [request for request in self._unfinished if not request.Test()]
        self._unfinished.append(self._control.Isend(message.encode(), peer, _CONTROL_TAG))

    def received_messages(self) -> list[tuple[int, str]]:
        """See `World.received_messages`."""
        messages = []
        status = self._mpi.Status()
        while self._control.Iprobe(self._mpi.ANY_SOURCE, _CONTROL_TAG, status):
            message = bytearray(status.Get_count(self._mpi.BYTE))
            self._control.Recv(message, status.Get_source(), _CONTROL_TAG)
            messages.append((status.Get_source(), message.decode()))
        return messages

    def close(self) -> None:
        """See `World.close`."""
        with self.waiting("the end of the launch"):
            self._world.Barrier()


class MPICommunicator(ProcessCommunicator):
    """One rank of a mesh whose world is `world`; one MPI communicator per mesh axis, created once.

    A channel is that of the thread of its started collectives.
    """

    def __init__(self, mpi: Any, world: Any, mesh: DeviceMesh, device: str = "cpu", is_channel: bool = False) -> None:
        super().__init__(world.Get_rank(), mesh, device)
        self._mpi = mpi
        self._is_channel = is_channel
        self._ops = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX}
        self._world = world.Dup()
        self._async_world = world.Dup()
        self._tags = world.Get_attr(mpi.TAG_UB) or 32767
        self._pending_sends: list[tuple[Any, torch.Tensor]] = []
        self._by_axis = []
        for axis in range(len(mesh.shape)):
            group = mesh.group(self.rank, axis)
            self._by_axis.append(world.Split(color=group[0], key=mesh.coordinates(self.rank)[axis]))
        self._on_one_machine: dict[int, bool] = {}
        self._thread_channel: MPICommunicator | None = None
        if not is_channel and device == "cpu" and mesh.size > 1 and mpi.Query_thread() == mpi.THREAD_MULTIPLE:
            # All ranks create it together, so not at the first collective that one of them starts.
            self._thread_channel = MPICommunicator(mpi, world, mesh, is_channel=True)

    def _wait_for_group(self, axis: str) -> None:
        # In a collective MPI polls all the time.
        if self._is_channel:
            request = self._by_axis[self._place(axis)[0]].Ibarrier()
            while not request.Test():
                time.sleep(_POLL_SECONDS)

    def _channel(self, axis: str) -> MPICommunicator | None:
        # On one machine the processors that compute also reduce. Threads would take turns with the programs, block by
        # block: a sum in shared memory then takes 20 times as long.
        return None if self._is_on_one_machine(self._place(axis)[0]) else self._thread_channel

    def _is_on_one_machine(self, axis: int) -> bool:
        """Whether the ranks of a group are; all of them call this together first."""
        if axis not in self._on_one_machine:
            node = self._by_axis[axis].Split_type(self._mpi.COMM_TYPE_SHARED)
            self._on_one_machine[axis] = node.Get_size() == self._by_axis[axis].Get_size()
            node.Free()
        return self._on_one_machine[axis]

    def _all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: int, op: str) -> None:
        host = _host(x)
        result = out if out.is_cpu else host
        for source, target in zip(_pieces(_buffer(host)), _pieces(_buffer(result)), strict=True):
            self._by_axis[axis].Allreduce(self._mpi.IN_PLACE if result is host else source, target, self._ops[op])
        _back(result, out)

    def _make_sums(self, axis: int) -> SharedSums | None:
        group = self._by_axis[axis]
        return SharedSums.of(group.Get_rank(), group.Get_size(), partial(gather_texts, group))

    def _all_gather(self, x: torch.Tensor, counts: list[int], axis: int, out: torch.Tensor | None) -> torch.Tensor:
        host = _host(x)
        result = _empty(host, sum(counts)) if out is None or not out.is_cpu else out
        if sum(counts) > MAX_COUNT:
            self._pairwise([host] * len(counts), split(result, counts), axis)
        else:
            self._by_axis[axis].Allgatherv(_buffer(host), [_buffer(result), (counts, _starts(counts))])
        return _return(result, x, out)

    def _reduce_scatter(self, x: torch.Tensor, counts: list[int], axis: int, op: str) -> torch.Tensor:
        host = _host(x)
        me = self._coordinates[axis]
        if sum(counts) > MAX_COUNT:
            reduced = host.clone()
            for piece in _pieces(_buffer(reduced)):
                self._by_axis[axis].Allreduce(self._mpi.IN_PLACE, piece, self._ops[op])
            start = sum(counts[:me])
            return reduced[start : start + counts[me]].clone().to(x.device)
        result = _empty(host, counts[me])
        self._by_axis[axis].Reduce_scatter(_buffer(host), _buffer(result), counts, self._ops[op])
        return result.to(x.device)

    def _all_to_all(
        self, x: torch.Tensor, sent: list[int], received: list[int], axis: int, largest: int
    ) -> torch.Tensor:
        host = _host(x)
        result = _empty(host, sum(received))
        if largest > MAX_COUNT:
            self._pairwise(split(host, sent), split(result, received), axis)
        else:
            self._by_axis[axis].Alltoallv(
                [_buffer(host), (sent, _starts(sent))], [_buffer(result), (received, _starts(received))]
            )
        return result.to(x.device)

    def _send(self, x: torch.Tensor, peer: int) -> None:
        for piece in _pieces(_buffer(_host(x))):
            self._world.Send(piece, peer)

    def _recv(self, x: torch.Tensor, peer: int) -> None:
        host = x if x.is_cpu else _empty(x, x.numel())
        for piece in _pieces(_buffer(host)):
            self._receive(piece, peer)
        _back(host, x)

    def _start_send(self, x: torch.Tensor, peer: int, step: int) -> None:
        self._release_completed_sends()
        host = _host(x)
        requests = [self._async_world.Isend(piece, peer, step % self._tags) for piece in _pieces(_buffer(host))]
        self._pending_sends += [(request, host) for request in requests]

    def _start_recv(self, x: torch.Tensor, peer: int, step: int) -> Callable[[], None]:
        host = x if x.is_cpu else _empty(x, x.numel())
        requests = [self._async_world.Irecv(piece, peer, step % self._tags) for piece in _pieces(_buffer(host))]

        def finish() -> None:
            self._mpi.Request.Waitall(requests)
            _back(host, x)

        return finish

    def _release_completed_sends(self) -> None:
        self._pending_sends = [(request, host) for request, host in self._pending_sends if not request.Test()]

    def _finish_sends(self) -> None:
        self._mpi.Request.Waitall([request for request, _ in self._pending_sends])
        self._pending_sends.clear()

    def _receive(self, piece: Any, peer: int) -> None:
        status = self._mpi.Status()
        try:
            self._world.Recv(piece, peer, status=status)
            received = status.Get_count(self._mpi.BYTE)
        except self._mpi.Exception as wrong:
            raise RunError(f"rank {self.rank} could not receive from rank {peer}: {wrong}") from None
        if received != piece.nbytes:
            raise RunError(f"rank {self.rank} expects {piece.nbytes} bytes from rank {peer}, which sends {received}")

    def _barrier(self) -> None:
        self._world.Barrier()

    def _pairwise(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], axis: int) -> None:
        """All-to-all by point-to-point messages in pieces, for buffers beyond MPI's counts."""
        comm = self._by_axis[axis]
        requests = []
        for peer, (outgoing, incoming) in enumerate(zip(sent, received, strict=True)):
            requests += [comm.Irecv(piece, peer, _EXCHANGE_TAG) for piece in _pieces(_buffer(incoming))]
            requests += [comm.Isend(piece, peer, _EXCHANGE_TAG) for piece in _pieces(_buffer(outgoing))]
        self._mpi.Request.Waitall(requests)


def _start() -> Any:
    """Return mpi4py's MPI, initialized. Raises RunError if there is none.

    mpi4py initializes MPI with the GIL held: while it waits for the other ranks, no thread could report that they are
    missing. A ctypes call releases the GIL.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as wrong:
        raise RunError(
            f"this process was started by an MPI launcher, but MPI cannot be loaded: {wrong}",
            hint="distir doctor shows what is missing",
        ) from None
    if not MPI.Is_initialized():
        provided = ctypes.c_int()
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    return MPI


def _check_joined(mpi: Any, size: int) -> None:
    """Raise RunError if each rank is alone: an MPI library that cannot use the launcher's PMI starts so."""
    started = launch_size()
    if size > 1 or started is None or started < 2:
        return
    library = mpi.Get_library_version().partition(",")[0].partition("\n")[0].strip()
    raise RunError(
        f"the launcher started {started} ranks, but MPI joined {size}: mpi4py uses {library}, which cannot use the "
        "launcher's PMI",
        hint="start them with the mpirun of that MPI, with another PMI (srun --mpi=pmix), or build mpi4py for the "
        "launcher's MPI",
    )


def _buffer(x: torch.Tensor) -> Any:
    """Return the memory of a contiguous CPU tensor as a numpy array of a dtype that MPI supports."""
    import torch

    return (x.view(torch.int16) if x.dtype in (torch.float16, torch.bfloat16) else x).numpy()


def _pieces(buffer: Any) -> list[Any]:
    if buffer.size <= MAX_COUNT:
        return [buffer]
    buffer = buffer.reshape(-1)
    return [buffer[start : start + MAX_COUNT] for start in range(0, buffer.size, MAX_COUNT)]


def _starts(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]


def _empty(x: torch.Tensor, count: int) -> torch.Tensor:
    import torch

    return torch.empty(count, dtype=x.dtype)


def _host(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_cpu else x.cpu()


def _back(host: torch.Tensor, x: torch.Tensor) -> None:
    if host is not x:
        x.copy_(host)


def _return(result: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return result.to(x.device)
    _back(result, out)
    return out
