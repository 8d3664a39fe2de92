"""Parallelism strategies, and their registered options."""

from distir_relax.strategies import options
from distir_relax.strategies.strategy import Strategy, StrategyOption, register_option

__all__ = ["Strategy", "StrategyOption", "options", "register_option"]
