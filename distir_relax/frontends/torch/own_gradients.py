"""Models with gradients of their own: `torch.autograd.Function` in a model that is imported for training.

`torch.export` reads what such a function computes, not how it is differentiated: the program's gradients would be
others than the model's, without a word.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import location_in_stack


def refusing_own_gradients(training: bool) -> Any:
    """A context in which a model that is imported for `training` raises `ImportModelError` where it calls one."""
    return _refusing() if training else nullcontext()


@contextmanager
def _refusing() -> Iterator[None]:
    from torch.autograd.function import _SingleLevelFunction

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # torch's own, such as that of checkpoints, have the gradients of what they compute.
        if not cls.__module__.startswith("torch."):
            raise ImportModelError(
                f"the model has gradients of its own: {cls.__name__}, a torch.autograd.Function",
                location_in_stack("".join(traceback.format_stack())),
                "a program is differentiated as its ops are; for a straight-through estimator write "
                "x + (f(x) - x).detach()",
            )
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

    # All calls come through here, those by an `apply` that was kept somewhere too.
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
