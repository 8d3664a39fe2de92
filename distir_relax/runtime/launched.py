"""Loading of a rank's session together with the other ranks, and ending the launch on errors of one rank."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from distir_relax.bundle import Bundle, check_weights, read_bundle
from distir_relax.errors import DistIRError
from distir_relax.runtime.backends import LoadSequences
from distir_relax.runtime.handshake import Agreed, agreed, shake_hands
from distir_relax.runtime.machine import limit_threads, release_freed_memory, retain_freed_memory
from distir_relax.runtime.rank_session import RankSession
from distir_relax.runtime.verification import Verified
from distir_relax.runtime.world import World, check_size

_Inputs = TypeVar("_Inputs", bound=dict[str, Any])


@contextmanager
def ending_launch(world: World) -> Iterator[None]:
    """Handle errors of a rank: one that all ranks raise is raised, one of this rank alone ends the launch.

    It is printed, and the exit code is 2 for a user's error, 1 with a traceback for others.
    """
    try:
        yield
    except Agreed as everywhere:
        raise everywhere.error from None
    except DistIRError as error:
        _print("".join(f"{line}\n" for line in (f"error on rank {world.rank}: {error}", *world.ended())))
        world.abort(2)
        raise
    except Exception:
        _print(f"rank {world.rank} failed:\n{traceback.format_exc()}")
        world.abort(1)
        raise


def load_rank(
    world: World, path: Path, backend: str, device: str, inputs: Callable[[Bundle], _Inputs],
    verified: Sequence[object] = (), loads: bool = True, weights: str | Path | None = None,
    load_sequences: LoadSequences | None = None, trust_code: bool = False,
    require_signature: str | Path | None = None,
) -> tuple[RankSession, _Inputs]:  # fmt: skip
    """Load a bundle on one rank of a launch, and the result of `inputs` for it; every rank calls this.

    One rank of a node hashes the weights and verifies the programs, unless the bundle is the one `verified`
    (`Verified.to_json`). `weights`, `trust_code` and `require_signature` are as for `read_bundle`. Unless it `loads`,
    the program and its weights are not read, and not verified. `load_sequences` is as for a `Session`.

    All ranks agree that each can read the bundle and its inputs, that their number is the mesh's, and that they hold
    the same programs. Raises `Agreed` for an error of any of them.
    """
    limit_threads(world.local_size)
    with agreed(world):
        # All ranks check the header and size of the weights.
        bundle = read_bundle(path, False, weights, trust_code, require_signature)
        check_size(bundle.manifest.mesh, world.size)
        is_verified = Verified.of(bundle).to_json() == list(verified)
        if world.local_rank == 0 and not is_verified:
            check_weights(bundle)
        prepared = inputs(bundle)
    shake_hands(world, bundle, prepared)
    with agreed(world):
        session = RankSession(world, bundle, backend, device, is_verified, load_sequences)
        if loads:
            session.load()
    release_freed_memory()
    retain_freed_memory()
    return session, prepared


def _print(message: str) -> None:
    sys.stderr.write(message)
    sys.stderr.flush()
