"""Limits of a host's processor time and memory, by control groups of version 1.

A host has a group for each limit that was set. The host's processes are moved into it; processes that enter the host
later join by themselves (`tests.hosts.namespaces`): they find the groups as links in the folder of the limits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_REMOVAL = 2.0


def has_memory_limits() -> bool:
    """Return whether this machine can limit the memory of a host."""
    return (_ROOT / "memory" / "memory.limit_in_bytes").exists()


@dataclass(frozen=True)
class Limits:
    """The control groups of a host. `name` is unique on the machine; `folder` has a link to each group."""

    name: str
    folder: Path

    def share_of_core(self, share: float, pids: Iterable[int]) -> None:
        """Limit processor time to a share of a core."""
        # With the kernel's period of 100 ms a process would stop for much of that at a time.
        self._set("cpu", {"cpu.cfs_period_us": 5000, "cpu.cfs_quota_us": round(5000 * share)}, pids)

    def memory(self, megabytes: int, pids: Iterable[int]) -> None:
        """Limit memory: the kernel kills a process of the host when it needs more and no cache can be dropped."""
        self._set("memory", {"memory.limit_in_bytes": megabytes << 20}, pids)
        with contextlib.suppress(OSError):
            # Where the kernel counts swap, it is no way out.
            (_ROOT / "memory" / self.name / "memory.memsw.limit_in_bytes").write_text(str(megabytes << 20))

    def remove(self) -> None:
        """Remove the groups, once their processes have ended."""
        until = time.monotonic() + _REMOVAL
        for link in self.folder.iterdir():
            while time.monotonic() < until:
                try:
                    link.resolve().rmdir()
                    break
                except OSError:
                    time.sleep(0.02)
            link.unlink()

    def _set(self, controller: str, values: Mapping[str, int], pids: Iterable[int]) -> None:
        group, link = _ROOT / controller / self.name, self.folder / controller
        group.mkdir(exist_ok=True)
        for file, value in values.items():
            (group / file).write_text(str(value))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
        if not link.exists():
            link.symlink_to(group)
