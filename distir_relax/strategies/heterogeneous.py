"""Proportions of work on heterogeneous devices.

A part of the batch, or of a factor class, is on several devices: it is sized for the slowest of them. Imbalance left by
the data axis is divided by the tensor axis, and the rest by the stages of a pipeline. The assignment of devices to
stages is fixed: devices are numbered by stage, then data-parallel rank, then tensor rank.
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
    """The fraction of the work of each index of the `data` and the `tensor` axis; empty if equal.

    `group_speeds` has the speed of each device group of a pipeline, 1 for devices as in the profile; `memory` the bytes
    of each tensor rank of each group, on its smallest device. Both are empty on homogeneous devices.
    """

    data: tuple[float, ...] = ()
    tensor: tuple[float, ...] = ()
    group_speeds: tuple[float, ...] = ()
    memory: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def of(profile: Profile | None, strategy: Strategy) -> Shares:
        """Return the shares of the devices of a strategy; without a profile, devices are equal."""
        if profile is None or not profile.groups:
            return Shares()
        shape = (strategy.pipeline, strategy.data, strategy.tensor)
        devices = np.array(profile.device_specs(strategy.devices)).reshape(*shape, 2)
        speeds = devices[..., 0]
        data = _proportions(speeds.min(axis=(0, 2)))
        remaining = speeds / (data * strategy.data)[None, :, None]
        tensor = _proportions(remaining.min(axis=(0, 1)))
        remaining = remaining / (tensor * strategy.tensor)[None, None, :]
        return Shares(
            _rounded_shares(data),
            _rounded_shares(tensor),
            tuple(remaining.min(axis=(1, 2)).tolist()),
            tuple(map(tuple, devices[..., 1].min(axis=1).tolist())),
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
