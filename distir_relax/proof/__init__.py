"""Checks of plans that share no code with the passes that make them."""

from distir_relax.proof.model import Unproved, check_model
from distir_relax.proof.plan import Proof, Refuted, prove
from distir_relax.proof.projection import check_projection
from distir_relax.proof.schedule import check_schedule

__all__ = ["Proof", "Refuted", "Unproved", "check_model", "check_projection", "check_schedule", "prove"]
