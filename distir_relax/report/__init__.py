"""What a bundle says about itself, for people: why values lie as they do, and how two bundles differ."""

from distir_relax.report.diff import diff
from distir_relax.report.explain import explain

__all__ = ["diff", "explain"]
