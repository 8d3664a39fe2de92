"""Source locations in the user's model, as text: ``model.layers.1.self_attn.o_proj, modeling_llama.py:269``.

The path of the module comes first (absent for ops of the outermost module), then the line.
"""

from __future__ import annotations

from functools import lru_cache


def join_location(module: str, line: str) -> str:
    """Join a module path and a line to a location; either may be empty."""
    return ", ".join(filter(None, (module, line)))


def relative_location(block: str, location: str) -> str:
    """Make a location relative to the block at path `block`, so that locations in equal blocks are equal.

    ``layers.1`` and ``layers.1.mlp, model.py:7`` give ``mlp, model.py:7``; ``/layers.1`` and
    ``net.onnx:/layers.1/mlp/Mul`` give ``mlp/Mul``.
    """
    module, line = split(location)
    if module == block:
        return line
    if module.startswith(f"{block}."):
        return join_location(module.removeprefix(f"{block}."), line)
    _, separator, node = location.partition(f":{block}/")
    return node if separator else location


def absolute_location(block: str, location: str) -> str:
    """Make a location absolute, the inverse of `relative_location`; `block` is the location of the block."""
    if "/" in block:
        return location if ":" in location else f"{block}/{location}" if location else block
    module, line = split(location)
    if not is_path(block):
        return location or block
    return join_location(f"{block}.{module}" if module else block, line)


def split(location: str) -> tuple[str, str]:
    """Split a location into the module path, which may be empty, and the line."""
    module, separator, line = location.partition(", ")
    if separator and is_path(module):
        return module, line
    return ("", location) if ":" in location or not is_path(location) else (location, "")


@lru_cache(maxsize=1 << 14)
def is_path(text: str) -> bool:
    """Whether a text is a module path: ``layers.1.mlp``."""
    return bool(text) and all(part.isidentifier() or part.isdigit() for part in text.split("."))
