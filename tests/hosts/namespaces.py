"""A host as the namespaces of a process that holds them: network, host name, mounts and, if its clocks differ, time.

Mounts are the machine's but for /tmp and /dev/shm, which are the host's own. Folders below /tmp that all hosts use,
such as that of a bundle, are visible in each.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.hosts.clocks import Clocks
from tests.hosts.limits import Limits
from tests.hosts.shell import run

TMP = Path("/tmp")
# The new /tmp is made elsewhere and moved, since it hides the folders that it is to show.
_HOLD = """
set -e
hostname "$1"; new=$2; shift 2
mount -t tmpfs -o mode=1777 tmpfs "$new"
for path do mkdir -p "$new/${path#/tmp/}"; mount --bind "$path" "$new/${path#/tmp/}"; done
mount --move "$new" /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo $$
exec sleep infinity
"""
_ENTER = """#!/bin/sh
for group in {groups}/*; do [ ! -e "$group" ] || echo $$ > "$group/cgroup.procs"; done
{variables}exec nsenter --target {pid} --net --mount --uts {time} sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"
"""


class NamespaceHost:
    """The namespaces of a host, whose network namespace is there, and the command that enters them.

    `folder` is for files of the host, `shared` are the folders that it shares with others, `variables` are those of its
    processes.
    """

    def __init__(
        self, name: str, folder: Path, shared: Iterable[Path], clocks: Clocks, variables: Mapping[str, str]
    ) -> None:
        for part in ("groups", "tmp"):
            (folder / part).mkdir(parents=True)
        self.name = name
        self.limits = Limits(f"distir-{folder.parent.name}-{name}", folder / "groups")
        self._holder = subprocess.Popen(
            [
                "nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts", *clocks.namespace, "--fork",
                "--kill-child", "sh", "-c", _HOLD, "sh", name, str(folder / "tmp"), *map(str, _below_tmp(shared)),
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        line = self._holder.stdout.readline()
        if not line:
            raise RuntimeError(f"host {name} does not start: {self._holder.communicate()[1].strip()}")
        self.pid = int(line)
        self.entrance = folder / "enter"
        """A program that runs its arguments as a command on this host."""
        self.entrance.write_text(_ENTER.format(
            groups=shlex.quote(str(folder / "groups")), pid=self.pid, time="--time" if clocks.namespace else "",
            variables="".join(f"export {key}={shlex.quote(value)}\n" for key, value in variables.items()),
        ))  # fmt: skip
        self.entrance.chmod(0o755)

    @property
    def root(self) -> Path:
        """The root of the host's file system, as other processes see it."""
        return Path(f"/proc/{self.pid}/root")

    def pids(self) -> list[int]:
        """Return the processes of the host, without those that hold its namespaces."""
        holders = (self._holder.pid, self.pid)
        return [pid for pid in map(int, run("ip", "netns", "pids", self.name).split()) if pid not in holders]

    def close(self) -> None:
        """End the host, whose processes have ended."""
        self._holder.kill()
        self._holder.communicate()
        self.limits.remove()


def _below_tmp(paths: Iterable[Path]) -> list[Path]:
    """Return the folders that are below /tmp, without those within another."""
    below = sorted({path for path in map(Path, map(os.path.abspath, paths)) if path.is_dir() and TMP in path.parents})
    return [path for path in below if not any(other in path.parents for other in below)]
