"""Weights of a model folder as deferred tensors, which transformers loads in place of the data.

transformers renames, casts, stacks and ties them as it does data. So a parameter that is one tensor of a file is known
as such, and one that transformers computes, such as fused experts, is computed when it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import FileTensor, FileWeights, model_files
from distir_relax.errors import BundleError, ImportModelError

if TYPE_CHECKING:
    import torch

_AGAIN = "download or save the model again"


def deferred_weights(folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a folder's safetensors files by name, none of which is read; None without such files.

    Raises ImportModelError for a damaged file, and for an index that names other files.
    """
    try:
        files = [FileWeights(path, (), hint=_AGAIN) for path in model_files(folder)]
    except BundleError as wrong:
        raise ImportModelError(wrong.message, wrong.where, wrong.hint) from None
    return {key: FileTensor.deferred(file, key) for file in files for key in file.kinds} or None


def replace_buffers(model: Any) -> None:
    """Replace the deferred buffers of a model: floats become parameters, so that a bundle can take others, and numbers
    of other dtypes are read, since constants that depend on them are computed during import."""
    import torch

    from distir_relax.support.deferred_tensor import DeferredTensor

    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if not isinstance(buffer, DeferredTensor):
                continue
            if buffer.is_floating_point():
                del module._buffers[name]
                module.register_parameter(name, torch.nn.Parameter(buffer, requires_grad=False))
            else:
                module._buffers[name] = buffer.read()
