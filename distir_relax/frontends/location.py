"""Locations in the user's model: ``layers.1.mlp, model.py:12``."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from distir_relax.frontends.imported_model import Frame

if TYPE_CHECKING:
    from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_OURS = str(Path(__file__).resolve().parent.parent) + os.sep


def short_location(file: str, line: int) -> str:
    """Return ``model.py:12``; an ``__init__.py`` includes its folder."""
    path = Path(file)
    name = f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name
    return f"{name}:{line}"


def location_in_stack(stack: str | None) -> str:
    """Return the innermost frame of a printed stack that is in neither torch nor this package; "" without any.

    `torch.export` records only frames of functions called ``forward``: an op of a helper has its caller's line.
    """
    return location_of_frames((m["file"], int(m["line"])) for m in _FRAME.finditer(stack or ""))


def location_here() -> str:
    """Return `location_in_stack` of the present stack: the line of the model that called."""
    return location_in_stack("".join(traceback.format_stack()))


def innermost_frame(stack: str) -> str:
    """Return the file of the innermost frame of a printed stack that is not in torch; "" without any."""
    import torch

    files = [m["file"] for m in _FRAME.finditer(stack)]
    outside = [file for file in files if not file.startswith(os.path.dirname(torch.__file__) + os.sep)]
    return outside[-1] if outside else ""


def module_of(node: Node) -> str:
    """Return the path of the module whose call an exported node belongs to: ``layers.1.mlp``; "" for the outermost."""
    frames = frames_of(node)
    return frames[-1].path if frames else ""


def frames_of(node: Node) -> tuple[Frame, ...]:
    """Return the modules in whose calls an exported node was recorded, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(
        Frame(path, str(kind).rsplit(".", 1)[-1], int(key.rpartition("@")[2]) if "@" in key else 0)
        for key, (path, kind) in stack.items()
    )


def location_of_error(traceback: TracebackType | None) -> str:
    """Return the innermost frame of the user's model in a traceback; "" without any."""
    frames = []
    while traceback:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return location_of_frames(frames)


def location_of_frames(frames: Iterable[tuple[str, int]]) -> str:
    """Return the last of (file, line) pairs in none of torch, Python's library and this package; "" without any."""
    import torch

    libraries = (os.path.dirname(torch.__file__) + os.sep, _OURS)
    location = ""
    for file, line in frames:
        is_of_python = file.startswith(_PYTHON) and "-packages" not in file
        if not is_of_python and not file.startswith((*libraries, "<")):
            location = short_location(file, line)
    return location
