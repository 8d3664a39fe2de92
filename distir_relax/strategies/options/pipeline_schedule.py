"""The options ``schedule`` and ``chunks``: the order of a pipeline's tasks, and its number of stages per device.

Their effect on memory depends on the order; it is that of the simulated program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.errors import DistIRError
from distir_relax.strategies.strategy import StrategyOption

if TYPE_CHECKING:
    from distir_relax.schedules import Schedule
    from distir_relax.strategies.strategy import Strategy


class PipelineSchedule(StrategyOption[str]):
    """The order of the tasks of a pipeline: a schedule of the registry in `schedules`."""

    name = "schedule"
    default = "1f1b"
    help = "Pipeline schedules."
    metavar = "1f1b,zb-h1"
    search_name = "schedules"
    group = "schedule"

    def check(self, value: str, where: str) -> None:
        """Check that the schedule is registered."""
        self._schedule(value, where)

    def check_combination(self, strategy: Strategy) -> None:
        """Check that the schedule supports the number of chunks."""
        where = f"strategy {strategy}"
        try:
            self._schedule(self.of(strategy), where).check_chunks(strategy.chunks)
        except DistIRError as error:
            raise DistIRError(error.message, where, error.hint) from None

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether there is a pipeline."""
        return strategy.pipeline > 1

    def is_searched(self, value: str, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether a schedule has the right tasks: those without weight gradients are for inference."""
        return not (is_trained and self._schedule(value, "").weights == "none")

    def _schedule(self, value: str, where: str) -> Schedule:
        from distir_relax.schedules import schedule_named

        try:
            return schedule_named(value)
        except DistIRError as error:
            raise DistIRError(error.message, where, error.hint) from None


class Chunks(StrategyOption[int]):
    """The number of pipeline stages per device."""

    name = "chunks"
    default = 1
    help = "Pipeline stages per device."
    metavar = "1,2"
    group = "schedule"

    def check(self, value: int, where: str) -> None:
        """Check that there is a chunk."""
        if value < 1:
            raise DistIRError(f"chunks is at least 1, found {value}", where)

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether there is a pipeline."""
        return strategy.pipeline > 1

    def search_rank(self, value: int, values: object) -> int:
        """Return the number: few chunks first."""
        return value
