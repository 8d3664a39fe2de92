"""Places in the user's model, as text: ``model.layers.1.self_attn.o_proj, modeling_llama.py:269``.

First the path of the module, where the model has modules and the op is not the outermost one's own; then the line.
"""

from __future__ import annotations

from functools import lru_cache


def place(module: str, line: str) -> str:
    """The place that is `line` in the module at path `module`; either may be empty."""
    return ", ".join(filter(None, (module, line)))


def inside(block: str, location: str) -> str:
    """A place in the block at path `block`, as the block itself tells it: what differs from block to block is left out.

    ``layers.1`` and ``layers.1.mlp, model.py:7`` give ``mlp, model.py:7``; ``/layers.1`` and
    ``net.onnx:/layers.1/mlp/Mul`` give ``mlp/Mul``.
    """
    module, line = split(location)
    if module == block:
        return line
    if module.startswith(f"{block}."):
        return place(module.removeprefix(f"{block}."), line)
    _, found, node = location.partition(f":{block}/")
    return node if found else location


def within(block: str, location: str) -> str:
    """The inverse of `inside`: the place in the whole model; `block` is the place of the block."""
    if "/" in block:
        return location if ":" in location else f"{block}/{location}" if location else block
    module, line = split(location)
    if not is_path(block):
        return location or block
    return place(f"{block}.{module}" if module else block, line)


def split(location: str) -> tuple[str, str]:
    """The path of the module, which may be empty, and the line."""
    module, found, line = location.partition(", ")
    if found and is_path(module):
        return module, line
    return ("", location) if ":" in location or not is_path(location) else (location, "")


@lru_cache(maxsize=1 << 14)
def is_path(text: str) -> bool:
    """Whether a text is the path of a module: ``layers.1.mlp``."""
    return bool(text) and all(part.isidentifier() or part.isdigit() for part in text.split("."))
