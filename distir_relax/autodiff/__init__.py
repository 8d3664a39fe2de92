"""Programs differentiated: the backward steps of their ops, written in the op table's own terms."""

from distir_relax.autodiff.backward import gradients
from distir_relax.autodiff.differentiate import Differentiate

__all__ = ["Differentiate", "gradients"]
