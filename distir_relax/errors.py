"""Exceptions that a user can meet.

Each message has the expectation, the finding, the place in the user's model, and a hint.
The command line prints the message alone and exits with the error's `exit_code`; any other exception is a bug of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(eq=False)
class DistIRError(Exception):
    """Base of all errors that a user can cause and fix.

    `message` has the expectation and the finding; `where` is a place in the user's model or
    file (`model.py:12`, a parameter's name, a path); `hint` says what to do next.
    """

    exit_code: ClassVar[int] = 2
    message: str
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{place}{self.message}{advice}"


class PlacementError(DistIRError):
    """A placement that cannot be read, or does not fit its tensor or mesh."""


class AnnotationError(DistIRError):
    """Annotations that name nothing, or that contradict each other."""


class UnsupportedOpError(DistIRError):
    """The model uses an op that has no entry in the op table."""


class ImportModelError(DistIRError):
    """A model that a frontend cannot turn into a program."""


class VerificationError(DistIRError):
    """A program breaks a rule of its stage."""


class ParseError(DistIRError):
    """Program text that does not follow the grammar."""


class BundleError(DistIRError):
    """A bundle that is missing, half-written, damaged, or of another format version."""


class SignatureError(BundleError):
    """A bundle whose signature is missing or is not one by the required key, or a key that cannot be used."""


class RunError(DistIRError):
    """A launch that cannot proceed: wrong world size, wrong inputs, ranks that disagree, a time-out."""


class LostError(RunError):
    """A rank or host that is lost, a hang, or memory that changed: infrastructure, not the user's mistake.

    The same launch may succeed.
    """

    exit_code = 75


class ProfileError(DistIRError):
    """A device profile that is missing or wrong, or too small for the program."""


class CheckpointError(DistIRError):
    """A checkpoint of a training run that is missing or damaged, cannot be written, or does not fit the program."""
