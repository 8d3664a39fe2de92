"""What the ranks of a launch agree on before they run: that each of them can, and that all have the same."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from distir_relax.bundle import Bundle, FileWeights, check_weights
from distir_relax.bundle.weights import WEIGHTS_FILE
from distir_relax.errors import DistIRError, RunError
from distir_relax.runtime.inputs import digest_of
from distir_relax.runtime.world import World


class Agreed(Exception):
    """An `error` that every rank has, and that one of them is to print."""

    def __init__(self, error: DistIRError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """A DistIRError of any rank inside the block is raised, as `Agreed`, on every rank after it."""
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

    The first rank of a node has hashed its weights; another does where its file is not that very one.
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
    weights = bundle.weights
    mine = [platform.node(), *weights.identity] if isinstance(weights, FileWeights) else []
    everyone = world.exchange([world.local_rank == 0, mine])
    with agreed(world):
        if world.local_rank != 0 and [True, mine] not in everyone:
            check_weights(bundle)
