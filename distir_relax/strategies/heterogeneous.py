"""Proportions of work on heterogeneous devices.

A part of the batch, or of a factor class, is on several devices: it is sized for the slowest of them. Imbalance left by
the data axis is divided by the tensor axis, then by axes of options, and the rest by the stages of a pipeline. The
assignment of devices to stages is fixed: devices are numbered by stage, then data-parallel rank, then tensor rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distir_relax.cost.profile import Profile
from distir_relax.strategies.strategy import Strategy

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shares:
    """The fractions of the work of the indices along each axis of a stage's mesh, empty if they are equal.

    `group_speeds` has the speed of each device group of a pipeline, 1 for devices as in the profile; `memory` the bytes
    of each tensor rank of each group, on its smallest device. All are empty on homogeneous devices.
    """

    axes: tuple[tuple[str, tuple[float, ...]], ...] = ()
    group_speeds: tuple[float, ...] = ()
    memory: tuple[tuple[float, ...], ...] = ()

    def along(self, axis: str) -> tuple[float, ...]:
        """Return the fractions along an axis."""
        return dict(self.axes).get(axis, ())

    @staticmethod
    def of(profile: Profile | None, strategy: Strategy) -> Shares:
        """Return the shares of the devices of a strategy; without a profile, devices are equal."""
        if profile is None or not profile.groups:
            return Shares()
        mesh = strategy.mesh
        devices = np.array(profile.device_specs(strategy.devices)).reshape(strategy.pipeline, *mesh.shape, 2)
        remaining, axes = devices[..., 0], dict[str, tuple[float, ...]]()
        every = range(remaining.ndim)
        for number, (axis, size) in enumerate(zip(mesh.axes, mesh.shape, strict=True), 1):
            others = tuple(n for n in every if n != number)
            parts = _proportions(remaining.min(axis=others))
            remaining = remaining / np.expand_dims(parts * size, others)
            axes[axis] = _rounded_shares(parts)
        memory = devices[..., 1].min(axis=tuple(n for n in every if n not in (0, 2)))
        return Shares(
            tuple((axis, parts) for axis, parts in axes.items() if parts),
            tuple(remaining.min(axis=tuple(every[1:])).tolist()),
            tuple(map(tuple, memory.tolist())),
        )

    def stages(self, group_of: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the speed of each stage, and its bytes of each device's memory; it is on group ``group_of[stage]``."""
        if not self.group_speeds:
            return (), ()
        speeds = tuple(self.group_speeds[group] for group in group_of)
        return speeds, tuple(min(self.memory[group]) / group_of.count(group) for group in group_of)


def _proportions(speeds: Numbers) -> Numbers:
    shares: Numbers = speeds / speeds.sum()
    return shares


def _rounded_shares(parts: Numbers) -> tuple[float, ...]:
    """Return the parts with the digits of an annotation; none if they are equal."""
    rounded: Sequence[float] = [float(f"{part:.6g}") for part in parts.tolist()]
    return tuple(rounded) if len(set(rounded)) > 1 else ()
