"""A rank of a session of processes: ``python -m distir_relax.runtime.process_session.rank_server PLACE [BUNDLE]``."""

from __future__ import annotations

import gc
import importlib
import os
import select
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from distir_relax.bundle import BundleFile
from distir_relax.runtime.agents.wire import SESSION, introduce
from distir_relax.runtime.error_messages import error_to_json
from distir_relax.runtime.handshake import Agreed, agreed
from distir_relax.runtime.join import join_world
from distir_relax.runtime.launched import RankOptions, open_session
from distir_relax.runtime.launcher_detection import detect
from distir_relax.runtime.local_ranks import rank_in
from distir_relax.runtime.process_session.connection import Connection, Disconnected, Frame, short_path
from distir_relax.runtime.process_session.handlers import HANDLERS, Served
from distir_relax.runtime.process_session.rank_processes import SOCKET, TOKEN
from distir_relax.runtime.process_session.shared_memory import Segment
from distir_relax.runtime.process_session.tensor_frames import pack, unpack
from distir_relax.runtime.requests import RankRequests
from distir_relax.runtime.requests.request_program import emit_request_programs
from distir_relax.runtime.requests.sequence_program import load_sequence_programs
from distir_relax.runtime.stall_detection import StallDetector
from distir_relax.runtime.verification import Verified
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT, Watchdog
from distir_relax.runtime.world import World


def main(place: str, bundle: str = "") -> None:
    """Connect to the driver that listens at `place`, and serve until it asks this rank to end, or has ended.

    The place is a folder, or ``tcp:ADDRESS:PORT``. `bundle` is that of the driver on this host.
    """
    # Until torch is loaded: passes over its many objects free nothing, and take a tenth of that time.
    gc.disable()
    connection = _connect(place)
    options = connection.receive()
    # Standard output is the driver's user's.
    for file in options.files:
        for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(file, stream)
        os.close(file)
    threading.Thread(target=_end_with_driver, args=(connection.socket,), name="distir-driver", daemon=True).start()
    imported = threading.Thread(target=_import, name="distir-import", daemon=True)
    if detect() == "mpi":
        # Open MPI waits for a second while it initializes, in C: modules are loaded meanwhile. Under torchrun the main
        # thread loads torch at once, and parts of one package must not be loaded by two threads.
        imported.start()
    try:
        header = dict(options.header)
        if bundle:
            header["bundle"] = {**header["bundle"], "path": bundle}
        _serve(connection, header, imported)
    except Agreed as everywhere:
        error: BaseException = everywhere.error
    except Exception as raised:
        error = raised
    connection.send({"error": error_to_json(error)})
    # The driver ends the launch.
    threading.Event().wait()


def _import() -> None:
    """Load torch, and what verifies and emits programs."""
    importlib.import_module("torch")
    importlib.import_module("distir_relax.lowering.emit.torch")


def _connect(place: str) -> Connection:
    if place.startswith("tcp:"):
        address, _, port = place.removeprefix("tcp:").rpartition(":")
        end = socket.create_connection((address, int(port)))
        introduce(end, bytes.fromhex(os.environ.pop(SESSION)), "rank")
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(end)
        connection.send({"token": "", "rank": rank_in(), "pid": os.getpid()})
        return connection
    return _connect_here(place)


def _connect_here(folder: str) -> Connection:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    end = socket.socket(socket.AF_UNIX)
    end.connect(short_path(opened, SOCKET))
    os.close(opened)
    connection = Connection(end)
    token = (Path(folder) / TOKEN).read_text(encoding="ascii")
    connection.send({"token": token, "rank": rank_in(), "pid": os.getpid()})
    return connection


def _serve(connection: Connection, options: Mapping[str, Any], imported: threading.Thread) -> NoReturn:
    """Join the other ranks, load the bundle, and handle requests; torch is `imported` by a thread, if it is started."""
    # The driver has the time-out.
    world = join_world(0)
    assert world is not None, "a launcher starts this program"
    if imported.ident is not None:
        imported.join()
    gc.freeze()
    gc.enable()
    connection.send({"kind": "joined"})
    world.report = lambda error: connection.send({"fatal": error_to_json(error)})
    timeout = options["ranks"]["timeout"]
    detector = StallDetector(world, timeout)
    # A call may have a time-out although the session has none.
    with Watchdog(timeout or DEFAULT_TIMEOUT, detector.poll):
        file, ranks = BundleFile(**options["bundle"]), RankOptions(**options["ranks"])
        session, _ = open_session(
            world, file, ranks, lambda bundle: {}, load_sequence_programs, options["verified"], not options["requests"]
        )
        requests = None
        if options["requests"]:
            with agreed(world):
                entry = session.bundle.manifest.program_of(world.rank).name
                programs = emit_request_programs(session.bundle, [entry])
            with agreed(world):
                requests = RankRequests(session.bundle, programs, session.communicator)
        connection.send({"kind": "ready", "verified": Verified.of(session.bundle).to_json()})
        _Server(connection, world, detector, Served(world, session, requests)).run()
    world.exit()


class _Server:
    """The loop of a rank over requests."""

    def __init__(self, connection: Connection, world: World, detector: StallDetector, served: Served) -> None:
        self._connection = connection
        self._world = world
        self._detector = detector
        self._served = served
        self._segments: dict[str, Segment] = {}

    def run(self) -> None:
        """Handle requests until one asks to stop."""
        while (frame := self._connection.receive()).header["kind"] != "stop":
            self._open_segments(frame)
            self._detector.timeout = frame.header["timeout"]
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        header = frame.header
        try:
            tensors = unpack(header["tensors"], frame.payload, self._segments.get("inputs"), copy=False)
            values, results = HANDLERS[header["kind"]](self._served, header, tensors)
        except Exception as error:
            progress = self._served.session.communicator.progress
            place = [repr(progress.current), repr(progress.last)]
            self._connection.send({"number": header["number"], "error": error_to_json(error), "at": place})
            return
        if self._world.rank == self._served.replier:
            segment = self._segments.get("outputs") if header["shares"] else None
            descriptors, payload = pack(results, segment)
            self._connection.send({**values, "number": header["number"], "tensors": descriptors}, payload)

    def _open_segments(self, frame: Frame) -> None:
        for name, file in zip(frame.header["segments"], frame.files, strict=True):
            segment = self._segments[name] = Segment(file)
            segment.close()


def _end_with_driver(end: socket.socket) -> None:
    """End this process when the driver has closed its socket, or has ended: the main thread may wait in a library."""
    events = select.poll()
    events.register(end, select.POLLRDHUP)
    events.poll()
    os._exit(1)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Disconnected:
        sys.exit(1)
