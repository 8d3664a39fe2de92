"""Functions in LLVM's text of a kernel, for what TVM cannot express: the kernel calls functions that do not exist."""

from __future__ import annotations

import re
from collections.abc import Sequence


def with_definitions(text: str, names: Sequence[str], definitions: str) -> str:
    """Return LLVM's text of a module with definitions of functions of these names, if it calls one of them."""
    declaration = re.compile(rf"^declare .*@(?:{'|'.join(names)})\(.*$", re.MULTILINE)
    return declaration.sub("", text) + definitions if declaration.search(text) else text
