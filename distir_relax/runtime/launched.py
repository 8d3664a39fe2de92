"""Loading of a session together with the other ranks, and ending the launch on errors of one rank."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from distir_relax.bundle import Bundle, BundleFile, check_weights
from distir_relax.errors import DistIRError
from distir_relax.runtime.backends import LoadSequences
from distir_relax.runtime.handshake import Agreed, agreed, shake_hands
from distir_relax.runtime.machine import limit_threads, release_freed_memory, retain_freed_memory
from distir_relax.runtime.session import Session
from distir_relax.runtime.verification import Verified
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import World, check_size

_Inputs = TypeVar("_Inputs", bound=dict[str, Any])


@dataclass(frozen=True)
class RankOptions:
    """How ranks run a bundle: their backend and device, and the seconds that one may wait for others (0: for ever)."""

    backend: str = "torch"
    device: str = "cpu"
    timeout: float = DEFAULT_TIMEOUT


@contextmanager
def ending_launch(world: World) -> Iterator[None]:
    """Handle errors of a rank: one that all ranks raise is raised, one of this rank alone ends the launch.

    It is printed, and the exit code is that of a `DistIRError`, 1 with a traceback for others. A process that was
    started alone raises all.
    """
    if world.is_alone:
        yield
        return
    try:
        yield
    except Agreed as everywhere:
        raise everywhere.error from None
    except DistIRError as error:
        _print("".join(f"{line}\n" for line in (f"error on rank {world.rank}: {error}", *world.ended())))
        world.abort(error.exit_code)
        raise
    except Exception:
        _print(f"rank {world.rank} failed:\n{traceback.format_exc()}")
        world.abort(1)
        raise


def open_session(
    world: World, file: BundleFile, options: RankOptions, inputs: Callable[[Bundle], _Inputs],
    load_sequences: LoadSequences | None = None, verified: Sequence[object] = (), loads: bool = True,
) -> tuple[Session, _Inputs]:  # fmt: skip
    """Load a bundle in this process, and the result of `inputs` for it; every rank of a launch calls this.

    One rank of a node hashes the weights and verifies the programs, unless the bundle is the one `verified`
    (`Verified.to_json`). `load_sequences` and `loads` are as for a `Session`.

    All ranks agree that each can read the bundle and its inputs, that their number is the mesh's, and that they hold
    the same programs. Raises `Agreed` for an error of any of them; a process that was started alone raises it as it is.
    """
    where = (options.backend, options.device, options.timeout, load_sequences)
    if world.is_alone:
        bundle = file.read()
        prepared = inputs(bundle)
        return Session(bundle, *where, loads=loads), prepared
    limit_threads(world.local_size)
    with agreed(world):
        # All ranks check the header and size of the weights.
        bundle = file.read(verify_weights=False)
        check_size(bundle.manifest.mesh, world.size)
        is_verified = Verified.of(bundle).to_json() == list(verified)
        if world.local_rank == 0 and not is_verified:
            check_weights(bundle)
        prepared = inputs(bundle)
    shake_hands(world, bundle, prepared)
    with agreed(world):
        session = Session(bundle, *where, world=world, verified=is_verified, loads=loads)
    release_freed_memory()
    retain_freed_memory()
    return session, prepared


def _print(message: str) -> None:
    sys.stderr.write(message)
    sys.stderr.flush()
