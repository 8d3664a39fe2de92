"""States of callbacks in checkpoints, by the names of their classes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.callback import Callback


def states_of(callbacks: Sequence[Callback]) -> list[dict[str, Any]]:
    """Return the states of callbacks that have one. Raises RunError for a state of other types than JSON's."""
    states: list[dict[str, Any]] = []
    for callback in callbacks:
        if state := callback.state_dict():
            name = type(callback).__qualname__
            try:
                states.append({"name": name, "state": json.loads(json.dumps(state, allow_nan=False))})
            except (TypeError, ValueError) as wrong:
                raise RunError(
                    f"expected a state of JSON's types, which a checkpoint can hold, found {wrong}",
                    f"{name}.state_dict", "return numbers that are finite, texts, lists and dicts",
                ) from None  # fmt: skip
    return states


def load_states(callbacks: Sequence[Callback], states: Iterable[Mapping[str, Any]]) -> None:
    """Give callbacks their states of a checkpoint: those of one class in their order. Warn of states of no callback.

    Raises what `load_state_dict` raises.
    """
    left = list(callbacks)
    for item in states:
        name = item.get("name")
        owner = next((callback for callback in left if type(callback).__qualname__ == name), None)
        if owner is None:
            warnings.warn(
                f"the checkpoint has the state of a callback {name}, which the run does not have", stacklevel=2
            )
            continue
        left.remove(owner)
        owner.load_state_dict(dict(item.get("state", {})))
