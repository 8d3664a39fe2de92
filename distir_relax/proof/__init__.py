"""Checks of plans that share no code with the passes that make them."""

from distir_relax.proof.projection import check_projection

__all__ = ["check_projection"]
