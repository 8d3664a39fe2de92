"""Origin of an imported model, for the manifest of its bundle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distir_relax.bundle import Origin, SourceFile
from distir_relax.frontends.imported_model import Imported
from distir_relax.support import shown_path
from distir_relax.support.user_function import qualified_name

_MOST_CHARACTERS = 1000


def origin_of(model: Any) -> Origin:
    """Return the origin of a model in memory: its class, and the package of that. A program in a tuple has none."""
    kind = type(model)
    if isinstance(model, tuple):
        return Origin()
    package = kind.__module__.partition(".")[0]
    # Classes that are made while a program runs may have any name.
    name = shown_path(qualified_name(kind))[:_MOST_CHARACTERS]
    return Origin(name, packages=() if package in ("__main__", "builtins") else (package,))


def from_files(imported: Imported, paths: Iterable[Path], keeps: bool = True, read: bool = False) -> Imported:
    """Return an imported model with these files as those of its weights, besides others if it `keeps` weights of them.

    Files that have been `read`, which may be written to later, are hashed now, others when a bundle is written. Raises
    BundleError if a file cannot be read.
    """
    files = tuple(map(SourceFile, paths))
    for file in files if read else ():
        file.hash()
    return replace(imported, origin=replace(imported.origin, files=(*imported.origin.files * keeps, *files)))
