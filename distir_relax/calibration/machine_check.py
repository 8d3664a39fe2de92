"""Whether a profile describes processors like this machine's, before its predictions are compared with runs here."""

from __future__ import annotations

import warnings

from distir_relax.cost.profile import Profile
from distir_relax.kernels.processor import instruction_sets, processor_flags


def warn_of_mismatch(profile: Profile) -> None:
    """Warn if a profile is of other processors than this machine's (`mismatch`)."""
    message = mismatch(profile)
    if message is not None:
        warnings.warn(message, stacklevel=2)


def mismatch(profile: Profile, flags: frozenset[str] | None = None) -> str | None:
    """Return a warning if a profile was calibrated on a CPU with other instruction sets than this one, None otherwise.

    `flags` are those of this machine's processor, by default as Linux states them. Nothing is said of a profile without
    instruction sets, nor of one of GPUs.
    """
    here = instruction_sets(processor_flags() if flags is None else flags)
    if profile.kind != "cpu" or not profile.instructions or not here or profile.instructions == here:
        return None
    return (
        f"the profile {profile.name} was calibrated on {profile.processor or 'a processor'} with "
        f"{profile.instructions}, this machine has {here}: calibrate here (distir calibrate)"
    )
