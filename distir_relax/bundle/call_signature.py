"""A model's call, as far as a bundle keeps it: the order of its arguments, and values that are built in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distir_relax.support import Fields

Constant = bool | int | float | str | None


@dataclass(frozen=True)
class CallManifest:
    """The arguments of a model's call, by name.

    `arguments` are those that may be given by position, in order. `constants` are arguments that are no tensors, whose
    values the programs have built in: those of the example, and defaults of what the example left out.
    """

    arguments: tuple[str, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)

    @staticmethod
    def of(arguments: tuple[str, ...], values: Mapping[str, Any]) -> CallManifest:
        """The call with those of the `values` that JSON has."""
        return CallManifest(arguments, {name: value for name, value in values.items() if is_constant(value)})

    def to_json(self) -> dict[str, Any]:
        """Plain values; see docs/bundle.md."""
        return {"arguments": list(self.arguments), "constants": dict(self.constants)}

    @classmethod
    def from_json(cls, table: Fields) -> CallManifest:
        """What `to_json` gave. Raises the table's error for fields that are missing or do not fit."""
        constants = table.fields("constants")
        found: dict[str, Any] = dict(constants.table)
        for name, value in found.items():
            if not is_constant(value):
                raise constants.refuse("a number, a text, a truth value or null", name, value)
        return cls(table.texts("arguments"), found)


def is_constant(value: Any) -> bool:
    """Whether a bundle keeps the value of an argument."""
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
