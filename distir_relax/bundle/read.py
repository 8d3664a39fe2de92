"""Reader of bundles: detects missing and damaged files and other format versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from distir_relax.bundle.bundle import Bundle, shared_weights
from distir_relax.bundle.manifest import Manifest, Tensor
from distir_relax.bundle.signature import PublicKey
from distir_relax.bundle.weight_files import StoredWeights, open_weights
from distir_relax.bundle.weights import WEIGHTS_FILE, SharedWeights, WeightSource
from distir_relax.bundle.write import ENCODER_FOLDER, EVALUATION_FOLDER, MANIFEST_FILE, manifest_checksum
from distir_relax.errors import BundleError
from distir_relax.support import file_within, parse_json, read_bytes

_ENCODER = f"{ENCODER_FOLDER}/{MANIFEST_FILE}"
_EVALUATION = f"{EVALUATION_FOLDER}/{MANIFEST_FILE}"
_AGAIN = "compile the model again, or copy the whole bundle again"
_TRUST = "to run a program that you have edited, pass --trust-code"


class ReadOptions(TypedDict, total=False):
    """How a bundle is read: keyword arguments of `read_bundle`, `dr.load`, `dr.launch` and `dr.bisect`.

    `weights` is a folder of safetensors files, or one file, whose tensors take the place of the model's own. With
    `trust_code` ranks run the bundle's torch modules, which may be edited: without it nothing in a bundle is executed.
    `require_signature` is the file of a public key: nothing of the bundle is used but its manifest and signature before
    that is found to be one by the key, and torch modules may not be edited then.
    """

    weights: str | Path | None
    trust_code: bool
    require_signature: str | Path | None


@dataclass(frozen=True)
class _Options:
    """How a bundle is read, see `ReadOptions`; `key` is the file of the public key that has signed it."""

    weights: str | Path | None = None
    trust_code: bool = False
    key: Path | None = None


def read_bundle(path: str | Path, verify_weights: bool = True, **options: Unpack[ReadOptions]) -> Bundle:
    """Read the bundle at the folder `path`. Weights are opened, and read when a rank requests its slices.

    The checksums of the manifest and all texts are always checked, and the weights' header and size;
    `verify_weights` also hashes the whole weights files (some 1 to 2 GB/s), which one process per node does.
    Raises BundleError when a file is missing, truncated, damaged, or of another format version, and when `weights`
    lacks one of the model's, or has it in another shape or dtype; SignatureError for a key that cannot be read, and
    for a bundle that it has not signed.
    """
    return BundleFile(path, **options).read(verify_weights)


@dataclass(frozen=True)
class BundleFile:
    """A saved bundle, and how it is read (`ReadOptions`)."""

    path: str | Path
    weights: str | Path | None = None
    trust_code: bool = False
    require_signature: str | Path | None = None

    def read(self, verify_weights: bool = True) -> Bundle:
        """Read the bundle. Raises as `read_bundle` does."""
        key = None if self.require_signature is None else PublicKey.read(self.require_signature)
        folder = Path(self.path)
        content = read_manifest(folder)
        if key is not None:
            key.check(content, folder)
        bundle = _read(
            folder, content, _Options(self.weights, self.trust_code, None if key is None else key.path.absolute())
        )
        if verify_weights:
            check_weights(bundle)
        return bundle


def read_contents(path: str | Path, manifest: bytes) -> Bundle:
    """Read a bundle as `read_bundle` does, from the bytes of its manifest that `read_manifest` has returned.

    The weights are hashed. Raises BundleError as `read_bundle` does.
    """
    bundle = _read(Path(path), manifest, _Options())
    check_weights(bundle)
    return bundle


def read_manifest(folder: Path) -> bytes:
    """Return the bytes of a bundle's manifest. Raises BundleError if there is no bundle."""
    if not folder.exists():
        raise BundleError("there is no such bundle", str(folder), "write one with distir compile ... -o OUT")
    if not folder.is_dir():
        raise BundleError("not a bundle: expected a folder", str(folder))
    missing = f"not a bundle: there is no {MANIFEST_FILE} in it"
    if (folder / "config.json").is_file() and not (folder / MANIFEST_FILE).exists():
        raise BundleError(missing, str(folder), "compile the model: distir compile MODEL --generate -o OUT")
    return read_bytes(file_within(folder, MANIFEST_FILE, BundleError, missing), BundleError)


def _read(folder: Path, content: bytes, options: _Options, step: tuple[Manifest, WeightSource] | None = None) -> Bundle:
    """Read a bundle from its manifest on; if it is the evaluation of a training `step`, with the weights that are
    shared with that."""
    manifest = _parse_manifest(content, folder / MANIFEST_FILE)
    programs = frozenset(manifest.program_files)
    texts = {
        name: _read_text(folder, name, manifest, options).decode("utf-8")
        for name in manifest.checksums
        if _is_text(name)
    }
    file = file_within(folder, WEIGHTS_FILE, BundleError, "the weights are missing")
    other = None if options.weights is None else Path(options.weights)
    checksum = manifest.checksums.get(WEIGHTS_FILE, "")
    shared = frozenset[str]() if step is None else shared_weights(manifest, step[0])
    stored = [tensor for tensor in manifest.weights if tensor.name not in shared]
    own = open_weights(file, checksum, stored, manifest.weight_files, manifest.parameters, other)
    opened = own if step is None else SharedWeights(own, step[1], shared)
    encoder = evaluation = None
    if manifest.encoder is not None:
        encoder = _read(folder / ENCODER_FOLDER, _read_text(folder, _ENCODER, manifest, options), options)
    if manifest.training is not None and manifest.training.evaluated:
        inner = _read_text(folder, _EVALUATION, manifest, options)
        evaluation = _read(folder / EVALUATION_FOLDER, inner, options, (manifest, opened))
    return Bundle(
        manifest=manifest,
        programs={name: text for name, text in texts.items() if name in programs},
        weights=opened,
        texts={name: text for name, text in texts.items() if name not in programs},
        path=folder,
        encoder=encoder,
        evaluation=evaluation,
        trusted=options.trust_code,
        key=options.key,
    )


def check_weights(bundle: Bundle) -> None:
    """Hash the whole weights files of a bundle that was read from disk. Raises BundleError when one was damaged."""
    for _, stored, _ in stored_parts(bundle):
        stored.check()


def weights_identity(bundle: Bundle) -> tuple[int, ...]:
    """Return the identity of the weights files of a bundle, as `StoredWeights.identity`; empty without files."""
    return tuple(number for _, stored, _ in stored_parts(bundle) for number in stored.identity)


def stored_parts(bundle: Bundle) -> Iterator[tuple[Bundle, StoredWeights, Sequence[Tensor]]]:
    """Iterate over a bundle, its encoder and its evaluation: the weights in files of each, and their tensors."""
    own = bundle.weights.own if isinstance(bundle.weights, SharedWeights) else bundle.weights
    if isinstance(own, StoredWeights):
        yield bundle, own, bundle.manifest.weights
    if bundle.encoder is not None:
        yield from stored_parts(bundle.encoder)
    if (evaluation := bundle.evaluation) is not None:
        shared = shared_weights(evaluation.manifest, bundle.manifest)
        for part, stored, tensors in stored_parts(evaluation):
            yield part, stored, [tensor for tensor in tensors if tensor.name not in shared]


def other_checksums(bundle: Bundle) -> list[str]:
    """Hash the files of the weights that take the place of a bundle's own; as many as there are files."""
    return [checksum for _, stored, _ in stored_parts(bundle) for checksum in stored.other_checksums()]


def other_weights(bundle: Bundle) -> str | None:
    """Return the absolute path of the weights that take the place of a bundle's own, if any."""
    path = bundle.weights.path if isinstance(bundle.weights, StoredWeights) else None
    return None if path is None else str(path.absolute())


def file_of(bundle: Bundle) -> BundleFile:
    """Return what another process reads for a bundle that was read from a folder, by absolute names alone."""
    assert bundle.path is not None, "a bundle in memory is in no file"
    key = None if bundle.key is None else str(bundle.key)
    return BundleFile(str(bundle.path.absolute()), other_weights(bundle), bundle.trusted, key)


def _parse_manifest(content: bytes, file: Path) -> Manifest:
    try:
        data = parse_json(content, BundleError, str(file))
    except BundleError as wrong:
        raise BundleError(f"damaged or half-written: {wrong.message}", wrong.where, _AGAIN) from None
    try:
        manifest = Manifest.from_json(data)
    except BundleError as wrong:
        place = f"{file} ({wrong.where})" if wrong.where else str(file)
        raise BundleError(wrong.message, place, wrong.hint or _AGAIN) from None
    if manifest.checksums.get(MANIFEST_FILE) != manifest_checksum(manifest):
        raise BundleError("damaged: it does not have the checksum that it names", str(file), _AGAIN)
    return manifest


def _read_text(folder: Path, name: str, manifest: Manifest, options: _Options) -> bytes:
    """Return the bytes of a text in UTF-8. Raises BundleError if it is none, or not the manifest's."""
    file = file_within(folder, name, BundleError, "missing from the bundle")
    content = read_bytes(file, BundleError)
    if hashlib.sha256(content).hexdigest() != manifest.checksums.get(name):
        # A signature is one of the programs as they were compiled.
        is_editable = name in manifest.program_files and options.key is None
        if not (is_editable and options.trust_code):
            hint = _TRUST if is_editable else _AGAIN
            raise BundleError("damaged: its checksum is not the manifest's", str(file), hint)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as wrong:
        raise BundleError(f"not UTF-8 text at byte {wrong.start}", str(file), _AGAIN) from None
    return content


def _is_text(name: str) -> bool:
    return name not in (MANIFEST_FILE, WEIGHTS_FILE, _ENCODER, _EVALUATION)
