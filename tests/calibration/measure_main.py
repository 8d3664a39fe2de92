"""One rank of `distir measure` with a few of the samples: `measure_main.py OUTPUT PROGRAMS`."""

from __future__ import annotations

import sys
from pathlib import Path

from distir_relax.calibration import calibrate, measure, measurements, microbenchmarks
from distir_relax.runtime.join import join_world


def few(dtype: str, scale: int) -> list[microbenchmarks.OpSample]:
    """Every 33rd sample, of all groups; fewer of other dtypes than float32."""
    return microbenchmarks.op_samples(dtype, scale)[:: 33 if dtype == "float32" else 44]


if __name__ == "__main__":
    measurements.op_samples = few
    # Enough for several copies: how long they take is not looked at.
    measure._COLD_BYTES = 2e6
    measure.payloads = lambda scale: (3, 3_100)
    world = join_world()
    assert world is not None
    if world.rank == 1:
        # A slow rank: it does its work five times.
        once = measure.time_rank_work
        measure.time_rank_work = lambda device: sum(once(device) for _ in range(5))
    calibrate.measure(Path(sys.argv[1]), "cpu", 2, Path(sys.argv[2]), world)
    world.exit()
