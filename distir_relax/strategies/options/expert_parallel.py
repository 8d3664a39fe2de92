"""The option ``experts``: the dim and the axis along which the experts of a mixture are split.

`strategies.expert_parallel` finds the experts; `ApplyStrategy` annotates them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.strategies.strategy import StrategyOption

if TYPE_CHECKING:
    from distir_relax.strategies.strategy import Strategy


class Experts(StrategyOption[str]):
    """The split of experts: along their ``hidden`` dim, or by expert along the ``data`` or the ``tensor`` axis."""

    name = "experts"
    default = "hidden"
    help = "Split of a mixture's experts: their hidden dim, or by expert over data or tensor ranks."
    metavar = "hidden,data"
    choices = ("hidden", "data", "tensor")
    with_autosharding = False

    def is_searched(self, value: str, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether the axis has several ranks."""
        return value == "hidden" or bool(strategy[value] > 1)
