"""torch.distributed transport: ranks are processes of a torchrun job, with gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from distir_relax.errors import LostError, RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.arrays import as_torch, combine, split
from distir_relax.runtime.communicator import Communicator, all_reduce_bytes, check_reduction
from distir_relax.runtime.hosts import interface_to
from distir_relax.runtime.launcher_detection import launch_size, local_size
from distir_relax.runtime.point_to_point import Step
from distir_relax.runtime.progress import Traffic
from distir_relax.runtime.started_collectives import Started
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array

# The watchdog's time-out must expire before torch's own.
_NEVER = timedelta(days=7)
# Time-out of a store that is queried for the present ranks.
_ANSWER = timedelta(seconds=2)


class TorchWorld(World):
    """The default process group of torchrun's environment. Raises RunError when the ranks cannot connect."""

    kind = "torch"

    def __init__(self) -> None:
        import torch.distributed as dist

        super().__init__()
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        choose_interface()
        threading.Thread(target=_announce, args=(self.rank,), daemon=True).start()
        try:
            dist.init_process_group("gloo", timeout=_NEVER)
        except (RuntimeError, ValueError) as wrong:
            used = os.environ.get("GLOO_SOCKET_IFNAME", "that of this host's name")
            raise RunError(
                f"the ranks cannot connect over torch.distributed: {wrong}",
                hint=f"gloo uses the network interface {used}; GLOO_SOCKET_IFNAME chooses another",
            ) from None
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store
        self._exchanges = 0
        # A store is locked while it waits for a key: messages outside of the program need their own connection.
        self._control = store.clone()
        self._sent = [0] * self.size
        self._received = [0] * self.size

    def communicator(self, mesh: DeviceMesh, device: str = "cpu") -> TorchCommunicator:
        """See `World.communicator`. Raises RunError for GPUs that ranks share, which NCCL does not support."""
        if device != "cpu":
            _check_own_devices(self.local_size)
        return TorchCommunicator(mesh, self.rank, device)

    def _exchange(self, text: str) -> list[str]:
        prefix = f"distir/exchange/{self._exchanges}"
        self._exchanges += 1
        self._store.set(f"{prefix}/{self.rank}", text)
        with _peers_alive("agree with"):
            return [self._store.get(f"{prefix}/{rank}").decode() for rank in range(self.size)]

    def abort(self, code: int) -> NoReturn:
        """See `World.abort`. torchrun ends the other ranks when one has failed."""
        self.announce()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def send_message(self, peer: int, message: str) -> None:
        """See `World.send_message`."""
        with contextlib.suppress(RuntimeError):
            self._control.set(f"distir/control/{self.rank}/{peer}/{self._sent[peer]}", message)
            self._sent[peer] += 1

    def received_messages(self) -> list[tuple[int, str]]:
        """See `World.received_messages`."""
        messages = []
        with contextlib.suppress(RuntimeError):
            for peer in range(self.size):
                while self._control.check([key := f"distir/control/{peer}/{self.rank}/{self._received[peer]}"]):
                    messages.append((peer, self._control.get(key).decode()))
                    self._received[peer] += 1
        return messages

    def close(self) -> None:
        """See `World.close`."""
        import torch.distributed as dist

        with self.waiting("the end of the launch"):
            dist.barrier()
        dist.destroy_process_group()


def _check_own_devices(ranks: int) -> None:
    import torch

    if ranks > (count := torch.cuda.device_count()):
        raise RunError(
            f"expected a GPU for each of the {ranks} ranks of this host, found {count}",
            hint="start as many ranks as there are GPUs, or use mpirun: its ranks may share one",
        )


def choose_interface() -> None:
    """Make gloo use the network interface that routes to MASTER_ADDR, unless GLOO_SOCKET_IFNAME is set.

    By default gloo uses the one of this host's name, which is often the loopback. If MASTER_ADDR is the loopback for
    this host, but may not be for others, a warning says so. Launches on one host need none of this.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or local_size() == launch_size():
        return
    route = interface_to(os.environ["MASTER_ADDR"])
    if route is None:
        return
    name, address = route
    master = os.environ["MASTER_ADDR"]
    if address.startswith("127.") and master != "localhost" and not master.startswith("127."):
        warnings.warn(
            f"{master} is {address} on this host, where ranks of other hosts cannot reach it: set MASTER_ADDR to its "
            "address in the network, or GLOO_SOCKET_IFNAME to its interface",
            stacklevel=2,
        )
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name


def store_address() -> str:
    """Return the address of the store that the ranks connect to."""
    return f"{os.environ['MASTER_ADDR']}:{_port()}"


def present_ranks(size: int) -> set[int] | None:
    """Return the ranks, of `size`, that have registered in the launch's store; None if it does not answer."""
    try:
        # torch prints its own stack if nobody listens.
        socket.create_connection((os.environ["MASTER_ADDR"], _port()), _ANSWER.total_seconds()).close()
        store = _client(_ANSWER)
        return {rank for rank in range(size) if store.check([_presence(rank)])}
    except (OSError, RuntimeError, ValueError):
        return None


def _announce(rank: int) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        _client(_NEVER).set(_presence(rank), "")


def _client(timeout: timedelta) -> Any:
    """Open another connection to the store, which is served by torchrun or else by rank 0."""
    import torch.distributed

    library: Any = torch.distributed
    address = os.environ["MASTER_ADDR"]
    return library.TCPStore(address, _port(), is_master=False, timeout=timeout, wait_for_workers=False)


def _port() -> int:
    return int(os.environ.get("MASTER_PORT", "29500"))


def _presence(rank: int) -> str:
    return f"distir/present/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


class TorchCommunicator(Communicator):
    """One rank of a mesh over torch.distributed: NCCL groups when `device` is a GPU, gloo otherwise."""

    def __init__(self, mesh: DeviceMesh, rank: int, device: str = "cpu") -> None:
        super().__init__(rank, mesh, device)
        import torch.distributed as dist

        self._dist = dist
        self._ops: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        backend = "gloo"
        self._device_ids: list[int] | None = None
        if device != "cpu":
            import torch

            # NCCL uses the current device.
            torch.cuda.set_device(device)
            backend = "nccl"
            self._device_ids = [torch.cuda.current_device()]
        self._world: Any = dist.new_group(backend=backend, timeout=_NEVER)
        self._async_group: Any = dist.new_group(backend=backend, timeout=_NEVER)
        self._pending_sends: list[tuple[Any, torch.Tensor]] = []
        self._by_axis: list[Any] = []
        for axis in range(len(mesh.shape)):
            # torch requires every rank to create every group, its own or not, in the same order.
            for group in sorted({mesh.group(r, axis) for r in range(mesh.size)}):
                group_handle = dist.new_group(list(group), backend=backend, timeout=_NEVER)
                if rank in group:
                    self._by_axis.append(group_handle)

    def _all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: int, op: str) -> None:
        if out is not x:
            out.copy_(x)
        with _peers_alive("reduce with"):
            self._dist.all_reduce(out, self._ops[op], group=self._by_axis[axis])

    def _start_all_reduce(self, x: Array, axis: str, op: str, step: Step) -> Started:
        index, n, _ = self._place(axis)
        source = as_torch(x)
        check_reduction(op, source)
        with self._step(step, "all_reduce", all_reduce_bytes(n, source), index):
            if n == 1 or not source.numel():
                return Started(lambda: (source.clone(), Traffic()))
            work, finish = self._prepared(source, op, n)
            reduced = work if work is not source else work.clone()
            with _peers_alive("reduce with"):
                request: Any = self._dist.all_reduce(
                    reduced, self._ops["sum" if op == "mean" else op], group=self._by_axis[index], async_op=True
                )

        def result() -> tuple[torch.Tensor, Traffic]:
            with _peers_alive("reduce with"):
                request.wait()
            return finish(reduced), Traffic()

        return Started(result)

    def _all_gather(self, x: torch.Tensor, counts: list[int], axis: int, out: torch.Tensor | None) -> torch.Tensor:
        result = x.new_empty(sum(counts)) if out is None else out
        received = split(result, counts)
        self._swap([x] * len(counts), received, axis)
        return result

    def _reduce_scatter(self, x: torch.Tensor, counts: list[int], axis: int, op: str) -> torch.Tensor:
        me = self._coordinates[axis]
        pieces = split(x, counts)
        received = [x.new_empty(counts[me]) for _ in counts]
        self._swap(pieces, received, axis)
        # Combined in rank order, so that the result does not depend on arrival order.
        return combine(received, op)

    def _all_to_all(
        self, x: torch.Tensor, sent: list[int], received: list[int], axis: int, largest: int
    ) -> torch.Tensor:
        result = x.new_empty(sum(received))
        self._swap(split(x, sent), split(result, received), axis)
        return result

    def _swap(self, sent: list[torch.Tensor], received: list[torch.Tensor], axis: int) -> None:
        """Send piece i to rank i of the group. gloo has no uneven collectives; point-to-point messages serve both."""
        dist = self._dist
        me = self._coordinates[axis]
        group = self.mesh.group(self.rank, axis)
        received[me].copy_(sent[me])
        operations = []
        for i, peer in enumerate(group):
            if i == me:
                continue
            if sent[i].numel():
                operations.append(dist.P2POp(dist.isend, _movable(sent[i].contiguous()), peer, self._world))
            if received[i].numel():
                operations.append(dist.P2POp(dist.irecv, _movable(received[i]), peer, self._world))
        if operations:
            with _peers_alive("exchange with"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()

    def _send(self, x: torch.Tensor, peer: int) -> None:
        if x.numel():
            with _peers_alive("send to"):
                self._dist.send(_movable(x), peer, group=self._world)

    def _recv(self, x: torch.Tensor, peer: int) -> None:
        if x.numel():
            with _peers_alive("receive from"):
                self._dist.recv(_movable(x), peer, group=self._world)

    def _start_send(self, x: torch.Tensor, peer: int, step: int) -> None:
        if x.numel():
            with _peers_alive("send to"):
                work = self._dist.isend(_movable(x), peer, group=self._async_group, tag=step)
            self._release_completed_sends()
            self._pending_sends.append((work, x))

    def _start_recv(self, x: torch.Tensor, peer: int, step: int) -> Callable[[], None]:
        if not x.numel():
            return lambda: None
        with _peers_alive("receive from"):
            work: Any = self._dist.irecv(_movable(x), peer, group=self._async_group, tag=step)

        def finish() -> None:
            with _peers_alive("receive from"):
                work.wait()

        return finish

    def _release_completed_sends(self) -> None:
        self._pending_sends = [(work, x) for work, x in self._pending_sends if not work.is_completed()]

    def _finish_sends(self) -> None:
        with _peers_alive("send to"):
            for work, _ in self._pending_sends:
                work.wait()
        self._pending_sends.clear()

    def _barrier(self) -> None:
        with _peers_alive("wait for"):
            self._dist.barrier(group=self._world, device_ids=self._device_ids)


def _movable(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of a flat tensor as bytes: transports differ in the dtypes they support."""
    import torch

    # One element, or none, is contiguous with any stride, but only with 1 a view as bytes.
    return x.as_strided(x.shape, (1,)).view(torch.uint8)


@contextlib.contextmanager
def _peers_alive(doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as wrong:
        # Drop the advice at the end of gloo's messages.
        reason = str(wrong).splitlines()[0].partition(". This is")[0]
        raise LostError(f"cannot {doing} the other ranks; one of them has ended: {reason}") from None
