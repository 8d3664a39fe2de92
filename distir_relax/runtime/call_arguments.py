"""Arguments of a call of a bundle as inputs by name, by the model's call signature."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distir_relax.bundle import CallManifest, Manifest, Tensor
from distir_relax.errors import RunError
from distir_relax.runtime.microbatch_io import user_inputs, user_outputs
from distir_relax.support.units import listed


def bind_arguments(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs by name of a call with these arguments, in tuples and dicts like the model's.

    Raises RunError for an argument given twice or too many, and for one that differs from its compiled-in value.
    """
    inputs = user_inputs(manifest)
    call = manifest.call or CallManifest(tuple(tensor.name for tensor in inputs))
    if len(args) > len(call.arguments) or set(call.arguments[: len(args)]) & set(kwargs):
        raise RunError(
            f"expected each of the inputs {list_tensors(inputs)} once, "
            f"found {len(args)} by position and {', '.join(kwargs) or 'none'} by name"
        )
    leaves: dict[str, Any] = {}
    for name, value in {**dict(zip(call.arguments, args, strict=False)), **kwargs}.items():
        leaves.update(_leaves(name, value))
    return _without_constants(leaves, call, {tensor.name for tensor in inputs})


def result_names(manifest: Manifest) -> list[str]:
    """Return the names of the outputs that a call returns; new values of the model's state stay on their ranks."""
    names = [tensor.name for tensor in user_outputs(manifest)]
    return names if manifest.call is None else [name for name in names if name not in manifest.updates.values()]


def list_tensors(tensors: Sequence[Tensor]) -> str:
    """Return the names and types of up to four tensors as text."""
    return listed([f"{t.name}: {t.dtype} {t.shape}" for t in tensors], 4) or "none"


def _leaves(name: str, value: Any) -> dict[str, Any]:
    """Return the leaves of an argument by input name: ``pair_1``, ``options.mask``."""
    if isinstance(value, Mapping):
        parts = {f"{name}.{key}": item for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {f"{name}_{number}": item for number, item in enumerate(value)}
    else:
        return {name: value}
    return {leaf: item for part, inner in parts.items() for leaf, item in _leaves(part, inner).items()}


def _without_constants(leaves: Mapping[str, Any], call: CallManifest, inputs: Collection[str]) -> dict[str, Any]:
    """Return the leaves that are inputs. Raises RunError if an argument differs from its compiled-in value."""
    tensors = {}
    for name, value in leaves.items():
        if name in inputs or name not in call.constants:
            tensors[name] = value
        elif type(value) is not type(call.constants[name]) or value != call.constants[name]:
            raise RunError(
                f"the argument {name!r} was {call.constants[name]!r} when the model was compiled, found {value!r}",
                hint="compile the model again with this argument in the example",
            )
    return tensors
