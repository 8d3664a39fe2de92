"""Devices of a mesh that are unlike in speed or memory: in what proportions axes are cut, and who has least room."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import Profile
from distir_relax.layout import DeviceMesh


@dataclass(frozen=True, slots=True)
class Unlike:
    """What the devices of a mesh have that is unlike; nothing where all are alike.

    `shares` are, for each mesh axis, the parts of the work of its indices, empty where they are equal; `speeds` and
    `rooms` are by device: how fast it is, and the part that its memory is of the largest.
    """

    shares: tuple[tuple[float, ...], ...] = ()
    speeds: tuple[float, ...] = ()
    rooms: tuple[float, ...] = ()

    @staticmethod
    def of(profile: Profile, mesh: DeviceMesh, limited: bool = False) -> Unlike:
        """Those of a machine; where memory is `limited` to the same for all devices, all have equal room.

        An index is as fast as the slowest device that has it; what one axis leaves unlike, the next evens out.
        """
        if not profile.groups:
            return Unlike()
        kinds = np.array(profile.kinds(mesh.size))
        left = kinds[:, 0].reshape(mesh.shape)
        shares = []
        for axis, size in enumerate(mesh.shape):
            others = tuple(other for other in range(len(mesh.shape)) if other != axis)
            slowest = left.min(axis=others)
            parts = slowest / slowest.sum()
            left = left / np.expand_dims(parts * size, others)
            written = tuple(float(f"{part:.6g}") for part in parts)
            shares.append(written if len(set(written)) > 1 else ())
        rooms = np.ones(mesh.size) if limited else kinds[:, 1] / kinds[:, 1].max()
        return Unlike(tuple(shares), tuple(kinds[:, 0].tolist()), tuple(rooms.tolist()))


def of_all_places(profile: Profile, places: int, size: int) -> Profile:
    """The machine that each of so many places of `size` devices has, with the memory of all of them.

    A device is as slow as the slowest of its number in any place, and has `places` times the memory of the smallest.
    """
    machine = profile.with_devices(places * size)
    groups: tuple[Group, ...] = ()
    if machine.groups:
        least = np.array(machine.kinds(places * size)).reshape(places, size, 2).min(axis=0)
        groups = tuple(Group(((i, i),), float(s), float(m) * places) for i, (s, m) in enumerate(least))
    return replace(machine, memory=machine.memory * places, groups=groups)
