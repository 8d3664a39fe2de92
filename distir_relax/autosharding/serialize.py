"""A search for placements as a bundle keeps it, to be asked again: the program, the machine, what was asked."""

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
from distir_relax.sharding.nonfinite import Hazards
from distir_relax.support import MOST, Fields, parse_json

PROGRAM_FILE, MACHINE_FILE, SEARCH_FILE = SEARCH_FILES


def print_search(search: PlaceBySearch, module: Module) -> dict[str, str]:
    """The texts, by the names of their files, of a search and the program of the global stage that it laid out."""
    known = search.hazards
    asked = {
        "tail": search.tail,
        "memory": None if search.memory is None else int(min(search.memory, MOST)),
        "fixed": sorted(known.fixed),
        "infinite": sorted(known.infinite),
        "zero": sorted(known.zero),
    }
    texts = (print_module(module), print_profile(search.profile), json.dumps(asked, indent=1) + "\n")
    return dict(zip((PROGRAM_FILE, MACHINE_FILE, SEARCH_FILE), texts, strict=True))


def parse_search(texts: Mapping[str, str], mesh: DeviceMesh, where: str = "") -> tuple[PlaceBySearch, Module] | None:
    """The inverse of `print_search`, for a search on `mesh`; None where the texts have none.

    The machine's rates have six digits.
    Raises `BundleError` where a file is missing or is not what it should be.
    """
    if SEARCH_FILE not in texts:
        return None
    if missing := [name for name in (PROGRAM_FILE, MACHINE_FILE) if name not in texts]:
        raise BundleError(f"the bundle holds no {missing[0]}", where)
    fields = Fields.of(parse_json(texts[SEARCH_FILE], BundleError, SEARCH_FILE), BundleError, SEARCH_FILE)
    tail = fields.text("tail")
    if tail not in ("ragged", "pad"):
        raise fields.refuse("ragged or pad", "tail", tail)
    known = Hazards(*(frozenset(fields.texts(key)) for key in ("fixed", "infinite", "zero")))
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
        known,
    )
    return search, module
