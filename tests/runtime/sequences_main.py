"""A rank that generates with programs that continue sequences, and with others: ``python sequences_main.py BUNDLE``.

Rank 0 prints for each way to load what the ranks have loaded, and the tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from distir_relax.bundle import BundleFile
from distir_relax.errors import RunError
from distir_relax.runtime.generation import GREEDY, LanguageProgram, generated_tokens
from distir_relax.runtime.handshake import Agreed
from distir_relax.runtime.join import joined_world
from distir_relax.runtime.launched import RankOptions, open_session
from distir_relax.runtime.requests import request_program, sequence_program
from distir_relax.runtime.world import World

PROMPTS = [[3, 7, 9, 1], [2, 2, 8, 5]]


def main(path: Path) -> None:
    with joined_world() as world:
        found = {"all": _run(world, path)}
        if world.rank == 1:
            # As on a system without such memory.
            sequence_program.is_available = lambda: False
        found["one cannot"] = _run(world, path)
        if world.rank == 1:
            sequence_program.is_available = lambda: True
            request_program.RankWeights = _fail
        found["one fails"] = _run(world, path)
        if world.rank == 1:
            sequence_program.emit_request_programs = _fail
        found["one fails early"] = _run(world, path)
        if world.rank == 0:
            print(json.dumps(found))
    world.exit()


def _run(world: World, path: Path) -> Any:
    load = sequence_program.load_sequence_programs
    try:
        session, _ = open_session(world, BundleFile(path), RankOptions(), lambda bundle: {}, load)
    except Agreed as everywhere:
        return world.exchange(str(everywhere.error))
    program = LanguageProgram.of(session.bundle.manifest)
    tokens = [*generated_tokens(program.feed(session, GREEDY, world=world), torch.tensor(PROMPTS), 9, ())]
    loaded: Any = session.programs[0]
    kept = loaded.requests.recorded if isinstance(loaded, sequence_program.SequenceProgram) else None
    steps = 0 if kept is None else sum(step is not None for step in kept._steps.values())
    return [world.exchange([type(loaded).__name__, steps]), torch.stack(tokens, 1).tolist()]


def _fail(*_: Any, **__: Any) -> Any:
    raise RunError("no room")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
