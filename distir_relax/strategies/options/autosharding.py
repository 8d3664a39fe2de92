"""The option ``placements``: layouts within a stage by the rules of data and tensor parallelism, or by optimization.

With ``auto``, `autosharding.PlaceBySearch` replaces propagation. The optimum depends on the machine; so does the
memory, which is that of the simulated program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.errors import DistIRError
from distir_relax.strategies.strategy import OPTIONS, StrategyOption

if TYPE_CHECKING:
    from distir_relax.strategies.strategy import Strategy


class Placements(StrategyOption[str]):
    """The layouts within a stage: by ``rules``, or the fastest ones (``auto``)."""

    name = "placements"
    default = "rules"
    help = "Placements within stages: by rules, or by optimization."
    metavar = "rules,auto"
    choices = ("rules", "auto")

    def check_combination(self, strategy: Strategy) -> None:
        """Check that no option changes the rules if they are not used."""
        of_rules = [o.name for o in OPTIONS.values() if not o.with_autosharding]
        if self.of(strategy) == "auto" and any(name in of_rules for name, _ in strategy.options):
            *names, last = of_rules
            raise DistIRError(
                f"placements=auto cannot be combined with {', '.join(names)} or {last}",
                f"strategy {strategy}",
                "remove them",
            )
