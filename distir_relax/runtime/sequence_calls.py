"""Calls of a bundle: of its program, and before the first call for a sequence, of its encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle
from distir_relax.runtime.call_shapes import Call, CallShapes
from distir_relax.runtime.microbatch_io import in_parts

if TYPE_CHECKING:
    from distir_relax.runtime.arrays import Array


@dataclass(frozen=True)
class PreparedCall:
    """A call with its inputs by name, checked, in microbatches."""

    call: Call
    inputs: Mapping[str, Array]


class SequenceCalls:
    """The calls of a bundle. Those for a sequence after the first one have the sizes of the encoder's input of that."""

    def __init__(self, bundle: Bundle) -> None:
        self._calls = CallShapes(bundle.manifest)
        self._encoder = None if bundle.encoder is None else CallShapes(bundle.encoder.manifest)
        self._encoder_inputs = {tensor.name for tensor in bundle.encoder.manifest.inputs} if bundle.encoder else set()
        self._encoded: Mapping[str, int] = {}

    def of(self, inputs: Mapping[str, Array], past: int = 0) -> tuple[PreparedCall | None, PreparedCall]:
        """Return the call of the encoder, if there is one and `past` is 0, and that of the program.

        Raises RunError for inputs that are missing, unknown, or of other types or sizes.
        """
        encoding, encoded = None, self._encoded
        if self._encoder is not None and not past:
            encoding = _prepared(self._encoder, {n: x for n, x in inputs.items() if n in self._encoder_inputs})
            inputs = {n: x for n, x in inputs.items() if n not in self._encoder_inputs}
            encoded = encoding.call.sizes
        call = self._calls.of(inputs, past, encoded=encoded)
        prepared = PreparedCall(call, in_parts(call.manifest, inputs))
        self._encoded = encoded
        return encoding, prepared


def _prepared(calls: CallShapes, inputs: Mapping[str, Array]) -> PreparedCall:
    call = calls.of(inputs)
    return PreparedCall(call, in_parts(call.manifest, inputs))
