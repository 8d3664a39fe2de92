"""The agent's process: ``python -m distir_relax.runtime.agents.host_process ADDRESS PORT HOST``; it reads the token.

It connects to the launcher and to the other agents, starts the ranks of its host, sees them end (`pidfd`) and stop
(`/proc`), and passes on what they print: each line of an error with its rank. If it is killed, so are its ranks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from distir_relax.runtime.agents.agent import MEETING, Agent
from distir_relax.runtime.agents.connection import Connection, Listener, in_real_time
from distir_relax.runtime.agents.file_copies import copies_folder, fetch
from distir_relax.runtime.agents.post_mortem import RECORD, read_record
from distir_relax.runtime.agents.supervisor import BEAT
from distir_relax.runtime.agents.versions import versions
from distir_relax.runtime.agents.wire import SESSION, Message, WireError, session_token
from distir_relax.runtime.exit_codes import INFRASTRUCTURE
from distir_relax.support.file_slices import COPIES

# Seconds between two looks at the ranks' states.
_LOOK = 0.1
_CONNECTING, _UNREACHABLE = 30.0, 4.0
_DEATH_SIGNAL = 1
_ENDS = {"end": signal.SIGTERM, "kill": signal.SIGKILL}
_LINE = 1 << 16


def main(arguments: Sequence[str]) -> int:
    """Run the agent; return its exit code."""
    address, port, host = arguments[0], int(arguments[1]), int(arguments[2])
    token = bytes.fromhex(sys.stdin.readline().strip())
    os.environ[SESSION] = session_token(token).hex()
    try:
        sock = _connected(address, port)
        listener = Listener(sock.getsockname()[0], token, "server")
        here = {"is": "here", "host": host, "port": _free_port(), "address": listener.address, "versions": versions()}
        connection = Connection(sock, token, "agent", here)
        start = _started(connection, _Copies((address, port), token, host))
    except (OSError, WireError) as error:
        sys.stderr.write(f"error: the launcher at {address}:{port} cannot be reached: {error}\n")
        return INFRASTRUCTURE
    return _Host(host, connection, listener, start).watch()


def _connected(address: str, port: int) -> socket.socket:
    """Connect to the launcher. A host that could not be reached before may count as such for a second more."""
    until = time.monotonic() + _UNREACHABLE
    while True:
        try:
            return socket.create_connection((address, port), _CONNECTING)
        except OSError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.ENETUNREACH) or time.monotonic() > until:
                raise
        time.sleep(_LOOK)


class _Copies:
    """The files of the launch on this host, which a thread fetches from the launcher."""

    def __init__(self, launcher: tuple[str, int], token: bytes, host: int) -> None:
        self._launcher, self._token, self._host = launcher, token, host
        self.places: dict[str, str] = {}
        self.answer: Message | None = None
        """The message that says how it went, once."""

    def fetch(self, message: Message) -> None:
        """Fetch the files of a message from the port that it names."""
        threading.Thread(target=self._fetch, args=(message,), daemon=True).start()

    def _fetch(self, message: Message) -> None:
        try:
            address = self._launcher[0], int(message["port"])
            self.places = fetch(message["files"], address, self._token, self._host)
            self.answer = {"is": "ready"}
        except (OSError, WireError, ValueError, KeyError, TypeError) as error:
            self.answer = {"is": "uncopied", "error": str(error)}


def _started(connection: Connection, copies: _Copies) -> Message:
    """Return the message that says what to start, with the places of files. Raises WireError without one.

    Other hosts may take as long as they have to connect.
    """
    heard, beat = time.monotonic(), 0.0
    while (now := time.monotonic()) < heard + _CONNECTING:
        for message in connection.receive():
            heard = now
            if message.get("is") == "files":
                copies.fetch(message)
            elif message.get("is") == "start":
                return {**message, "program": [copies.places.get(text, text) for text in message["program"]]}
        if copies.answer is not None:
            connection.send(copies.answer)
            copies.answer = None
        if connection.is_known and now > beat + BEAT:
            beat = now
            connection.send({"is": "beat"})
        connection.flush()
        time.sleep(0.005)
    raise WireError("it says nothing")


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


class _Host:
    """The ranks of this host."""

    def __init__(self, number: int, connection: Connection, listener: Listener, start: Message) -> None:
        self.number, self.connection, self.listener, self.selector = number, connection, listener, listener.selector
        self.peers: Sequence[tuple[str, int]] = [(address, port) for address, port in start["peers"]]
        # Of two agents that of the later host connects. All pairs: a host of 100 sends 400 beats a second.
        listener.expected = range(number + 1, len(self.peers))
        self.kills = _memory_kills()
        environments: Mapping[str, Mapping[str, str]] = start["environments"]
        # torch warns of each connection from a host whose address has no name.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(environments))))
        self.records = {int(rank): os.memfd_create(f"record of rank {rank}") for rank in environments}
        self.ranks = {
            int(rank): _start(start["program"], start["folder"], variables, self.records[int(rank)])
            for rank, variables in environments.items()
        }
        self.lines = dict.fromkeys(self.ranks, b"")
        others = set(range(len(self.peers))) - {number}
        self.agent = Agent(set(self.ranks), now := time.monotonic(), dict.fromkeys(others, now + MEETING))
        self.selector.register(connection.socket, selectors.EVENT_READ)
        for rank, process in self.ranks.items():
            self.selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
            assert process.stderr is not None
            os.set_blocking(process.stderr.fileno(), False)
            self.selector.register(process.stderr, selectors.EVENT_READ, rank)

    def watch(self) -> int:
        """Watch the ranks until all have ended; return the exit code."""
        looked = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.agent.lost(time.monotonic()))
        while not self.agent.is_over:
            for key, _ in self.selector.select(_LOOK):
                self._handle(key)
            now = time.monotonic()
            if now >= looked + _LOOK:
                looked = now
                self.agent.seen({rank for rank, process in self.ranks.items() if _is_stopped(process.pid)}, now)
                for peer in set(range(self.number)) & self.agent.peers.keys() - self.listener.connections.keys():
                    self.listener.connect(peer, self.peers[peer], {"is": "here", "host": self.number})
            self.listener.tick(now)
            self.agent.tick(now)
            self._act()
        self._act()
        for rank in self.ranks:
            self._pass_on(rank, at_end=True)
        self.connection.close()
        return self.agent.code

    def _handle(self, key: selectors.SelectorKey) -> None:
        now = time.monotonic()
        if key.fileobj is self.connection.socket:
            try:
                for message in self.connection.receive():
                    self.agent.told(message, now)
            except WireError:
                self.selector.unregister(self.connection.socket)
                self.agent.lost(now)
        elif isinstance(key.fileobj, socket.socket):
            for peer, told in self.listener.receive(key.fileobj, now):
                self.agent.peer_told(peer, told is None, now)
        elif isinstance(key.fileobj, int):
            self.selector.unregister(key.fileobj)
            os.close(key.fileobj)
            status = self.ranks[key.data].wait()
            self._pass_on(key.data, at_end=True)
            if record := read_record(self.records[key.data]):
                self.agent.outbox.append({"is": "record", "rank": key.data, "record": record})
            self.agent.ended(key.data, status, _memory_kills() > self.kills)
        elif not self._pass_on(key.data):
            self.selector.unregister(key.fileobj)

    def _act(self) -> None:
        for message in self.agent.outbox:
            self.connection.send(message)
            for peer in self.listener.connections.values() if message["is"] == "beat" else ():
                if peer.is_known:
                    peer.send(message)
        self.connection.flush()
        self.agent.outbox.clear()
        for what in self.agent.signals:
            number = _ENDS[what] if isinstance(what, str) else what
            for rank in self.agent.run:
                process = self.ranks[rank]
                with suppress(OSError):
                    if what == "end":
                        # A process that is stopped takes no other signal.
                        os.kill(process.pid, signal.SIGCONT)
                    os.killpg(process.pid, number)
        self.agent.signals.clear()

    def _pass_on(self, rank: int, at_end: bool = False) -> bool:
        """Print the lines that a rank has written to stderr; return whether there may be more."""
        stream = self.ranks[rank].stderr
        assert stream is not None
        data: bytes | None = b""
        with suppress(BlockingIOError, ValueError):
            data = os.read(stream.fileno(), _LINE)
        *lines, rest = (self.lines[rank] + (data or b"")).split(b"\n")
        if (at_end and rest) or len(rest) > _LINE:
            lines, rest = [*lines, rest], b""
        self.lines[rank] = rest
        if lines:
            text = b"".join(b"[%d] %s\n" % (rank, line) for line in lines)
            with suppress(OSError):
                os.write(2, text)
        return bool(data)


def _start(program: Sequence[str], folder: str, variables: Mapping[str, str], record: int) -> subprocess.Popen[bytes]:
    """Start a rank in a group of its own, which ends with this process, with a descriptor for its record."""
    library = ctypes.CDLL(None)
    parent = os.getpid()
    own = {RECORD: f"/proc/self/fd/{record}", COPIES: str(copies_folder())}

    def end_with_parent() -> None:
        library.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(INFRASTRUCTURE)

    return subprocess.Popen(
        program, cwd=folder, env={**os.environ, **variables, **own}, stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, process_group=0, preexec_fn=end_with_parent, pass_fds=(record,),
    )  # fmt: skip


def _is_stopped(process: int) -> bool:
    """Whether a process is stopped: its state is the first word after its name, which is in parentheses."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False


def _memory_kills() -> int:
    """Return how many processes of this one's group the system has killed because memory ran out, where it counts."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, place = line.split(":", 2)
            folder, name = ("memory", "memory.oom_control") if "memory" in kinds else ("", "memory.events")
            if kinds and "memory" not in kinds:
                continue
            for text in Path(f"/sys/fs/cgroup/{folder}{place}/{name}").read_text(encoding="utf-8").splitlines():
                if text.startswith("oom_kill "):
                    return int(text.split()[1])
    return 0


if __name__ == "__main__":
    with in_real_time():
        raise SystemExit(main(sys.argv[1:]))
