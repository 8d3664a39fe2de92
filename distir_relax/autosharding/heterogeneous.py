"""Speed and memory of heterogeneous devices of a mesh: the proportions of cuts along each axis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import Profile
from distir_relax.layout import DeviceMesh


@dataclass(frozen=True, slots=True)
class Heterogeneity:
    """Relative speed and memory of the devices of a mesh; empty if all are equal.

    `shares` has, for each mesh axis, the parts of the work of its indices, empty if equal; `speeds` and
    `memory_fractions` are by device: its speed, and its memory as a fraction of the largest.
    """

    shares: tuple[tuple[float, ...], ...] = ()
    speeds: tuple[float, ...] = ()
    memory_fractions: tuple[float, ...] = ()

    @staticmethod
    def of(profile: Profile, mesh: DeviceMesh, limited: bool = False) -> Heterogeneity:
        """Return the values of a machine; with memory `limited` to one size for all devices, fractions are 1.

        An index is as fast as its slowest device; imbalance left by one axis is divided by the next.
        """
        if not profile.groups:
            return Heterogeneity()
        classes = np.array(profile.device_specs(mesh.size))
        speeds = classes[:, 0].reshape(mesh.shape)
        shares = []
        for axis, size in enumerate(mesh.shape):
            others = tuple(other for other in range(len(mesh.shape)) if other != axis)
            slowest = speeds.min(axis=others)
            parts = slowest / slowest.sum()
            speeds = speeds / np.expand_dims(parts * size, others)
            rounded = tuple(float(f"{part:.6g}") for part in parts)
            shares.append(rounded if len(set(rounded)) > 1 else ())
        memory_fractions = np.ones(mesh.size) if limited else classes[:, 1] / classes[:, 1].max()
        return Heterogeneity(tuple(shares), tuple(classes[:, 0].tolist()), tuple(memory_fractions.tolist()))


def merge_stage_devices(profile: Profile, stages: int, size: int) -> Profile:
    """Return the machine of `size` devices that stands for all pipeline stages at once, with the memory of all of them.

    A device is as slow as the slowest of its number in any stage, and has `stages` times the memory of the smallest.
    """
    machine = profile.with_devices(stages * size)
    groups: tuple[Group, ...] = ()
    if machine.groups:
        slowest = np.array(machine.device_specs(stages * size)).reshape(stages, size, 2).min(axis=0)
        groups = tuple(Group(((i, i),), float(s), float(m) * stages) for i, (s, m) in enumerate(slowest))
    return replace(machine, memory=machine.memory * stages, groups=groups)
