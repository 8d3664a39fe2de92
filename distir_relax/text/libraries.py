"""Libraries of the extra `text`, which is not installed with the package."""

from __future__ import annotations

import importlib
from typing import Any

from distir_relax.errors import RunError


def find_library(name: str) -> Any:
    """Import and return a library. Raises RunError, which says how to install it, if that fails."""
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise RunError(
            f"{name}, which text needs, cannot be imported: {missing}", hint="pip install 'distir-relax[text]'"
        ) from None
