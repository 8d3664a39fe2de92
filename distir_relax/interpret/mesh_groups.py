"""Groups of devices along a mesh axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distir_relax.errors import VerificationError
from distir_relax.ir import Module
from distir_relax.layout import DeviceMesh


def mesh_of_axis(module: Module, axis: str) -> DeviceMesh:
    """Return the mesh of a module that has the given axis. Raises `VerificationError` if none has."""
    for mesh in module.meshes:
        if axis in mesh.axes:
            return mesh
    raise VerificationError(f"no mesh of the program has an axis {axis!r}")


def axis_groups(mesh: DeviceMesh, axis: str, devices: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the groups of `devices` that differ only along a mesh axis, in order along it, one per row.

    Raises `VerificationError` if only some devices of a group are among them.
    """
    number = mesh.axes.index(axis)
    rows = np.moveaxis(np.arange(mesh.size).reshape(mesh.shape), number, -1).reshape(-1, mesh.shape[number])
    is_member = np.zeros(mesh.size, dtype=bool)
    is_member[list(devices)] = True
    membership = is_member[rows]
    if (membership.any(axis=1) != membership.all(axis=1)).any():
        raise VerificationError(f"a communication along {axis} has only some of the devices of a group: {devices}")
    groups: npt.NDArray[np.int64] = rows[membership.all(axis=1)]
    return groups
