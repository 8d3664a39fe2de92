"""Sizes of a call: values of a program's symbols, from the shapes of its inputs, and the manifest for these values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from distir_relax.bundle import Manifest
from distir_relax.errors import RunError
from distir_relax.layout import multiple_of_symbol
from distir_relax.runtime.microbatch_io import user_inputs

if TYPE_CHECKING:
    from distir_relax.runtime.arrays import Array

NO_SIZES: Mapping[str, int] = MappingProxyType({})
_MAX_CALLS = 256
"""Maximum number of manifests that are kept."""


@dataclass(frozen=True)
class Call:
    """The values of the symbols in one call by name, and the manifest, in which all sizes are numbers."""

    manifest: Manifest
    sizes: Mapping[str, int]


class CallShapes:
    """The calls of one program by their sizes; those of the last ones are kept."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._calls: OrderedDict[tuple[int, ...], Call] = OrderedDict()
        parts = [*manifest.inputs, *user_inputs(manifest)] if manifest.symbols else []
        self._places = {
            tensor.name: [(dim, *found) for dim, n in enumerate(tensor.shape) if (found := multiple_of_symbol(n))]
            for tensor in parts
        }
        self._ranks = {tensor.name: len(tensor.shape) for tensor in parts}

    def of(
        self, inputs: Mapping[str, Array], past: int = 0, last: int = 1, encoded: Mapping[str, int] = NO_SIZES
    ) -> Call:
        """Return the call of these inputs by name: the user's, or those of microbatches.

        For a program that continues a sequence, `past` is the number of earlier positions, and `last` that of positions
        with outputs, if the program has such a size. `encoded` are the sizes of the encoder's input, by symbol.

        Raises RunError for a size out of the bounds of its symbol, for two sizes of one symbol, and if a guard of the
        program does not hold. Missing inputs, and other dims, are for `check_inputs`.
        """
        if not self._manifest.symbols:
            return Call(self._manifest, {})
        chosen = {"past": past, "last": last, **encoded} if self._manifest.states else {}
        symbols = {symbol.name for symbol in self._manifest.symbols}
        return self.at(self._values(inputs, {name: size for name, size in chosen.items() if name in symbols}))

    def at(self, values: Mapping[str, int]) -> Call:
        """Return the call of these values of all symbols. Raises RunError if a guard does not hold."""
        key = tuple(values[symbol.name] for symbol in self._manifest.symbols)
        if key not in self._calls:
            for guard in self._manifest.guards:
                if not guard.is_met(values):
                    raise RunError(
                        f"expected {guard}, found {', '.join(f'{s} = {values[s.name]}' for s in guard.symbols)}",
                        guard.location,
                        "compile with an example of these sizes",
                    )
            self._calls[key] = Call(self._manifest.at(values), values)
            if len(self._calls) > _MAX_CALLS:
                self._calls.popitem(last=False)
        self._calls.move_to_end(key)
        return self._calls[key]

    def _values(self, inputs: Mapping[str, Array], known: Mapping[str, int]) -> dict[str, int]:
        values = dict(known)
        found_at: dict[str, str] = {}
        for name, places in self._places.items():
            shape = tuple(getattr(inputs.get(name), "shape", ()))
            if len(shape) != self._ranks[name]:
                continue
            for dim, symbol, factor in places:
                size, where = int(shape[dim]), f"dim {dim} of input {name!r}"
                if size % factor:
                    raise RunError(f"expected a multiple of {factor}, found {size}", where)
                size //= factor
                if not symbol.contains(size):
                    raise RunError(f"expected {symbol} of {symbol.range}, found {size}", where)
                if values.setdefault(symbol.name, size) != size:
                    first = found_at.get(symbol.name, "the input of the encoder")
                    raise RunError(f"{symbol} is {values[symbol.name]} in {first}, found {size}", where)
                found_at.setdefault(symbol.name, where)
        for symbol in self._manifest.symbols:
            if symbol.name not in values:
                sized = [name for name, places in self._places.items() if any(s == symbol for _, s, _ in places)]
                raise RunError(
                    f"expected an input with {symbol}, such as {sized[0] if sized else 'none'!r}, found "
                    f"{', '.join(f'{n} {tuple(x.shape)}' for n, x in inputs.items() if hasattr(x, 'shape')) or 'none'}"
                )
        return values
