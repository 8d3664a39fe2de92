"""Callable saved bundles: `dr.load("model.dist")(x)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from distir_relax.bundle import Bundle, ReadOptions, read_bundle
from distir_relax.runtime.call_arguments import bind_arguments, list_tensors, result_names
from distir_relax.runtime.microbatch_io import user_inputs, user_outputs
from distir_relax.runtime.session_cache import Sessions
from distir_relax.serving.session_generator import SessionGenerator
from distir_relax.support.units import count


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
        names = result_names(manifest)
        outputs = self._sessions.run(bind_arguments(manifest, args, kwargs), backend, timeout, names)
        return next(iter(outputs.values())) if len(names) == 1 else outputs

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        programs = count(len(manifest.programs), "distinct program")
        encoder = [] if manifest.encoder is None else [manifest.encoder.input]
        return "\n".join(
            [
                f"{manifest.name}: {count(manifest.mesh.size, 'rank')} on {manifest.mesh}, {programs}",
                f"  from     {self.bundle.path}",
                f"  inputs   {list_tensors([*encoder, *user_inputs(manifest)])}",
                f"  outputs  {list_tensors(user_outputs(manifest))}",
                f"  weights  {count(len(manifest.weights), 'tensor')}",
            ]
        )


def load(path: str | Path, **options: Unpack[ReadOptions]) -> Loaded:
    """Load a bundle saved with `plan.save` or `distir compile` as a callable.

    Options are those of `ReadOptions`. `weights` is a folder of safetensors files, or one file, whose tensors take the
    place of the model's weights: they have the same names and shapes. A bundle is data: nothing in it is executed,
    unless you `trust_code`: its torch modules, which may be edited. `require_signature` is the file of a public key: a
    bundle that this key has not signed (``distir sign``) is refused before anything in it is used, and so is one with
    an edited file.

    Raises `BundleError` when there is no bundle at `path`, or a damaged one, and for `weights` that do not fit it;
    `SignatureError` without the signature that is required.
    """
    return Loaded(read_bundle(Path(path), **options))
