"""The versions of packages that all hosts of a launch must have alike."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("distir-relax", "torch")


def versions() -> dict[str, str]:
    """Return the versions of this package and of torch, whose ranks connect to each other, without importing torch.

    Builds of one version, as for CPUs and for CUDA, are the same.
    """
    return {name: _version(name).partition("+")[0] for name in _PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
