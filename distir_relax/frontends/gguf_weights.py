"""Weights of a GGUF file as deferred tensors, converted one after the other to a temporary safetensors file.

Quantized numbers take long to convert, so a weight is converted once, not when an op needs it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import FileTensor, FileWeights, StoredGroups, Tensor, save_weights
from distir_relax.frontends.gguf_groups import GROUP_BITS, read_groups
from distir_relax.layout import Interval

if TYPE_CHECKING:
    import torch


class _Converter:
    """Conversion of the tensors of a file by transformers: a `WeightSource` of whole tensors."""

    def __init__(self, library: Any, path: Path, model: Any) -> None:
        from gguf import GGUFReader

        reader: Any = GGUFReader(path)
        architecture = library.read_field(reader, "general.architecture")[0]
        self._parsed = {**library.load_gguf_checkpoint(path), "tensors": {}}
        processor = library.TENSOR_PROCESSORS.get(architecture, library.TensorProcessor)
        self._processor = processor(config=self._parsed["config"])
        self._names = library.get_gguf_hf_weights_map(model, self._processor)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._stored: dict[str, str] = {}

    def shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Return the shape of each weight by the model's name, or None if one is made from several tensors."""
        import numpy as np

        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._tensors.items():
            zeros = np.broadcast_to(np.float32(0), tuple(int(n) for n in reversed(tensor.shape)))
            with np.errstate(divide="ignore"):
                renamed, data = self._processed(name, zeros)
            if self._parsed["tensors"] or renamed is None or self._names.get(renamed) in shapes:
                return None
            if renamed in self._names:
                shapes[self._names[renamed]] = data.shape
                self._stored[self._names[renamed]] = name
        return shapes

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """Return the weight of the model's name; `intervals` are those of all of it."""
        import numpy as np
        import torch
        from gguf import dequantize

        tensor = self._tensors[self._stored[name]]
        _, data = self._processed(tensor.name, dequantize(tensor.data, tensor.tensor_type))
        return torch.from_numpy(np.require(data, np.float32, ["C", "W"]))

    def groups(self, name: str) -> StoredGroups | None:
        """Return the weight of the model's name as the file has it, if it is a matrix in groups of numbers.

        The model may have its rows in another order.
        """
        import numpy as np

        tensor = self._tensors[self._stored[name]]
        kind, shape = tensor.tensor_type.name, [int(n) for n in reversed(tensor.shape)]
        if kind not in GROUP_BITS or len(shape) != 2:
            return None
        numbers = np.broadcast_to(np.arange(shape[0], dtype=np.float32)[:, None], shape)
        _, order = self._processed(tensor.name, numbers)
        if list(order.shape) != shape or not (order == order[:, :1]).all():
            return None
        rows = order[:, 0].astype(np.int64)
        return StoredGroups(GROUP_BITS[kind], lambda: read_groups(kind, tensor.data[rows]))

    def _processed(self, name: str, data: Any) -> tuple[str | None, Any]:
        result = self._processor.process(
            weights=data, name=name, tensor_key_mapping=self._names, parsed_parameters=self._parsed
        )
        return result.name, result.weights


def deferred_gguf_weights(path: Path, model: Any) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a GGUF file in float32, by the names that `model`, on the meta device, has for them.

    None if transformers makes a weight of the model from several tensors of the file. The temporary file has no name
    any more, and goes with the last of its tensors.
    """
    try:
        from transformers import modeling_gguf_pytorch_utils as library

        converter = _Converter(library, path, model)
    except (ImportError, NotImplementedError, ValueError):
        # transformers may read this architecture in another way.
        return None
    shapes = converter.shapes()
    if shapes is None:
        return None
    with tempfile.TemporaryDirectory(prefix="distir-") as folder:
        file = Path(folder) / "weights.safetensors"
        save_weights(file, [Tensor(name, "float32", shape) for name, shape in shapes.items()], converter)
        opened = FileWeights(file, ())
    return {name: FileTensor.deferred(opened, name, True, partial(converter.groups, name)) for name in shapes}
