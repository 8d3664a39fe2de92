"""Hosts of a group: collectives between hosts send over the network once what several ranks of a host need.

all_reduce       sum on each host, all-reduce between the first ranks of the hosts, copy on each host
all_gather       each shard goes to one rank of each other host, then to all of that host
reduce_scatter   each part is reduced on each host by one of its ranks, then goes to the rank that keeps it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from distir_relax.kernels.native import stored_name
from distir_relax.runtime.transports.shared_sums import SharedSums

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GroupHosts:
    """The ranks of a group for each host. `rank` is this process's.

    The relay of a rank r on another host is the rank there that sends to r, or receives from it, for all of that host.
    """

    hosts: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, group: Sequence[int], host_of: Sequence[int], rank: int) -> GroupHosts:
        """Divide a group; `host_of` is the host of each rank of the world."""
        ordered = sorted(group, key=lambda member: (host_of[member], member))
        return cls(tuple(tuple(members) for _, members in groupby(ordered, lambda member: host_of[member])), rank)

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several hosts, some with several ranks."""
        return len(self.hosts) > 1 and any(len(host) > 1 for host in self.hosts)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self._host(self.rank)

    @property
    def leaders(self) -> list[int]:
        """The first rank of each host."""
        return [host[0] for host in self.hosts]

    @property
    def relays(self) -> list[int]:
        """The relays of this rank, one on each other host."""
        return [self._relay(self.rank, host) for host in self.hosts if self.rank not in host]

    def relayed_by(self, member: int) -> list[int]:
        """Return the ranks of other hosts whose relay on its own host is `member`."""
        here = self._host(member)
        return [
            other for host in self.hosts for other in host if other not in here and self._relay(other, here) == member
        ]

    def _host(self, member: int) -> tuple[int, ...]:
        return next(host for host in self.hosts if member in host)

    def _relay(self, member: int, host: tuple[int, ...]) -> int:
        return host[self._host(member).index(member) % len(host)]


class HostSums:
    """Sums over a group on several hosts. `sums` are those of this host, None if it has one rank of the group.

    `reduce` sums a tensor of each of the hosts' first ranks, in place.
    """

    def __init__(self, hosts: GroupHosts, sums: SharedSums | None, reduce: Callable[[torch.Tensor], None]) -> None:
        self._sums, self._reduce = sums, reduce
        self._is_leader = hosts.rank == hosts.here[0]

    def sum(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Write the sum of `x` to `out`, which may be `x`; return False for a dtype that hosts do not sum."""
        if stored_name(x.dtype) is None:
            return False
        if self._sums is None:
            out.copy_(x)
            self._reduce(out)
            return True
        self._sums.sum(x, out)
        if self._is_leader:
            self._reduce(out)
        else:
            out.zero_()
        # The others add zeros to the total of all hosts.
        return self._sums.sum(out, out)
