"""Callable saved bundles: `dr.load("model.dist")(x)`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle, CallManifest, read_bundle
from distir_relax.errors import RunError
from distir_relax.runtime.generation import SessionGenerator
from distir_relax.runtime.microbatch_io import user_inputs, user_outputs
from distir_relax.runtime.session_cache import Sessions
from distir_relax.support.units import count, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distir_relax.bundle import Tensor


class Loaded(SessionGenerator):
    """A bundle that runs here, ranks as threads of this process.

    It has the model's call signature: tensors of torch or numpy, by position or by name, in tuples and dicts like the
    model's; other arguments must have the values that the model was compiled with. A program with one output returns a
    torch tensor, one with several a dict by name: a bundle does not store the structure of the model's result.

    That of `compile_generation` generates: ``loaded.generate("Once upon a time")``. Others refuse it, with `RunError`.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._sessions = Sessions(lambda backend: bundle)
        super().__init__(self._sessions.of, bundle.texts, bundle.path, bundle.manifest.name)

    def __call__(self, *args: Any, backend: str = "torch", timeout: float | None = None, **kwargs: Any) -> Any:
        """Run once; the first call of a backend loads its programs. `timeout` is as in `Session`.

        Raises `RunError` for inputs that do not match the program's, and for an unknown backend;
        `BundleError` if the bundle has no programs for it.
        """
        manifest = self.bundle.manifest
        inputs = user_inputs(manifest)
        call = manifest.call or CallManifest(tuple(tensor.name for tensor in inputs))
        if len(args) > len(call.arguments) or set(call.arguments[: len(args)]) & set(kwargs):
            raise RunError(
                f"expected each of the inputs {_listed(inputs)} once, "
                f"found {len(args)} by position and {', '.join(kwargs) or 'none'} by name"
            )
        leaves: dict[str, Any] = {}
        for name, value in {**dict(zip(call.arguments, args, strict=False)), **kwargs}.items():
            leaves.update(_leaves(name, value))
        tensors = _without_constants(leaves, call, {tensor.name for tensor in inputs})
        names = [tensor.name for tensor in user_outputs(manifest)]
        if manifest.call is not None:
            # New values of the model's state stay on their ranks.
            names = [name for name in names if name not in manifest.updates.values()]
        outputs = self._sessions.run(tensors, backend, timeout, names)
        return next(iter(outputs.values())) if len(names) == 1 else outputs

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        programs = count(len(manifest.programs), "distinct program")
        return "\n".join(
            [
                f"{manifest.name}: {count(manifest.mesh.size, 'rank')} on {manifest.mesh}, {programs}",
                f"  from     {self.bundle.path}",
                f"  inputs   {_listed(user_inputs(manifest))}",
                f"  outputs  {_listed(user_outputs(manifest))}",
                f"  weights  {count(len(manifest.weights), 'tensor')}",
            ]
        )


def load(path: str | Path) -> Loaded:
    """Load a bundle saved with `plan.save` or `distir compile` as a callable.

    Raises `BundleError` when there is none at `path`, or a damaged one.
    """
    return Loaded(read_bundle(Path(path)))


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


def _listed(tensors: Sequence[Tensor]) -> str:
    return listed([f"{t.name}: {t.dtype} {t.shape}" for t in tensors], 4) or "none"
