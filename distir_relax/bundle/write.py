"""Atomic writer of bundles: a temporary folder next to the target, renamed when complete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from distir_relax.bundle.bundle import Bundle, shared_weights
from distir_relax.bundle.manifest import Manifest, WeightFile
from distir_relax.bundle.provenance import Provenance
from distir_relax.bundle.weight_files import stored_elsewhere
from distir_relax.bundle.weights import WEIGHTS_FILE, OnWritten, save_weights
from distir_relax.errors import BundleError
from distir_relax.support import check_name, shown_path

MANIFEST_FILE = "manifest.json"
ENCODER_FOLDER = "encoder"
"""The folder of the bundle of an encoder, within that of its decoder."""
EVALUATION_FOLDER = "evaluation"
"""The folder of the bundle of an evaluation, within that of its training step."""


def write_bundle(
    bundle: Bundle, path: str | Path, overwrite: bool = False, refer: bool = False, on_written: OnWritten | None = None
) -> Path:
    """Write `bundle` to the folder `path` and return it.

    Weights that safetensors files hold as they are stay there if `refer` is on: the bundle refers to the files.
    `on_written` is called after each weight of a file.
    Raises BundleError when `path` exists and `overwrite` is off, when it exists and is not a bundle
    (which is never deleted), or when it cannot be written. Nothing is left on failure. Each of several concurrent
    writers either leaves a complete bundle, of which the last stays, or raises that one exists.
    """
    target = Path(path)
    _check_target(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as wrong:
        raise BundleError(f"cannot write here: {wrong.strerror}", str(target)) from None
    draft = folder / "new"
    try:
        draft.mkdir()
        _fill(bundle, draft, target, refer, on_written=on_written)
        _replace(draft, target, overwrite)
    except OSError as wrong:
        raise BundleError(f"cannot write the bundle: {wrong}", str(target)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_checksum(manifest: Manifest) -> str:
    """Return the SHA-256 of the manifest as canonical JSON without its own checksum."""
    others = {name: value for name, value in manifest.checksums.items() if name != MANIFEST_FILE}
    plain = replace(manifest, checksums=others).to_json()
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_target(target: Path, overwrite: bool) -> None:
    is_bundle = _is_bundle(target)
    if is_bundle is None:
        return
    if not is_bundle:
        raise BundleError("the path exists and is not a bundle", str(target), "choose another name")
    if not overwrite:
        raise BundleError("a bundle of this name exists", str(target), "choose another name, or ask to overwrite it")


def _is_bundle(target: Path) -> bool | None:
    """Whether the target is a bundle; None if nothing is there."""
    try:
        # Keep the folder open: another one may take its name meanwhile.
        folder = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False if target.is_symlink() else None
    except NotADirectoryError:
        # Also if a parent is not a folder, which creating the target reports better.
        return False if os.path.lexists(target) else None
    except (OSError, ValueError) as wrong:
        raise BundleError(f"cannot write here: {wrong}", shown_path(target)) from None
    try:
        return stat.S_ISREG(os.stat(MANIFEST_FILE, dir_fd=folder).st_mode)
    except OSError:
        # It may have been renamed and be about to be deleted.
        opened = os.fstat(folder)
    finally:
        os.close(folder)
    try:
        return False if os.path.samestat(opened, os.stat(target)) else _is_bundle(target)
    except OSError:
        return _is_bundle(target)


def _fill(
    bundle: Bundle, folder: Path, target: Path, refer: bool, shared: Collection[str] = (),
    on_written: OnWritten | None = None,
) -> None:  # fmt: skip
    """Write the files of a bundle to `folder`, which becomes `target`, without the weights that are `shared`."""
    stored = [tensor for tensor in bundle.manifest.weights if tensor.name not in shared]
    weight_files = stored_elsewhere(stored, bundle.weights, target) if refer else ()
    checksums = {}
    elsewhere = {name for file in weight_files for name in file.tensors}
    for name, text in {**bundle.programs, **bundle.texts}.items():
        check_name(name, BundleError)
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        checksums[name] = file_checksum(file)
    weights = folder / WEIGHTS_FILE
    own = [tensor for tensor in stored if tensor.name not in elsewhere]
    save_weights(weights, own, bundle.weights, on_written)
    checksums[WEIGHTS_FILE] = file_checksum(weights)
    for name, part in ((ENCODER_FOLDER, bundle.encoder), (EVALUATION_FOLDER, bundle.evaluation)):
        if part is not None:
            inner = folder / name
            inner.mkdir()
            common = shared_weights(part.manifest, bundle.manifest) if name == EVALUATION_FOLDER else ()
            _fill(part, inner, target / name, refer, common, on_written)
            checksums[f"{name}/{MANIFEST_FILE}"] = file_checksum(inner / MANIFEST_FILE)
    provenance = _provenance(bundle, weight_files, target)
    manifest = replace(bundle.manifest, checksums=checksums, weight_files=weight_files, provenance=provenance)
    manifest = replace(manifest, checksums={**checksums, MANIFEST_FILE: manifest_checksum(manifest)})
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest.to_json(), indent=1), encoding="utf-8")


def _provenance(bundle: Bundle, weight_files: Sequence[WeightFile], target: Path) -> Provenance:
    """Return the provenance of a bundle with the source files of its weights, other than `weight_files`."""
    start = os.path.realpath(target)
    referred = {os.path.normpath(os.path.join(start, file.path)) for file in weight_files}
    digests = [file.hash() for file in bundle.source_files if str(file.path) not in referred]
    known = bundle.manifest.provenance
    return replace(known, checkpoints=tuple(dict.fromkeys((*known.checkpoints, *digests))))


def _replace(draft: Path, target: Path, overwrite: bool) -> None:
    """Rename `draft` to `target`. An existing folder is renamed first, since rename fails on a non-empty one.

    Another process may do the same: then the old bundle of this one is the new bundle of the other.
    """
    for attempt in range(_MOST_ATTEMPTS):
        _check_target(target, overwrite)
        old = draft.parent / f"old{attempt}"
        if overwrite:
            with contextlib.suppress(FileNotFoundError):
                target.rename(old)
        try:
            draft.rename(target)
            return
        except OSError as wrong:
            if wrong.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                if old.exists():
                    old.rename(target)
                raise
    raise BundleError("other processes keep writing a bundle here", str(target), "choose another name")


_MOST_ATTEMPTS = 100
