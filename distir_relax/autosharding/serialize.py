"""Write and read a search for placements in a bundle: the program, the machine and the options."""

from __future__ import annotations

import json
from collections.abc import Mapping

from distir_relax.autosharding.autoshard import PlaceBySearch
from distir_relax.bundle import SEARCH_FILES
from distir_relax.cost.profile import read_profile
from distir_relax.cost.profile_writer import print_profile
from distir_relax.errors import BundleError
from distir_relax.ir import Module, parse, print_module, verify
from distir_relax.layout import DeviceMesh
from distir_relax.ops import check
from distir_relax.sharding.nonfinite import NonfiniteValues
from distir_relax.support import MOST, Fields, parse_json

PROGRAM_FILE, MACHINE_FILE, SEARCH_FILE = SEARCH_FILES


def print_search(search: PlaceBySearch, module: Module) -> dict[str, str]:
    """Return the files of a search and of the program of the global stage that it sharded, by name."""
    hazards = search.hazards
    options = {
        "tail": search.tail,
        "memory": None if search.memory is None else int(min(search.memory, MOST)),
        "fixed": sorted(hazards.fixed),
        "infinite": sorted(hazards.infinite),
        "zero": sorted(hazards.zero),
    }
    texts = (print_module(module), print_profile(search.profile), json.dumps(options, indent=1) + "\n")
    return dict(zip((PROGRAM_FILE, MACHINE_FILE, SEARCH_FILE), texts, strict=True))


def parse_search(texts: Mapping[str, str], mesh: DeviceMesh, where: str = "") -> tuple[PlaceBySearch, Module] | None:
    """Return the inverse of `print_search`, for a search on `mesh`; None if the bundle has no search.

    The machine's rates have six digits. Raises `BundleError` if a file is missing or invalid.
    """
    if SEARCH_FILE not in texts:
        return None
    if missing := [name for name in (PROGRAM_FILE, MACHINE_FILE) if name not in texts]:
        raise BundleError(f"the bundle holds no {missing[0]}", where)
    fields = Fields.of(parse_json(texts[SEARCH_FILE], BundleError, SEARCH_FILE), BundleError, SEARCH_FILE)
    tail = fields.text("tail")
    if tail not in ("ragged", "pad"):
        raise fields.refuse("ragged or pad", "tail", tail)
    hazards = NonfiniteValues(*(frozenset(fields.texts(key)) for key in ("fixed", "infinite", "zero")))
    module = parse(texts[PROGRAM_FILE], PROGRAM_FILE)
    if module.stage != "global":
        raise BundleError(
            f"expected a program of the global stage, found one of the {module.stage} stage", PROGRAM_FILE
        )
    verify(module, check)
    search = PlaceBySearch(
        mesh,
        read_profile(texts[MACHINE_FILE], MACHINE_FILE),
        tail,
        float(fields.whole("memory")) if fields.table.get("memory") is not None else None,
        hazards,
    )
    return search, module
