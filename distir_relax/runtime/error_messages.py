"""Errors as JSON, for processes that report them to others."""

from __future__ import annotations

import builtins
import traceback
from typing import Any, TypeVar

from distir_relax import errors
from distir_relax.errors import DistIRError, RunError

_Error = TypeVar("_Error", bound=BaseException)


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return the class and the text of an error; of a `DistIRError` its fields, of others also the traceback."""
    if isinstance(error, DistIRError):
        return {"type": type(error).__name__, "fields": [error.message, error.where, error.hint]}
    trace = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "text": str(error), "traceback": trace}


def user_error_from_json(data: dict[str, Any]) -> DistIRError:
    """Return the `DistIRError` of a message; a RunError if its class is not one of `distir_relax.errors`."""
    found = getattr(errors, data["type"], None)
    kind = found if isinstance(found, type) and issubclass(found, DistIRError) else RunError
    return kind(*data["fields"])


def error_from_json(data: dict[str, Any]) -> Exception:
    """Return the error of a message, with its traceback as a note. One that is not built in becomes a RuntimeError."""
    if "fields" in data:
        return user_error_from_json(data)
    kind = getattr(builtins, data["type"], None)
    text = data["text"]
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, UnicodeError):
        kind, text = RuntimeError, f"{data['type']}: {text}"
    error: Exception = kind(text)
    error.add_note(data["traceback"])
    return error


def name_rank(error: _Error, rank: int, size: int) -> _Error:
    """Return `error` with the rank, of `size`, that it was raised on."""
    if size > 1:
        if isinstance(error, DistIRError):
            if f"rank {rank}" not in error.message:
                error.message += f" (on rank {rank} of {size})"
        else:
            error.add_note(f"raised on rank {rank} of {size}")
    return error
