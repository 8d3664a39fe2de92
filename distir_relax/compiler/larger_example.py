"""Examples of other numbers of samples than a model's own, for simulations and searches of other batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distir_relax.compiler.inputs import Model
from distir_relax.compiler.source import Source
from distir_relax.compiler.training import Training
from distir_relax.errors import DistIRError
from distir_relax.strategies.batch_dim import find_batch
from distir_relax.strategies.factor_costs import classes_of
from distir_relax.support.torch_compat import tree_leaves, tree_map

if TYPE_CHECKING:
    import torch


def repeat_example(target: Model | Training, source: Source, samples: int) -> Model | Training | None:
    """Return a torch model, imported as `source`, with its example's samples repeated up to a number of them.

    Returns None for another model, and where some input has no dim of samples alone, or is of one sample. In a training
    it is the first dim.
    """
    try:
        batch = find_batch(classes_of(source.imported.module))
    except DistIRError:
        return None
    sizes = {item.value.name: item.value.tensor.shape for item in source.imported.module.main.inputs}
    if any(sizes[name][dim] != batch.size or sizes[name][0] == 1 for name, dim in batch.dims.items()):
        return None

    def repeated(leaf: torch.Tensor, dim: int) -> torch.Tensor:
        repeats = [-(-samples // batch.size) if d == dim else 1 for d in range(leaf.dim())]
        return leaf.repeat(repeats).narrow(dim, 0, samples)

    if isinstance(target, Training):
        leaves = [leaf for leaf in tree_leaves(target.example_batch) if _is_tensor(leaf)]
        if set(batch.dims.values()) != {0} or any(leaf.shape[:1] != (batch.size,) for leaf in leaves):
            return None
        example = tree_map(lambda leaf: repeated(leaf, 0) if _is_tensor(leaf) else leaf, target.example_batch)
        return replace(target, example_batch=example)
    if not target.args and not target.kwargs:
        return None
    inputs = source.imported.flatten(target.args, target.kwargs)

    def of_call(leaf: Any) -> Any:
        for name, dim in batch.dims.items():
            # The tensors of a flattened call may be detached.
            if _is_tensor(leaf) and leaf.untyped_storage() is inputs[name].untyped_storage():
                return repeated(leaf, dim)
        return leaf

    args, kwargs = tree_map(of_call, (tuple(target.args), dict(target.kwargs)))
    return replace(target, args=args, kwargs=kwargs)


def _is_tensor(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor)
