"""torch.distributed transport: ranks are processes of a torchrun job, with gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from distir_relax.errors import LostError, RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.arrays import as_torch, bytes_of, combine, split
from distir_relax.runtime.communicator import all_reduce_bytes, check_reduction
from distir_relax.runtime.hosts import interface_to
from distir_relax.runtime.launcher_detection import launch_size, local_size
from distir_relax.runtime.point_to_point import Step
from distir_relax.runtime.progress import Traffic
from distir_relax.runtime.started_collectives import Started
from distir_relax.runtime.transports.group_hosts import GroupHosts, HostSums
from distir_relax.runtime.transports.process_communicator import ProcessCommunicator
from distir_relax.runtime.transports.shared_sums import SharedSums
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array

# The watchdog's time-out must expire before torch's own.
_NEVER = timedelta(days=7)
# Time-out of a store that is queried for the present ranks.
_ANSWER = timedelta(seconds=2)
# Bytes that go from each rank to each other at once: a ring takes 2 (n - 1) latencies, a relay another one.
_SMALL = 1 << 17


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
        self._communicators = 0
        self.host_of = self.exchange(self.rank - self.local_rank, "the places of all ranks")

    def communicator(self, mesh: DeviceMesh, device: str = "cpu") -> TorchCommunicator:
        """See `World.communicator`. Raises RunError for GPUs that ranks share, which NCCL does not support."""
        if device != "cpu":
            _check_own_devices(self.local_size)
        self._communicators += 1
        return TorchCommunicator(mesh, self, device, str(self._communicators))

    def _exchange(self, text: str) -> list[str]:
        self._exchanges += 1
        return self.gather_texts(text, f"exchange/{self._exchanges}", range(self.size))

    def gather_texts(self, text: str, key: str, ranks: Sequence[int]) -> list[str]:
        """Return the text of each of some ranks, which call this with a `key` that is not used again."""
        self._store.set(f"distir/{key}/{self.rank}", text)
        with _peers_alive("agree with"):
            return [self._store.get(f"distir/{key}/{rank}").decode() for rank in ranks]

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


class TorchCommunicator(ProcessCommunicator):
    """One rank of a mesh over torch.distributed: NCCL groups when `device` is a GPU, gloo otherwise.

    `key` is different for each communicator of a process. A channel is that of the thread of its started collectives.
    """

    def __init__(self, mesh: DeviceMesh, world: TorchWorld, device: str, key: str, is_channel: bool = False) -> None:
        super().__init__(world.rank, mesh, device)
        import torch.distributed as dist

        rank = world.rank
        self._torch_world, self._key = world, key

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
        self._hosts: list[GroupHosts] = []
        self._leaders: list[Any] = []
        self._sums_by_host: dict[int, HostSums | None] = {}
        for axis in range(len(mesh.shape)):
            # torch requires every rank to create every group, its own or not, in the same order.
            for group in sorted({mesh.group(r, axis) for r in range(mesh.size)}):
                hosts = GroupHosts.of(group, world.host_of, rank)
                group_handle = dist.new_group(list(group), backend=backend, timeout=_NEVER)
                leaders = group_handle
                if hosts.is_hierarchical:
                    leaders = dist.new_group(hosts.leaders, backend=backend, timeout=_NEVER)
                if rank in group:
                    self._by_axis.append(group_handle)
                    self._hosts.append(hosts)
                    self._leaders.append(leaders)
        self._thread_channel: TorchCommunicator | None = None
        if not is_channel and device == "cpu" and len(set(world.host_of)) > 1:
            # All ranks create it together, so not at the first collective that one of them starts.
            self._thread_channel = TorchCommunicator(mesh, world, device, f"{key}/thread", is_channel=True)

    def _make_sums(self, axis: int) -> SharedSums | None:
        return self._share(axis) if self.device == "cpu" and len(self._hosts[axis].hosts) == 1 else None

    def _share(self, axis: int) -> SharedSums | None:
        """Return sums over the ranks of a group on this host."""
        here = self._hosts[axis].here
        calls = count()

        def exchange(text: str) -> list[str]:
            return self._gather_texts(text, f"sums/{axis}/{here[0]}/{next(calls)}", here)

        return SharedSums.of(here.index(self.rank), len(here), exchange)

    def _all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: int, op: str) -> None:
        if self.device == "cpu" and bytes_of(x) * (self.mesh.shape[axis] - 1) <= _SMALL:
            out.copy_(self._combine_all(x.view(-1), axis, op).view(x.shape))
            return
        sums = self._host_sums(axis) if op == "sum" else None
        if sums is not None and sums.sum(x, out):
            return
        if out is not x:
            out.copy_(x)
        with _peers_alive("reduce with"):
            self._dist.all_reduce(out, self._ops[op], group=self._by_axis[axis])

    def _combine_all(self, x: torch.Tensor, axis: int, op: str) -> torch.Tensor:
        """Return the reduction of small tensors: each rank gets those of all others at once, and combines them."""
        received = [x.new_empty(x.numel()) for _ in range(self.mesh.shape[axis])]
        self._swap([x] * len(received), received, axis)
        return combine(received, op)

    def _host_sums(self, axis: int) -> HostSums | None:
        """Return sums over a group on several hosts, None where gloo is to sum; its ranks call it first together."""
        if axis not in self._sums_by_host:
            hosts, group = self._hosts[axis], self.mesh.group(self.rank, axis)
            can = hosts.is_hierarchical and self.device == "cpu"
            sums = self._share(axis) if can and len(hosts.here) > 1 else None
            if can:
                has_sums = sums is not None or len(hosts.here) == 1
                can = all(self._gather_texts("yes" if has_sums else "", f"hosts/{axis}/{group[0]}", group))
            self._sums_by_host[axis] = HostSums(hosts, sums, partial(self._sum_of_leaders, axis)) if can else None
        return self._sums_by_host[axis]

    def _sum_of_leaders(self, axis: int, x: torch.Tensor) -> None:
        with _peers_alive("reduce with"):
            self._dist.all_reduce(x, self._ops["sum"], group=self._leaders[axis])

    def _gather_texts(self, text: str, key: str, ranks: Sequence[int]) -> list[str]:
        return self._torch_world.gather_texts(text, f"{self._key}/{key}", ranks)

    def _channel(self, axis: str) -> TorchCommunicator | None:
        # On one host the processors that compute also reduce.
        return None if len(self._hosts[self._place(axis)[0]].hosts) == 1 else self._thread_channel

    def _start_all_reduce(self, x: Array, axis: str, op: str, step: Step) -> Started:
        if self.device == "cpu":
            return super()._start_all_reduce(x, axis, op, step)
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
        received, hosts = split(result, counts), self._hosts[axis]
        if not hosts.is_hierarchical or sum(counts) * x.element_size() <= _SMALL:
            self._swap([x] * len(counts), received, axis)
            return result
        place = dict(zip(self.mesh.group(self.rank, axis), received, strict=True))
        place[self.rank].copy_(x)
        mine = [self.rank, *hosts.relayed_by(self.rank)]
        self._exchange([(x, peer) for peer in hosts.relays], [(place[peer], peer) for peer in mine[1:]])
        locals_ = [peer for peer in hosts.here if peer != self.rank]
        self._exchange(
            [(place[member], peer) for peer in locals_ for member in mine],
            [(place[member], peer) for peer in locals_ for member in (peer, *hosts.relayed_by(peer))],
        )
        return result

    def _reduce_scatter(self, x: torch.Tensor, counts: list[int], axis: int, op: str) -> torch.Tensor:
        me, hosts = self._coordinates[axis], self._hosts[axis]
        pieces = split(x, counts)
        if not hosts.is_hierarchical or bytes_of(x) <= _SMALL:
            received = [x.new_empty(counts[me]) for _ in counts]
            self._swap(pieces, received, axis)
            # Combined in rank order, so that the result does not depend on arrival order.
            return combine(received, op)
        place = dict(zip(self.mesh.group(self.rank, axis), pieces, strict=True))
        # Each rank combines, for its host, its own part and those that it passes on.
        mine = [self.rank, *hosts.relayed_by(self.rank)]
        parts = {
            (peer, member): place[member] if peer == self.rank else x.new_empty(place[member].numel())
            for peer in hosts.here
            for member in mine
        }
        locals_ = [peer for peer in hosts.here if peer != self.rank]
        self._exchange(
            [(place[member], peer) for peer in locals_ for member in (peer, *hosts.relayed_by(peer))],
            [(parts[peer, member], peer) for peer in locals_ for member in mine],
        )
        of_host = {member: combine([parts[peer, member] for peer in hosts.here], op) for member in mine}
        of_others = [(x.new_empty(counts[me]), peer) for peer in hosts.relays]
        self._exchange([(of_host[member], member) for member in mine[1:]], of_others)
        totals = sorted([*of_others, (of_host[self.rank], self.rank)], key=lambda part: part[1])
        return combine([part for part, _ in totals], op)

    def _all_to_all(
        self, x: torch.Tensor, sent: list[int], received: list[int], axis: int, largest: int
    ) -> torch.Tensor:
        result = x.new_empty(sum(received))
        self._swap(split(x, sent), split(result, received), axis)
        return result

    def _swap(self, sent: list[torch.Tensor], received: list[torch.Tensor], axis: int) -> None:
        """Send piece i to rank i of the group. gloo has no uneven collectives; point-to-point messages serve both."""
        me = self._coordinates[axis]
        received[me].copy_(sent[me])
        peers = [(i, peer) for i, peer in enumerate(self.mesh.group(self.rank, axis)) if i != me]
        self._exchange([(sent[i], peer) for i, peer in peers], [(received[i], peer) for i, peer in peers])

    def _exchange(self, sent: Iterable[tuple[torch.Tensor, int]], received: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Send and receive tensors, each to or from a rank of the world, in the same order for both ends."""
        dist = self._dist
        moves = [(dist.isend, x.contiguous(), peer) for x, peer in sent]
        moves += [(dist.irecv, x, peer) for x, peer in received]
        operations = [dist.P2POp(move, _movable(x), peer, self._world) for move, x, peer in moves if x.numel()]
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
