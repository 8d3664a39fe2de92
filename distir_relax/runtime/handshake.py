"""Startup agreement between the ranks of a launch: each can run, and all have the same bundle and inputs."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from distir_relax.bundle import Bundle, check_weights, other_checksums, other_weights, weights_identity
from distir_relax.bundle.weights import WEIGHTS_FILE
from distir_relax.errors import DistIRError, RunError
from distir_relax.runtime.inputs import digest_of
from distir_relax.runtime.world import World


class Agreed(Exception):
    """An `error` that was raised on every rank, and that one of them is to print."""

    def __init__(self, error: DistIRError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """Raise a DistIRError of any rank inside the block, as `Agreed`, on every rank after it.

    In a process that was started alone it is raised as it is.
    """
    if world.is_alone:
        yield
        return
    mine = None
    try:
        yield
    except DistIRError as error:
        mine = error
    try:
        world.agree(mine)
    except DistIRError as error:
        raise Agreed(error) from None


def shake_hands(world: World, bundle: Bundle, inputs: Mapping[str, Any]) -> None:
    """Raise `Agreed` on every rank unless all have the same bundle, with the same weights, and the same inputs.

    The first rank of a node has hashed its weights; the others only if they opened another file.
    """
    manifest = bundle.manifest
    rest = json.dumps([manifest.format, manifest.name, manifest.schedule_hash, manifest.checksums], sort_keys=True)
    things = {
        "the weights": manifest.checksums.get(WEIGHTS_FILE, "none"),
        "the bundle": hashlib.sha256(rest.encode()).hexdigest(),
        "the inputs": digest_of(inputs),
    }
    try:
        world.agree_equal({what: digest[:16] for what, digest in things.items()})
    except RunError as error:
        raise Agreed(error) from None
    identity = weights_identity(bundle)
    mine = [platform.node(), *identity] if identity else []
    everyone = world.exchange([world.local_rank == 0, mine])
    _agree_on_other_weights(world, bundle, any(theirs != mine for _, theirs in everyone))
    with agreed(world):
        if world.local_rank != 0 and [True, mine] not in everyone:
            check_weights(bundle)


def _agree_on_other_weights(world: World, bundle: Bundle, is_elsewhere: bool) -> None:
    """Raise `Agreed` on every rank unless all have the same other weights; `is_elsewhere` if some opened other files.

    There is no checksum of them to compare with.
    """
    states = world.exchange([other_weights(bundle) is not None, is_elsewhere])
    if not any(has_others and differs for has_others, differs in states):
        return
    with agreed(world):
        checksums = " ".join(checksum[:16] for checksum in other_checksums(bundle))
    try:
        world.agree_equal({"the weights of --weights": checksums or "none"})
    except RunError as error:
        raise Agreed(error) from None
