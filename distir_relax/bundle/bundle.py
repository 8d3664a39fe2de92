"""In-memory bundle: the compiler's result, the contents of the folder, and the input of the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distir_relax.bundle.call_signature import CallManifest
from distir_relax.bundle.manifest import Encoder, Manifest
from distir_relax.bundle.provenance import SourceFile
from distir_relax.bundle.training_manifest import TrainingManifest
from distir_relax.bundle.weights import WeightSource
from distir_relax.errors import BundleError

RECORDS_FILE = "records.json"
STAGE_FILES = {"global": "model.txt", "sharded": "sharded.txt", "distributed": "distir.txt", "ranked": "ranked.txt"}
SEARCH_FILES = ("global.txt", "machine.toml", "search.json")
"""Files of an autosharded bundle: the program before autosharding, the machine, and the query."""


@dataclass(frozen=True, repr=False)
class Bundle:
    """A compiled plan with everything that ranks need to run it.

    `programs` maps the manifest's paths to torch modules, `texts` other file names to texts: those of the stages
    (`model.txt`, `sharded.txt`, `distir.txt`, `ranked.txt`), of pass results (`records.json`), of a tokenizer
    (`tokenizer.json`). `path` is the folder the bundle was read from, if any; ranks run modules generated from
    `ranked.txt`, and the torch modules themselves only if they are `trusted`, or made by this process. `encoder` is the
    bundle whose outputs are states of this one: its ranks run it once for each sequence. `evaluation` is that of a
    training step: it computes the loss and metrics from the weights that the step changes, which have the same layouts.
    `source_files` are those that weights came from, which the manifest names once the bundle is written. `key` is the
    file of the public key that the bundle's signature was checked with, if any. Raises BundleError when a program of
    the manifest has no text, and when two bundles do not fit.
    """

    manifest: Manifest
    programs: Mapping[str, str]
    weights: WeightSource
    texts: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None
    encoder: Bundle | None = None
    evaluation: Bundle | None = None
    trusted: bool = False
    key: Path | None = None
    source_files: Sequence[SourceFile] = ()

    def __repr__(self) -> str:
        return f"<bundle{f' {self.path}' if self.path is not None else ''}: {self.manifest!r}>"

    def __post_init__(self) -> None:
        for path in self.manifest.program_files:
            if path not in self.programs:
                raise BundleError(f"the manifest names the program {path!r}, but the bundle does not hold it")
        if (self.encoder is None) != (self.manifest.encoder is None):
            raise BundleError("expected an encoder if the manifest names one", self.manifest.name)
        if self.encoder is not None:
            _check_encoder(self.manifest, self.encoder.manifest)
        evaluated = () if self.manifest.training is None else self.manifest.training.evaluated
        if (self.evaluation is None) != (not evaluated):
            raise BundleError("expected an evaluation if the manifest names one", self.manifest.name)
        if self.evaluation is not None:
            _check_evaluation(self.manifest, self.evaluation.manifest, evaluated)

    def for_training(self, training: TrainingManifest) -> Bundle:
        """Return the bundle as a training step. Raises BundleError for names that the manifest does not have."""
        return replace(self, manifest=replace(self.manifest, training=training))

    def called(self, call: CallManifest) -> Bundle:
        """Return the bundle with the model's call signature."""
        return replace(self, manifest=replace(self.manifest, call=call))

    def with_texts(self, texts: Mapping[str, str]) -> Bundle:
        """Return the bundle with additional texts, by file name."""
        return replace(self, texts={**self.texts, **texts})

    def with_encoder(self, encoder: Bundle, start: int) -> Bundle:
        """Return the bundle with one that computes some of its states, for a decoder that begins with a token.

        Raises BundleError if they do not fit.
        """
        (taken,) = encoder.manifest.inputs
        return replace(self, manifest=replace(self.manifest, encoder=Encoder(taken, start)), encoder=encoder)

    def with_evaluation(self, evaluation: Bundle, outputs: Sequence[str], accumulated: Sequence[str] = ()) -> Bundle:
        """Return the bundle of a training step with that of its evaluation, which has these `outputs`.

        Those `accumulated` are of all batches so far.

        Raises BundleError if they do not fit.
        """
        if self.manifest.training is None:
            raise BundleError("expected a training step", self.manifest.name)
        training = replace(self.manifest.training, evaluated=tuple(outputs), accumulated=tuple(accumulated))
        return replace(self, manifest=replace(self.manifest, training=training), evaluation=evaluation)

    def stage(self, name: str) -> str:
        """Return the program text of stage `global` (the imported model), `sharded`, `distributed` or `ranked`.

        Raises BundleError without one.
        """
        if name not in STAGE_FILES:
            raise BundleError(f"unknown stage {name!r}", hint=f"stages: {', '.join(STAGE_FILES)}")
        return self._text(STAGE_FILES[name])

    @property
    def records(self) -> str:
        """Return the pass results as JSON, for `ir.parse_records`. Raises BundleError when there is none."""
        return self._text(RECORDS_FILE)

    def _text(self, file: str) -> str:
        if file not in self.texts:
            raise BundleError(f"the bundle holds no {file}", str(self.path or self.manifest.name))
        return self.texts[file]


def shared_weights(evaluation: Manifest, step: Manifest) -> frozenset[str]:
    """Return the weights of an evaluation that are those of its training step: the ones that the step changes."""
    return frozenset(evaluation.updates) & {tensor.name for tensor in step.weights}


def _check_evaluation(step: Manifest, evaluation: Manifest, outputs: Sequence[str]) -> None:
    """Raise BundleError unless an evaluation has the weights of its step in the same layouts, and these outputs."""
    theirs = {tensor.name: tensor for tensor in step.weights}
    shared = shared_weights(evaluation, step)
    for tensor in evaluation.weights:
        if tensor.name in shared and theirs[tensor.name] != tensor:
            other = theirs[tensor.name]
            raise BundleError(
                f"expected the weight {tensor.name} as {other.dtype} {other.placement} in the evaluation, "
                f"found {tensor.dtype} {tensor.placement}", step.name)  # fmt: skip
    # Weights that the step lacks are totals over batches.
    if unknown := sorted((evaluation.updates.keys() & theirs.keys()) - set(step.updates)):
        raise BundleError(f"the evaluation has the weight {unknown[0]}, which the step does not change", step.name)
    scalars = {tensor.name for tensor in evaluation.outputs if tensor.shape == ()}
    if evaluation.mesh != step.mesh or not scalars.issuperset(outputs):
        expected = f"an evaluation on {step.mesh} with the outputs {', '.join(outputs)}"
        raise BundleError(f"expected {expected}, found {evaluation!r}", step.name)


def _check_encoder(manifest: Manifest, encoder: Manifest) -> None:
    """Raise BundleError unless the outputs of an encoder are states, placed alike, and both have the same ranks."""
    assert manifest.encoder is not None, "the manifest of a bundle with an encoder"
    has_states = bool(encoder.states) or encoder.encoder is not None
    if has_states or encoder.mesh != manifest.mesh or encoder.inputs != (manifest.encoder.input,):
        raise BundleError(
            f"expected an encoder of {manifest.encoder.input.name} on {manifest.mesh}, found {encoder!r}", manifest.name
        )
    states = {state.output: state for state in manifest.states}
    for output in encoder.outputs:
        state = states.get(output.name)
        if state is None or state.grows or replace(state.tensor, name=output.name) != output:
            raise BundleError(
                f"expected outputs of the encoder that are states, found {output.name} {output.dtype} {output.shape} "
                f"placed as {output.placement}", manifest.name)  # fmt: skip
