"""The program of the launched tests: every collective, on the meshes given as arguments (`3`, `2x3`)."""

from __future__ import annotations

import sys

import every_collective

from distir_relax.layout import DeviceMesh
from distir_relax.runtime.join import join_world
from distir_relax.runtime.transports import mpi, torch_distributed


def main() -> None:
    world = join_world()
    assert world is not None, "not started by a launcher"
    for text in sys.argv[1:]:
        shape = tuple(map(int, text.split("x")))
        axes = ("dp", "tp")[-len(shape) :]
        every_collective.check_all(world.communicator(DeviceMesh(shape, axes)))
        # The same with pieces so small that every buffer takes several, as those beyond 2^30 elements do.
        largest, mpi.MAX_COUNT = mpi.MAX_COUNT, 6
        # And no tensor is small enough to go from each rank to all others.
        torch_distributed._SMALL = 0
        # Started collectives run in threads, as they do between machines.
        mpi.MPICommunicator._is_on_one_machine = lambda self, axis: False  # type: ignore[method-assign]
        # Whose arrays they were a transport does not know.
        every_collective.check_all(world.communicator(DeviceMesh(shape, axes)), (False,))
        mpi.MAX_COUNT = largest
    assert world.exchange({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]
    # One write a line: launchers forward what ranks print in pieces.
    sys.stdout.write(f"rank {world.rank} of {world.size} ({world.kind}) right\n")
    sys.stdout.flush()
    world.exit()


if __name__ == "__main__":
    main()
