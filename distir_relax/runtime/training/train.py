"""`distir train`: a bundle read, its ranks loaded, and trained; as one rank of a launch, or with all as threads."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distir_relax.bundle import Manifest, read_bundle
from distir_relax.errors import DistIRError
from distir_relax.runtime.handshake import Agreed, agreed, shake_hands
from distir_relax.runtime.machine import keep_memory, limit_threads
from distir_relax.runtime.rank_session import RankSession
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import Data, training_of
from distir_relax.runtime.training.executor import Crew, Launched, Threads
from distir_relax.runtime.training.training_loop import Ended, Listener, Training, TrainOptions
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import World, check_size

DataOf = Callable[[Manifest, int], Data]
"""The data of a run, for a program, and in an order that follows from a seed."""


@dataclass(frozen=True)
class Run:
    """A training run: its bundle, data, options and listener. `data` is called once the bundle is read; `stop` is the
    signal that this process was sent, or 0."""

    bundle: Path
    data: DataOf
    options: TrainOptions
    listener: Listener
    backend: str = "torch"
    device: str = "cpu"
    timeout: float = DEFAULT_TIMEOUT
    stop: Callable[[], int] = lambda: 0

    def of(self, crew: Crew) -> Training:
        """The run of a crew."""
        manifest = crew.bundle.manifest
        return Training(crew, lambda seed: self.data(manifest, seed), self.options, self.listener, self.stop)


def train_threads(run: Run) -> Ended:
    """Train with ranks as threads of this process. Raises what `Training.run` raises."""
    bundle = read_bundle(run.bundle)
    training_of(bundle.manifest)
    return run.of(Threads(Session(bundle, run.backend, run.device, run.timeout))).run()


def train_rank(world: World, run: Run) -> Ended:
    """Train as one rank of a launch.

    Raises what `Training.run` raises where all ranks raise it. An error of one rank alone is printed and ends the
    launch: with code 2 for the user's errors, 1 with a traceback for others.
    """
    try:
        return _train_rank(world, run)
    except Agreed as all_have:
        raise all_have.error from None
    except DistIRError as error:
        _tell("".join(f"{line}\n" for line in (f"error on rank {world.rank}: {error}", *world.ended())))
        world.abort(2)
        raise
    except Exception:
        _tell(f"rank {world.rank} failed:\n{traceback.format_exc()}")
        world.abort(1)
        raise


def _train_rank(world: World, run: Run) -> Ended:
    limit_threads(world.local_size)
    keep_memory()
    with agreed(world):
        # One rank of a node hashes the weights; the others check their header and size.
        bundle = read_bundle(run.bundle, verify_weights=world.local_rank == 0)
        training_of(bundle.manifest)
        check_size(bundle.manifest.mesh, world.size)
    shake_hands(world, bundle, {})
    with agreed(world):
        session = RankSession(world, bundle, run.backend, run.device)
        session.load()
    return run.of(Launched(world, session)).run()


def _tell(message: str) -> None:
    sys.stderr.write(message)
    sys.stderr.flush()
