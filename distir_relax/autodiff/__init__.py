"""Automatic differentiation: backward programs built from ops of the op table."""

from distir_relax.autodiff.backward import gradients
from distir_relax.autodiff.differentiate import Differentiate

__all__ = ["Differentiate", "gradients"]
