"""Exit codes of launches, by which a scheduler decides whether to start them again."""

from __future__ import annotations

from distir_relax.errors import LostError

INFRASTRUCTURE = LostError.exit_code
"""A lost rank or host, or a hang (EX_TEMPFAIL of sysexits.h): the same command may succeed."""


def of_launch(code: int) -> int:
    """Return the exit code of a launch whose launcher ended with `code`.

    Launchers end with 128 plus the number of the signal that ended a rank, or with its negative: it was lost.
    """
    return INFRASTRUCTURE if code > 128 or code < 0 else code
