"""Automatic differentiation: backward programs built from ops of the op table."""

from distir_relax.autodiff.backward import gradients
from distir_relax.autodiff.differentiate import Differentiate
from distir_relax.autodiff.linear_casts import LinearCasts
from distir_relax.autodiff.reduce_gradients import ReduceGradients

__all__ = ["Differentiate", "LinearCasts", "ReduceGradients", "gradients"]
