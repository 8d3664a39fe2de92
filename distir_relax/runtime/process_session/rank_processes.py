"""Processes of a session's ranks: start, connection, end."""

from __future__ import annotations

import hmac
import os
import queue
import secrets
import select
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distir_relax.bundle import BundleFile
from distir_relax.errors import LostError, RunError
from distir_relax.runtime.agents.admission import admit
from distir_relax.runtime.agents.launch_command import COMMAND, launch_line
from distir_relax.runtime.agents.wire import session_token
from distir_relax.runtime.error_messages import error_from_json
from distir_relax.runtime.exit_codes import INFRASTRUCTURE, of_launch
from distir_relax.runtime.hosts import HostList, interface_to
from distir_relax.runtime.launch import end_launch, local_launch
from distir_relax.runtime.launched import RankOptions
from distir_relax.runtime.local_ranks import has_ended
from distir_relax.runtime.process_session.connection import Connection, Disconnected, short_path
from distir_relax.support.units import listed

SOCKET, TOKEN = "socket", "token"
"""Files in the folder of a session."""

LOST_HINT = (
    "signal 9 often comes from the system when memory runs out (dmesg shows it), and distir simulate predicts the "
    "memory of a rank"
)
_AGAIN = "start the session again"
# Seconds: interval of looking at the launcher, for the first message of a connection, for a launch to end by itself,
# for processes to end that were killed.
_LOOK, _HELLO, _STOP, _KILLED = 0.05, 5.0, 5.0, 2.0
_MOST_OUTPUT = 2000
_PROGRAM = ("-m", "distir_relax.runtime.process_session.rank_server")


@dataclass(frozen=True)
class ServeOptions:
    """What a rank serves: a bundle, by names of files alone, and how; `verified` is as for `open_session`.

    With `requests` it serves steps of several requests instead of calls.
    """

    bundle: BundleFile
    ranks: RankOptions
    verified: list[Any]
    requests: bool = False


@dataclass(eq=False)
class RankProcesses:
    """The launcher, and the ranks' connections and processes (psutil's), in rank order."""

    launcher: str
    size: int
    launch: subprocess.Popen[bytes]
    output: Any
    """The file of the launcher's own output."""
    connections: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    verified: list[Any] = field(default_factory=list)
    owner: int = field(default_factory=os.getpid)
    are_local: bool = True
    """Whether the ranks are on this machine: their processes are known, and share memory with this one."""
    folder: str = ""
    """The folder of the launch on this machine, removed at its end."""

    @classmethod
    def start(
        cls, size: int, options: ServeOptions, launcher: str | HostList | None, threads: int | None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> RankProcesses:  # fmt: skip
        """Start the ranks, here or on hosts, with more environment `variables`, and wait until all are loaded.

        Raises the error of a rank; RunError if one ends, or if not all have connected to each other within the options'
        time-out. No process is left then.
        """
        if isinstance(launcher, HostList):
            return cls._start_on_hosts(launcher, options, threads, variables)
        folder = tempfile.mkdtemp(prefix="distir-")
        try:
            program = [*_PROGRAM, folder]
            name, command, environment = local_launch(size, program, launcher, threads, folder)
            token = secrets.token_hex(16)
            (Path(folder) / TOKEN).write_text(token, encoding="ascii")
            with _listening(folder) as listener:
                output = tempfile.TemporaryFile()  # noqa: SIM115
                environment = _importing({**environment, **variables})
                launch = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    # Ctrl-C in a terminal is for the driver alone.
                    start_new_session=True,
                )  # fmt: skip
                ranks = cls(name, size, launch, output, folder=folder)
                _OPEN.add(ranks)
                try:
                    ranks._await(listener, token, options)
                except BaseException:
                    ranks.end()
                    raise
            return ranks
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @classmethod
    def _start_on_hosts(
        cls, hosts: HostList, options: ServeOptions, threads: int | None, variables: Mapping[str, str]
    ) -> RankProcesses:
        """See `start`. Ranks connect by TCP, and prove that they know the token of the launch."""
        others = [host.name for host in hosts.hosts if not host.is_this]
        route = interface_to(others[0]) if others else None
        token, output = secrets.token_bytes(32), tempfile.TemporaryFile()  # noqa: SIM115
        with socket.create_server((route[1] if route else "127.0.0.1", 0), backlog=128) as listener:
            address, port = listener.getsockname()
            bundle = str(options.bundle.path)
            program = [sys.executable, "-P", *_PROGRAM, f"tcp:{address}:{port}", bundle]
            number = threads or os.environ.get("OMP_NUM_THREADS")
            given = {"OMP_NUM_THREADS": str(number)} if number else {}
            environment = _importing({**os.environ})
            launch = subprocess.Popen(
                COMMAND, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
            assert launch.stdin is not None
            launch.stdin.write(launch_line(hosts, program, {**given, **variables}, bundle, token))
            launch.stdin.close()
            ranks = cls("the launch", hosts.ranks, launch, output, are_local=False)
            _OPEN.add(ranks)
            try:
                ranks._await(_Door(listener, session_token(token)), "", options)
            except BaseException:
                ranks.end()
                raise
            finally:
                # To close it would not end the thread that waits for connections.
                listener.shutdown(socket.SHUT_RDWR)
        return ranks

    def lost(self, ranks: Sequence[int]) -> RunError:
        """Return the error of ranks that have ended during a session."""
        if not self.are_local:
            with suppress(subprocess.TimeoutExpired):
                self.launch.wait(_STOP)
            return self._lost_on_hosts() or LostError(f"{_named(ranks)} ended", hint=_AGAIN)
        lines = [f"rank {rank} has ended (process {self.processes[rank].pid}): killed, or crashed" for rank in ranks]
        return LostError("\n  ".join(lines), hint=LOST_HINT)

    def _lost_on_hosts(self) -> LostError | None:
        """Return the error that the launch has printed, if a rank or a host was lost."""
        lines = [line.removeprefix("error: ") for line in self._printed().splitlines() if line.startswith("error: ")]
        is_lost = of_launch(self.launch.poll() or 0) == INFRASTRUCTURE
        return LostError(lines[0], hint=_AGAIN) if lines and is_lost else None

    def stop(self) -> None:
        """Let the ranks end in good order, then end those that have not."""
        if os.getpid() == self.owner:
            with suppress(Disconnected):
                for connection in self.connections:
                    connection.send({"kind": "stop"})
            with suppress(subprocess.TimeoutExpired):
                self.launch.wait(_STOP)
        self.end()

    def end(self) -> None:
        """End the launch and all ranks now. Does nothing in another process than the one that started them."""
        if os.getpid() != self.owner:
            return
        end_launch(self.launch)
        import psutil

        for process in self._local:
            # A rank whose launcher was killed; psutil does not signal another process of the same number.
            with suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + _KILLED
        while not all(map(has_ended, self._local)) and time.monotonic() < deadline:
            time.sleep(0.005)
        for connection in self.connections:
            connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.launch.wait(_STOP)
        self.output.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        _OPEN.discard(self)

    @property
    def _local(self) -> list[Any]:
        return self.processes if self.are_local else []

    def forget(self) -> None:
        """Close the connections of this process alone, which is a fork of the one that started the ranks."""
        for connection in self.connections:
            connection.forget()

    def _await(self, listener: socket.socket | _Door, token: str, options: ServeOptions) -> None:
        """Accept the connections of all ranks, and wait until each has joined the others, and has loaded."""
        arrivals: dict[int, _Arrival] = {}
        start = time.monotonic()
        while len(arrivals) < self.size or any(arrival.state != "ready" for arrival in arrivals.values()):
            is_over = self.launch.poll() is not None
            by_file = {arrival.connection.socket.fileno(): arrival for arrival in arrivals.values()}
            events = select.poll()
            for file in (listener.fileno(), *by_file):
                events.register(file, select.POLLIN)
            files = [file for file, _ in events.poll(0 if is_over else _LOOK * 1e3)]
            for file in files:
                if file == listener.fileno():
                    self._accept(listener, token, options, arrivals)
                else:
                    by_file[file].read()
            failed = [arrival for arrival in arrivals.values() if arrival.error]
            if failed:
                raise error_from_json(min(failed, key=lambda arrival: arrival.rank).error)
            ended = [rank for rank, arrival in arrivals.items() if arrival.state == "ended"]
            if ended or (is_over and not files):
                raise self._ended(ended or sorted(set(range(self.size)) - set(arrivals)))
            self._check_time(start, options.ranks.timeout, arrivals)
        self.connections = [arrivals[rank].connection for rank in range(self.size)]
        self.processes = [arrivals[rank].process for rank in range(self.size)]
        self.verified = arrivals[0].verified

    def _accept(
        self, listener: socket.socket | _Door, token: str, options: ServeOptions, arrivals: dict[int, _Arrival]
    ) -> None:
        """Accept a connection, and send the options if it is that of a rank that has not connected yet."""
        import psutil

        end, _ = listener.accept()
        end.settimeout(_HELLO)
        connection = Connection(end)
        self.connections.append(connection)
        errors = _error_output()
        try:
            hello = connection.receive().header
            rank = int(hello["rank"])
            if not hmac.compare_digest(str(hello["token"]), token) or rank in arrivals or not 0 <= rank < self.size:
                raise Disconnected
            arrival = _Arrival(rank, connection, psutil.Process(hello["pid"]) if self.are_local else None)
            self.processes.append(arrival.process)
            connection.send({"kind": "serve", **asdict(options)}, files=[errors] if self.are_local else [])
            arrivals[rank] = arrival
            end.settimeout(None)
        except (Disconnected, KeyError, TypeError, ValueError, psutil.Error):
            connection.close()
        finally:
            os.close(errors)

    def _ended(self, ranks: Sequence[int]) -> RunError:
        """Return the error of a start in which some ranks have ended, with the launcher's output."""
        with suppress(subprocess.TimeoutExpired):
            self.launch.wait(1.0 if self.are_local else _STOP)
        if not self.are_local and (lost := self._lost_on_hosts()):
            return lost
        printed = "".join(f"\n  {line}" for line in self._printed().splitlines() if line.strip())
        return RunError(
            f"{_named(ranks)} ended before the session was ready"
            + (f"; {self.launcher} printed:{printed}" if printed else ""),
            hint="distir doctor checks this machine's setup",
        )

    def _printed(self) -> str:
        self.output.seek(0)
        text: str = self.output.read().decode(errors="replace").strip()[-_MOST_OUTPUT:]
        return text

    def _check_time(self, start: float, timeout: float, arrivals: Mapping[int, _Arrival]) -> None:
        """Raise RunError if some ranks have not joined the others in time. Loading may take longer."""
        late = [rank for rank in range(self.size) if rank not in arrivals or arrivals[rank].state == "started"]
        if late and 0 < timeout < time.monotonic() - start:
            absent = [rank for rank in late if rank not in arrivals]
            raise RunError(
                f"the ranks have not connected within {timeout:g} s: "
                + (f"{_named(absent)} did not start" if absent else f"{_named(late)} did not join the others"),
                hint="look at what they printed; timeout= gives them more time to start",
            )


@dataclass
class _Arrival:
    """A rank that has connected, and how far it is: "started", "joined" the others, "ready", or "ended"."""

    rank: int
    connection: Connection
    process: Any
    state: str = "started"
    verified: list[Any] = field(default_factory=list)
    error: dict[str, Any] = field(default_factory=dict)

    def read(self) -> None:
        """Take the messages that have arrived."""
        is_open = self.connection.fill()
        while (frame := self.connection.take()) is not None:
            if "error" in frame.header:
                self.error = frame.header["error"]
            else:
                self.state = frame.header["kind"]
                self.verified = frame.header.get("verified", [])
        if not is_open:
            self.state = "ended"


_OPEN: weakref.WeakSet[RankProcesses] = weakref.WeakSet()


def _forget_all() -> None:
    """Close the connections in a fork: ranks see the end of the driver only when no process has its ends."""
    for ranks in list(_OPEN):
        ranks.forget()
    _OPEN.clear()


os.register_at_fork(after_in_child=_forget_all)


@contextmanager
def _listening(folder: str) -> Iterator[socket.socket]:
    """Listen on the socket of a session's folder."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(short_path(opened, SOCKET))
            listener.listen(128)
            yield listener
    finally:
        os.close(opened)


class _Door:
    """The sockets that a listener has accepted, once their other side has proved the token of the session."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._admitted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._ready, self._signal = os.pipe()
        for file in (self._ready, self._signal):
            weakref.finalize(self, os.close, file)
        admit(listener, token, "session", self._admit)

    def fileno(self) -> int:
        """Return a file that is readable while there are sockets."""
        return self._ready

    def accept(self) -> tuple[socket.socket, object]:
        """Return the next socket."""
        os.read(self._ready, 1)
        return self._admitted.get(), None

    def _admit(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._admitted.put(end)
        os.write(self._signal, b".")


def _importing(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of ranks: they import this package from where this process has it."""
    root = str(Path(__file__).resolve().parents[3])
    paths = environment.get("PYTHONPATH", "")
    # Installed packages are found anyway; before the standard library they would hide parts of it.
    if root in (*site.getsitepackages(), site.getusersitepackages(), *paths.split(os.pathsep)):
        return environment
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [root, paths]))}


def _error_output() -> int:
    """Return an open file for the output of ranks: this process's standard error, if it has one."""
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed([str(rank) for rank in ranks], 8)}"
