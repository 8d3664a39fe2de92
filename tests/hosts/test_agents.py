"""The state machines of launcher and agents, and their messages: no network, no processes."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from distir_relax.errors import RunError
from distir_relax.runtime.agents.admission import admit
from distir_relax.runtime.agents.agent import MEETING, Agent
from distir_relax.runtime.agents.connection import _MOST_UNKNOWN, Listener
from distir_relax.runtime.agents.ends import rank_end
from distir_relax.runtime.agents.file_copies import FileServer, LaunchFile
from distir_relax.runtime.agents.launch_hosts import HostsLaunch
from distir_relax.runtime.agents.supervisor import BEAT, LEAVING, LOST, SETTLE, HostState, Supervisor
from distir_relax.runtime.agents.wire import MOST_UNKNOWN, Decoder, Handshake, Message, WireError, encode, introduce
from distir_relax.runtime.hosts import Host
from tests.hosts.simulated import bound, simulate


def assert_ends_well(seed: int) -> str:
    """A run ends in success, or in a failure of a host to which something happened, and nothing goes on."""
    run = simulate(seed)
    assert run.over_at <= bound(run), run
    assert run.left == [], run
    if run.code == 0:
        # Nothing happened, or what happened came after the ranks had ended.
        assert run.all_succeeded, run
        assert run.reported == "", run
    else:
        assert run.hurt, run
        assert any(f"n{number} " in run.reported.partition("\n")[0] + " " for number in run.hurt), run
    return "success" if run.code == 0 else "failure"


@pytest.mark.parametrize("hundred", range(4))
def test_every_launch_ends_in_success_or_in_a_named_failure(hundred: int) -> None:
    ends = [assert_ends_well(seed) for seed in range(100 * hundred, 100 * hundred + 100)]
    assert min(ends.count("success"), ends.count("failure")) > 10


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_so_do_ten_thousand() -> None:
    for seed in range(10_000, 20_000):
        assert_ends_well(seed)


def test_the_message_names_the_host_or_the_link_that_is_lost() -> None:
    """Other hosts do not hear of a host that is lost either; that is not the cause."""
    kinds = set()
    for run in map(simulate, range(1000, 1400)):
        if len(run.events) != 1 or not run.code:
            continue
        ((when, kind, number),) = run.events
        kinds.add(kind)
        first = run.reported.partition("\n")[0]
        if not kind.startswith("cut link"):
            assert "heard of host" not in first, run
            continue
        (other,) = run.hurt - {number}
        names = {f"host n{other} has not heard of host n{number} for"}
        if kind == "cut link":
            names.add(f"host n{number} has not heard of host n{other} for")
        assert any(first.startswith(name) for name in names), run
        # Before agents have met they have more time.
        limit = LOST if when > run.started_at + 2 * BEAT else MEETING
        assert run.reported_at - max(when, run.started_at) < limit + 2 * BEAT + SETTLE, run
    assert {"cut link", "cut link one way", "stop host", "kill host", "cut", "cut out"} <= kinds


def test_a_seed_gives_the_same_run() -> None:
    assert simulate(17) == simulate(17)


def test_the_cause_is_named_and_not_what_follows_from_it() -> None:
    """A rank that fails because its peer was killed may be heard of first."""
    supervisor = Supervisor([HostState("a", [0]), HostState("b", [1])], 0.0)
    for number in (0, 1):
        supervisor.told(number, {"is": "here"}, 0.0)
    supervisor.told(0, {"is": "ended", "rank": 0, "status": 2, "out_of_memory": False}, 1.0)
    supervisor.told(1, {"is": "ended", "rank": 1, "status": -signal.SIGKILL, "out_of_memory": True}, 1.03)
    supervisor.tick(1.0 + SETTLE)
    assert str(supervisor.reported).startswith("rank 1 on b was killed by the system: out of memory\n  hint: ")
    assert supervisor.is_over(1.2)
    assert supervisor.code == 75


def test_a_user_error_of_a_rank_keeps_its_code() -> None:
    supervisor = Supervisor([HostState("a", [0, 1])], 0.0)
    supervisor.told(0, {"is": "here"}, 0.0)
    supervisor.told(0, {"is": "ended", "rank": 1, "status": 2}, 1.0)
    supervisor.tick(1.0 + SETTLE)
    supervisor.told(0, {"is": "ended", "rank": 0, "status": -15}, 1.2)
    assert supervisor.code == 2
    assert supervisor.outbox[-1] == (0, {"is": "end"}) or (0, {"is": "end"}) in supervisor.outbox


def test_a_report_of_another_host_counts_once_the_launcher_hears_of_it() -> None:
    def unheard() -> Supervisor:
        supervisor = Supervisor([HostState(name, [rank]) for rank, name in enumerate("abc")], 0.0)
        for number in range(3):
            supervisor.told(number, {"is": "here"}, 0.0)
        supervisor.told(1, {"is": "unheard", "host": 2, "seconds": 1.6}, 1.0)
        return supervisor

    there = unheard()
    there.told(2, {"is": "beat"}, 1.2)
    there.tick(1.2 + SETTLE)
    assert str(there.reported).startswith("host b has not heard of host c for 1.6 s\n  hint: the network between them")
    assert there.code == 75
    lost = unheard()
    for number in (0, 1):
        lost.told(number, {"is": "beat"}, 1.4)
    lost.tick(1.6)
    lost.tick(1.6 + SETTLE)
    assert str(lost.reported).startswith("host c has not answered for 1.6 s")
    done = unheard()
    done.told(2, {"is": "ended", "rank": 2, "status": 0}, 1.2)
    done.told(2, {"is": "beat"}, 1.2)
    done.closed(2, 1.2)
    done.tick(1.2 + SETTLE)
    assert done.failures == []
    killed = unheard()
    killed.told(2, {"is": "beat"}, 1.2)
    killed.told(0, {"is": "ended", "rank": 0, "status": -9}, 1.25)
    killed.tick(1.2 + SETTLE)
    assert str(killed.reported).startswith("rank 0 on a was killed by SIGKILL")


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"distir-relax": "1", "torch": "2"}, None),
        ({"distir-relax": "1", "torch": "3"}, "host b has torch 3, this machine has 2\n  hint: install torch 2 for "),
        ({"torch": "2"}, "host b has distir-relax unknown, this machine has 1"),
        (None, "host b has distir-relax unknown, this machine has 1"),
        ([1], "host b has distir-relax unknown, this machine has 1"),
    ],
)
def test_a_host_with_another_version_is_a_mistake_of_the_user(theirs: object, text: str | None) -> None:
    hosts = [HostState(name, [rank]) for rank, name in enumerate("ab")]
    supervisor = Supervisor(hosts, 0.0, versions={"distir-relax": "1", "torch": "2"})
    supervisor.told(0, {"is": "here", "versions": {"distir-relax": "1", "torch": "2"}}, 0.0)
    supervisor.told(1, {"is": "here", "versions": theirs}, 0.0)
    supervisor.closed(1, 0.0)
    supervisor.tick(SETTLE)
    found = "host b was lost" if text is None else text
    assert str(supervisor.reported).startswith(found)
    assert supervisor.code == (75 if text is None else 2)


def test_an_agent_that_hears_of_nobody_reports_the_launcher() -> None:
    agent = Agent({0}, 0.0, {1: MEETING, 2: MEETING})
    for peer in (1, 2):
        agent.peer_told(peer, False, 0.0)
    agent.told({"is": "beat"}, 0.1)
    for hundredths in range(200):
        agent.tick(hundredths / 100)
    reports = [message for message in agent.outbox if message["is"] == "unheard"]
    assert ["host" in message for message in reports] == [False]


def test_a_peer_that_cannot_be_connected_is_reported_after_seconds() -> None:
    """Silence may be a lost packet; a refusal is none, but its host may be about to end."""
    agent = Agent({0}, 0.0, {1: MEETING, 2: MEETING})
    reports: dict[int, float] = {}
    for hundredths in range(700):
        now = hundredths / 100
        agent.told({"is": "beat"}, now)
        agent.peer_told(2, True, now)
        agent.tick(now)
        reports |= {message["host"]: now for message in agent.outbox if message["is"] == "unheard"}
        agent.outbox.clear()
    assert reports == {1: pytest.approx(MEETING, abs=0.02), 2: pytest.approx(LOST, abs=0.02)}


def test_a_busy_machine_is_no_failure() -> None:
    """What is heard of every 1.4 s is there."""
    supervisor = Supervisor([HostState("a", [0])], 0.0)
    supervisor.told(0, {"is": "here"}, 0.0)
    for number in range(1, 1000):
        supervisor.told(0, {"is": "beat"}, number * 0.93 * LOST)
        supervisor.tick(number * 0.93 * LOST)
    assert supervisor.failures == []


@pytest.mark.parametrize(
    "message",
    [{}, {"is": "ended"}, {"is": "ended", "rank": "0", "status": 0}, {"is": "ended", "rank": 7, "status": 0},
     {"is": "ended", "rank": True, "status": 0}, {"is": "ended", "rank": 0, "status": None}, {"is": 3, "rank": 0},
     *({"is": "unheard", "host": host, "seconds": 1.5} for host in (1, -1, True, "0", [])),
     {"is": "unheard", "host": 0, "seconds": "1"}],
)  # fmt: skip
def test_other_messages_change_nothing(message: dict[str, object]) -> None:
    supervisor = Supervisor([HostState("a", [0])], 0.0)
    supervisor.told(0, {"is": "here"}, 0.0)
    supervisor.told(0, message, 1.0)
    supervisor.told(0, {"is": "beat"}, 1.0)
    supervisor.tick(1.0 + SETTLE)
    assert (supervisor.failures, supervisor.hosts[0].ended) == ([], {})


@pytest.mark.parametrize(
    ("status", "text"),
    [(-11, "crashed: segmentation fault"), (-6, "aborted"), (-9, "was killed by SIGKILL"),
     (3, "ended with exit code 3"), (-15, "was killed by SIGTERM"), (-64, "was killed by SIGRTMAX"),
     (-7, "crashed: bus error")],
)  # fmt: skip
def test_ends_have_names(status: int, text: str) -> None:
    assert text in str(rank_end("a", 0, status, False))


def forwarding(supervisor: Supervisor, *statuses: int, now: float = 1.0) -> Supervisor:
    """Let ranks of host a end with these exit codes after a forwarded SIGUSR1."""
    for what in ("here", "ready"):
        supervisor.told(0, {"is": what}, 0.0)
    supervisor.forward(signal.SIGUSR1, now)
    for rank, status in enumerate(statuses):
        supervisor.told(0, {"is": "ended", "rank": rank, "status": status}, now)
    supervisor.tick(now + SETTLE)
    return supervisor


def test_ranks_that_end_by_a_forwarded_signal_are_no_failures() -> None:
    supervisor = forwarding(Supervisor([HostState("a", [0, 1])], 0.0), 138, 138)
    assert (0, {"is": "signal", "number": signal.SIGUSR1}) in supervisor.outbox
    assert supervisor.is_over(1.2)
    assert (supervisor.code, supervisor.reported) == (138, None)
    # The training had ended before.
    assert forwarding(Supervisor([HostState("a", [0, 1])], 0.0), 0, 0).code == 0


def test_a_rank_that_does_not_end_after_a_forwarded_signal_is_ended() -> None:
    supervisor = forwarding(Supervisor([HostState("a", [0, 1])], 0.0), 138)
    supervisor.told(0, {"is": "beat"}, LEAVING)
    assert not supervisor.is_over(LEAVING)
    supervisor.told(0, {"is": "beat"}, 1.1 + LEAVING)
    supervisor.tick(1.1 + LEAVING)
    assert (0, {"is": "end"}) in supervisor.outbox
    supervisor.told(0, {"is": "ended", "rank": 1, "status": -signal.SIGKILL}, 2.2 + LEAVING)
    assert supervisor.is_over(2.3 + LEAVING)
    assert (supervisor.code, supervisor.reported) == (138, None)


def test_a_rank_that_is_killed_while_it_writes_its_checkpoint_is_named() -> None:
    supervisor = forwarding(Supervisor([HostState("a", [0, 1])], 0.0), -signal.SIGKILL)
    assert str(supervisor.reported).startswith("rank 0 on a was killed by SIGKILL")
    assert supervisor.code == 75


def test_a_forwarded_signal_ends_ranks_that_start() -> None:
    """They do not handle it yet; one that has lost its peer may be heard of first."""
    supervisor = forwarding(Supervisor([HostState("a", [0, 1])], 0.0), 75, -signal.SIGUSR1)
    assert (0, {"is": "end"}) in supervisor.outbox
    assert (supervisor.code, supervisor.reported) == (138, None)
    waiting = Supervisor([HostState("a", [0]), HostState("b", [1])], 0.0)
    assert forwarding(waiting).code == 138
    assert waiting.is_over(4.0)


# ------------------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize("roles", [("launcher", "agent"), ("server", "client")])
def test_both_sides_prove_the_token_without_sending_it(roles: tuple[str, str]) -> None:
    token = b"secret" * 5
    launcher, agent = (Handshake(token, role) for role in roles)
    to_agent, to_launcher = launcher.first(), agent.first()
    answer, proof = launcher.answer(to_launcher), agent.answer(to_agent)
    assert answer
    assert proof
    assert "secret" not in json.dumps([to_agent, to_launcher, answer, proof])
    assert launcher.answer(proof) is None
    assert agent.answer(answer) is None
    assert launcher.is_done
    assert agent.is_done


@pytest.mark.parametrize(("role", "peer"), [("launcher", "agent"), ("server", "client"), ("client", "server")])
def test_another_token_and_a_reflected_proof_are_refused(role: str, peer: str) -> None:
    others = {"agent", "launcher", "server", "client"} - {peer}
    for other in (Handshake(b"other", peer), *(Handshake(b"token", other) for other in others)):
        launcher = Handshake(b"token", role)
        proof = other.answer(launcher.first())
        launcher.answer(other.first())
        assert proof
        with pytest.raises(WireError):
            launcher.answer(proof)
        assert not launcher.is_done


def test_a_proof_before_the_own_answer_is_refused() -> None:
    launcher = Handshake(b"token", "launcher")
    with pytest.raises(WireError):
        launcher.answer({"proves": "0" * 64})


def test_messages_arrive_in_any_pieces() -> None:
    messages: list[Message] = [{"is": "beat"}, {"rank": 3, "status": -9}, {"text": "ä" * 100}]
    data = b"".join(map(encode, messages))
    draw = random.Random(0)
    for _ in range(50):
        decoder, found, rest = Decoder(), [], data
        while rest:
            size = draw.randint(1, 40)
            found += list(decoder.feed(rest[:size]))
            rest = rest[size:]
        assert found == messages


@pytest.mark.parametrize(("role", "peer"), [("launcher", "agent"), ("server", "client")])
def test_ten_thousand_fuzzed_beginnings_of_connections_change_nothing(role: str, peer: str) -> None:
    draw = random.Random(0)
    token = b"token"
    honest = [encode(Handshake(token, peer).first()), encode({"proves": "0" * 64}), encode({"is": "here"})]
    for _ in range(10_000):
        handshake, decoder = Handshake(token, role), Decoder()
        data = bytearray(b"".join(draw.choices(honest, k=draw.randint(0, 3))) + draw.randbytes(draw.randint(0, 60)))
        for _ in range(draw.randint(0, 4)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            for message in decoder.feed(bytes(data)):
                handshake.answer(message)
        except WireError:
            pass
        assert not handshake.is_done
        assert len(decoder._data) <= MOST_UNKNOWN + 300, "no memory is taken for what a length claims"


def test_a_connection_dropped_for_another_in_the_same_round_is_not_read() -> None:
    """The oldest of too many unknown connections is closed; it may be in the list of those that are ready."""
    with contextlib.ExitStack() as stack:
        listener = Listener("127.0.0.1", b"token", "launcher")
        stack.callback(listener.close)

        def connect() -> socket.socket:
            sock = stack.enter_context(socket.create_connection(listener.address))
            list(listener.receive(listener._socket, 0.0))
            return sock

        oldest, *_ = [connect() for _ in range(_MOST_UNKNOWN)]
        oldest.sendall(b"noise" * 20)
        ready = [key.fileobj for key, _ in listener.selector.select(1.0)]
        connect()
        (sock,) = ready
        assert isinstance(sock, socket.socket)
        assert list(listener.receive(sock, 0.0)) == []
        assert len(listener.selector.get_map()) == 1 + _MOST_UNKNOWN


def test_connections_without_an_introduction_are_dropped_after_seconds() -> None:
    with contextlib.ExitStack() as stack:
        listener = Listener("127.0.0.1", b"token", "launcher")
        stack.callback(listener.close)
        stack.enter_context(socket.create_connection(listener.address))
        listener.selector.select(1.0)
        list(listener.receive(listener._socket, 7.0))
        for now, count in ((7.0, 2), (11.9, 2), (12.1, 1)):
            listener.tick(now)
            assert len(listener.selector.get_map()) == count


# ----------------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("whose", ["launcher", "first agent", "last agent"])
def test_connections_of_others_change_nothing(whose: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A thousand of them, to a port of a launch that runs: silent, with noise, with a wrong proof, with a length."""
    program = [sys.executable, "-c", "import time; time.sleep(4); print('done')"]
    launch = HostsLaunch([Host("localhost", 1)] * 2, program, {}, "")
    over = threading.Event()

    def disturb() -> None:
        number = 0 if whose == "first agent" else 1
        while whose != "launcher" and number not in launch._here and not over.is_set():
            time.sleep(0.001)
        address, port = launch._listener.address if whose == "launcher" else launch._here[number]["address"]
        _disturb((address, port), "launcher" if whose == "launcher" else "server", over)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        assert launch.run() == 0
    finally:
        over.set()
        thread.join()
    assert capfd.readouterr().out.count("done") == 2


def _disturb(address: tuple[str, int], role: str, over: threading.Event) -> None:
    draw, kept = random.Random(0), []
    for number in range(1000):
        if over.is_set():
            break
        with contextlib.suppress(OSError):
            sock = socket.create_connection(address, 1)
            kind = number % 4
            if kind == 1:
                sock.sendall(draw.randbytes(draw.randint(1, 2000)))
            elif kind == 2:
                handshake = Handshake(b"guess", "agent" if role == "launcher" else "client")
                guesses = handshake.first(), {"proves": "0" * 64}, {"is": "here", "host": 1, "port": 1}
                sock.sendall(b"".join(map(encode, guesses)))
            elif kind == 3:
                sock.sendall((1 << 31).to_bytes(4, "big"))
            kept.append(sock)
            if len(kept) > 30:
                kept.pop(0).close()
        time.sleep(0.002)
    for sock in kept:
        sock.close()


def test_a_rank_that_fails_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit('error: mine')\ntime.sleep(60)"
    begin = time.monotonic()
    assert HostsLaunch([Host("localhost", 3)], [sys.executable, "-c", code], {}, "").run() == 1
    assert time.monotonic() - begin < 10
    found = capfd.readouterr().err
    assert "[2] error: mine\n" in found
    assert "error: rank 2 on localhost ended with exit code 1\n" in found


def test_hosts_whose_ranks_end_early_are_not_missed(capfd: pytest.CaptureFixture[str]) -> None:
    """Their agents end, and the others do not hear of them any more."""
    code = "import os, time\ntime.sleep(4 if os.environ['RANK'] == '1' else 0.5)"
    assert HostsLaunch([Host("localhost", 1)] * 3, [sys.executable, "-c", code], {}, "").run() == 0
    assert "error" not in capfd.readouterr().err


def test_a_signal_that_the_launcher_forwards_reaches_all_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(138)); time.sleep(60)"
    launch = HostsLaunch([Host("localhost", 2)], [sys.executable, "-c", code], {}, "")
    sender = threading.Timer(2.0, launch.forward, [signal.SIGUSR1])
    sender.start()
    begin = time.monotonic()
    assert launch.run() == 138
    assert time.monotonic() - begin < 10
    assert "error" not in capfd.readouterr().err


def test_a_host_that_is_not_reached_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert HostsLaunch([Host("nowhere", 1)], ["true"], {}, "false").run() == 75
    assert "error: host nowhere was not reached: false ended with exit code 1" in capfd.readouterr().err


def test_a_remote_shell_that_is_none() -> None:
    with pytest.raises(RunError, match=r"host nowhere: no-such-shell does not run"):
        HostsLaunch([Host("nowhere", 1)], ["true"], {}, "no-such-shell")


def test_a_port_with_many_silent_connections_admits_one_that_proves_the_token() -> None:
    """Noise and wrong proofs are dropped at once, of silent ones the oldest."""
    admitted: list[socket.socket] = []
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        admit(listener, b"token", "files", admitted.append)
        draw = random.Random(0)
        slow = stack.enter_context(socket.create_connection(listener.getsockname()))
        for _ in range(20):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        introduce(slow, b"token", "copies")
        for number in range(300):
            sock = stack.enter_context(socket.create_connection(listener.getsockname()))
            if number % 3:
                sock.sendall(draw.randbytes(40) if number % 3 == 1 else encode({"proves": "0" * 64}))
        assert threading.active_count() <= before + 70
        honest = stack.enter_context(socket.create_connection(listener.getsockname()))
        introduce(honest, b"token", "copies")
        deadline = time.monotonic() + 5
        while len(admitted) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        other, one = admitted
        other.close()
        honest.sendall(b"x")
        assert one.recv(1) == b"x"
        one.close()
        listener.shutdown(socket.SHUT_RDWR)


def test_files_are_sent_to_no_connection_without_the_token(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    server = FileServer("127.0.0.1", b"token", [LaunchFile(str(tmp_path / "x"))], [("a", [0])])
    try:
        for token in (b"other", b"token"):
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                with contextlib.suppress(WireError, OSError):
                    introduce(sock, token, "copies")
                    sock.sendall(encode({"file": 0, "host": 0}))
                found = b""
                with contextlib.suppress(OSError):
                    while data := sock.recv(1 << 16):
                        found += data
                assert (b"secret" in found) == (token == b"token")
    finally:
        server.close()
    assert server.error is None
