"""Writing a bundle: to a temporary folder beside its target, renamed when complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from distir_relax.bundle.bundle import Bundle
from distir_relax.bundle.format import Manifest
from distir_relax.bundle.weights import WEIGHTS_FILE, save_weights
from distir_relax.errors import BundleError

MANIFEST_FILE = "manifest.json"


def write_bundle(bundle: Bundle, path: str | Path, overwrite: bool = False) -> Path:
    """Write `bundle` to the folder `path` and return it.

    Raises BundleError when `path` exists and `overwrite` is off, when it exists and is not a bundle
    (which is never deleted), or when it cannot be written. Nothing is left behind on failure.
    """
    target = Path(path)
    _check_target(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as wrong:
        raise BundleError(f"cannot write here: {wrong.strerror}", str(target)) from None
    try:
        _fill(bundle, temporary)
        _check_target(target, overwrite)
        _replace(temporary, target)
    except OSError as wrong:
        raise BundleError(f"cannot write the bundle: {wrong}", str(target)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def file_checksum(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_checksum(manifest: Manifest) -> str:
    """The SHA-256 of the manifest as canonical JSON without its own checksum."""
    others = {name: value for name, value in manifest.checksums.items() if name != MANIFEST_FILE}
    plain = replace(manifest, checksums=others).to_json()
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not (target / MANIFEST_FILE).is_file():
        raise BundleError("something that is not a bundle is in the way", str(target), "choose another name")
    if not overwrite:
        raise BundleError("a bundle of this name exists", str(target), "choose another name, or ask to overwrite it")


def _fill(bundle: Bundle, folder: Path) -> None:
    checksums = {}
    for name, text in {**bundle.programs, **bundle.texts}.items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise BundleError(f"the file {name!r} would lie outside the bundle")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        checksums[name] = file_checksum(file)
    save_weights(folder / WEIGHTS_FILE, bundle.manifest.weights, bundle.weights)
    checksums[WEIGHTS_FILE] = file_checksum(folder / WEIGHTS_FILE)
    manifest = replace(bundle.manifest, checksums=checksums)
    manifest = replace(manifest, checksums={**checksums, MANIFEST_FILE: manifest_checksum(manifest)})
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest.to_json(), indent=1), encoding="utf-8")
    # mkdtemp makes the folder private to its owner; a bundle is as readable as its files.
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)


def _replace(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    # A folder cannot be renamed over a full one: the old one steps aside first, and is back if the second rename fails.
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)) / "old"
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)
