"""Text, JSON and HTML reports of bundles, simulations and searches."""

from distir_relax.report.diff import diff
from distir_relax.report.explain import explain

__all__ = ["diff", "explain"]
