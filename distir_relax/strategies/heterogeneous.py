"""In what proportions work goes to devices of unlike speed.

A part of the batch, or of a class of dims, is held by several devices: it is as large as suits the slowest of them.
What the data axis leaves unlike the tensor axis evens out, and what both leave, the stages of a pipeline. Which devices
are a stage is not chosen: devices are numbered place by place, data-parallel rank by rank, the tensor axis within.
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
    """The part of the work, of 1 in all, of each index of the `data` and the `tensor` axis; empty where all are alike.

    `places` are the speeds at which the places of a pipeline do their parts, 1 where all devices are as the profile
    says; `rooms` the bytes of memory of each tensor rank of each place, on the device that has least. Of a machine
    whose devices are all alike there are neither.
    """

    data: tuple[float, ...] = ()
    tensor: tuple[float, ...] = ()
    places: tuple[float, ...] = ()
    rooms: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def of(profile: Profile | None, strategy: Strategy) -> Shares:
        """Those of the devices of a strategy on a machine; on none, devices are all alike."""
        if profile is None or not profile.groups:
            return Shares()
        shape = (strategy.pipeline, strategy.data, strategy.tensor)
        kinds = np.array(profile.kinds(strategy.devices)).reshape(*shape, 2)
        speeds = kinds[..., 0]
        data = _in_proportion(speeds.min(axis=(0, 2)))
        left = speeds / (data * strategy.data)[None, :, None]
        tensor = _in_proportion(left.min(axis=(0, 1)))
        left = left / (tensor * strategy.tensor)[None, None, :]
        return Shares(
            _unlike(data),
            _unlike(tensor),
            tuple(left.min(axis=(1, 2)).tolist()),
            tuple(map(tuple, kinds[..., 1].min(axis=1).tolist())),
        )

    def stages(self, place_of: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each stage its speed, and the bytes that it has of each device's memory; it is at ``place_of[stage]``."""
        if not self.places:
            return (), ()
        speeds = tuple(self.places[place] for place in place_of)
        return speeds, tuple(min(self.rooms[place]) / place_of.count(place) for place in place_of)


def _in_proportion(speeds: Numbers) -> Numbers:
    found: Numbers = speeds / speeds.sum()
    return found


def _unlike(parts: Numbers) -> tuple[float, ...]:
    """The parts as marks can say them; none where they are equal."""
    written: Sequence[float] = [float(f"{part:.6g}") for part in parts.tolist()]
    return tuple(written) if len(set(written)) > 1 else ()
