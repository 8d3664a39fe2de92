"""Call signature of a model in a bundle: the order of arguments, and compiled-in values."""

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

    `arguments` are those that may be passed by position, in order. `constants` are non-tensor arguments whose values
    are compiled into the programs: those of the example, and defaults of arguments that the example left out.
    """

    arguments: tuple[str, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)

    @staticmethod
    def of(arguments: tuple[str, ...], values: Mapping[str, Any]) -> CallManifest:
        """Return the signature with those of the `values` that JSON can represent."""
        return CallManifest(arguments, {name: value for name, value in values.items() if is_constant(value)})

    def to_json(self) -> dict[str, Any]:
        """Return plain values; see docs/bundle.md."""
        return {"arguments": list(self.arguments), "constants": dict(self.constants)}

    @classmethod
    def from_json(cls, table: Fields) -> CallManifest:
        """Parse the result of `to_json`. Raises the table's error for fields that are missing or do not fit."""
        constants = table.fields("constants")
        values: dict[str, Any] = dict(constants.table)
        for name, value in values.items():
            if not is_constant(value):
                raise constants.refuse("a number, a text, a truth value or null", name, value)
        return cls(table.texts("arguments"), values)


def is_constant(value: Any) -> bool:
    """Whether a bundle can store the value of an argument."""
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
