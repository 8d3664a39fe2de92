"""How ranks and hosts end: a name for each end, the exit code of the launch, and what to do."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

from distir_relax.errors import RunError
from distir_relax.runtime.exit_codes import INFRASTRUCTURE

_SIGNALS = {
    signal.SIGSEGV: ("crashed: segmentation fault", "a native library accessed memory that is not its own"),
    signal.SIGBUS: ("crashed: bus error", "a file in memory was truncated, or /dev/shm is full"),
    signal.SIGABRT: ("aborted", "a native library ended the process; its message is above"),
    signal.SIGILL: ("crashed: illegal instruction", "a library was built for another processor"),
}
_MEMORY = "distir simulate predicts the memory of a rank"


@dataclass(frozen=True)
class End:
    """The first end that was no success: what ended, why, the launch's exit code, and what to do about it.

    `rank` is None for the end of a host. A smaller `order` is nearer to the cause, if several end at once: a rank whose
    peer was killed fails, too.
    """

    host: str
    rank: int | None
    text: str
    hint: str
    code: int
    order: int

    def __str__(self) -> str:
        what = f"host {self.host}" if self.rank is None else f"rank {self.rank} on {self.host}"
        return f"{what} {self.text}" + (f"\n  hint: {self.hint}" if self.hint else "")


def rank_end(host: str, rank: int, status: int, out_of_memory: bool) -> End:
    """Return the end of a rank whose exit code is `status`, or the negative number of the signal that ended it."""
    if status >= 0:
        # It has printed why.
        return End(host, rank, f"ended with exit code {status}", "", status or INFRASTRUCTURE, 4)
    number = -status
    if number == signal.SIGKILL and out_of_memory:
        return End(host, rank, "was killed by the system: out of memory", _MEMORY, INFRASTRUCTURE, 0)
    if number in _SIGNALS:
        text, hint = _SIGNALS[signal.Signals(number)]
        return End(host, rank, text, hint, INFRASTRUCTURE, 0)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = f"signal 9 often comes from the system when memory runs out (dmesg shows it); {_MEMORY}"
    return End(host, rank, f"was killed by {name}", hint if number == signal.SIGKILL else "", INFRASTRUCTURE, 0)


def rank_stopped(host: str, rank: int) -> End:
    """Return the end of a rank that was stopped, and does not go on."""
    return End(host, rank, "was stopped", "a SIGSTOP, or a debugger: start the launch again", INFRASTRUCTURE, 1)


def host_lost(host: str, seconds: float) -> End:
    """Return the end of a host whose agent has not been heard of for some seconds."""
    text = f"has not answered for {seconds:.1f} s"
    hint = "it was stopped or switched off, or cannot be reached any more"
    return End(host, None, text, hint, INFRASTRUCTURE, 2)


def peer_unheard(host: str, peer: str, seconds: float) -> End:
    """Return the end of a host whose agent does not hear of another one, which the launcher does hear of."""
    hint = "the network between them is cut, or a firewall closes ports that their ranks need, too"
    return End(host, None, f"has not heard of host {peer} for {seconds:.1f} s", hint, INFRASTRUCTURE, 3)


def launcher_unheard(host: str, seconds: float) -> End:
    """Return the end of a host whose agent has ended its ranks, because it has not heard of the launcher."""
    hint = "the launcher was stopped, or what it sends does not arrive: start the launch again"
    return End(host, None, f"has not heard of the launcher for {seconds:.1f} s", hint, INFRASTRUCTURE, -1)


def agent_ended(host: str) -> End:
    """Return the end of a host whose agent has closed its connection before its ranks had ended."""
    hint = "the host ends, or the agent was killed: start the launch again"
    return End(host, None, "was lost: its agent has ended", hint, INFRASTRUCTURE, 1)


def other_version(host: str, package: str, version: str, expected: str) -> End:
    """Return the end of a host that has another version of a package than the machine of the launcher."""
    hint = f"install {package} {expected} for {sys.executable} there"
    return End(host, None, f"has {package} {version}, this machine has {expected}", hint, RunError.exit_code, -1)


def not_copied(host: str, reason: str) -> End:
    """Return the end of a host that could not copy a file of the launch."""
    return End(host, None, f"has no copy of a file of the launch: {reason}", "", INFRASTRUCTURE, 1)


def not_started(host: str, code: int, rsh: str) -> End:
    """Return the end of a host whose agent did not start."""
    text = f"was not reached: {rsh} ended with exit code {code}"
    return End(host, None, text, f"try: {rsh} {host} true", INFRASTRUCTURE, 1)
