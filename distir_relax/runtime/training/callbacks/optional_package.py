"""Packages that a logger needs and that the project does not depend on."""

from __future__ import annotations

from importlib.util import find_spec

from distir_relax.errors import RunError


def check_installed(package: str, log: str) -> None:
    """Raise RunError unless a package can be imported, without importing it; `log` is the log that needs it."""
    if find_spec(package) is None:
        raise RunError(f"this log needs the package {package}, found none", log, f"pip install {package}")
