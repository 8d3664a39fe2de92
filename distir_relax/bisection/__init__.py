"""Comparison of a plan with its model, value by value: the first one that is wrong."""

from distir_relax.bisection.result import Bisection, OpError, WrongValue
from distir_relax.bisection.run import bisect

__all__ = ["Bisection", "OpError", "WrongValue", "bisect"]
