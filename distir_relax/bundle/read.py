"""Reading a bundle, and noticing what is missing, damaged or of another version."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from distir_relax.bundle.bundle import TEXT_FILES, Bundle
from distir_relax.bundle.format import Manifest
from distir_relax.bundle.weights import WEIGHTS_FILE, FileWeights
from distir_relax.bundle.write import MANIFEST_FILE, file_checksum, manifest_checksum
from distir_relax.errors import BundleError

_AGAIN = "compile the model again, or copy the whole bundle again"


def read_bundle(path: str | Path, verify_weights: bool = True) -> Bundle:
    """Read the bundle at the folder `path`. Weights are opened, and read when a rank asks for its slices.

    The manifest and all texts are always checked against their checksums, and the weights against
    their header and size; `verify_weights` also hashes the whole weights file (some 1 to 2 GB/s), which
    one process per node does.
    Raises BundleError when a file is missing, truncated, damaged, or of another format version.
    """
    folder = Path(path)
    if not folder.exists():
        raise BundleError("there is no such bundle", str(folder), "write one with distir compile ... -o OUT")
    manifest = _read_manifest(folder)
    texts = {name: _read_text(folder, name, manifest) for name in manifest.checksums if _is_text(name)}
    weights = FileWeights(folder / WEIGHTS_FILE, manifest.weights)
    bundle = Bundle(
        manifest=manifest,
        programs={name: text for name, text in texts.items() if name not in TEXT_FILES},
        weights=weights,
        texts={name: text for name, text in texts.items() if name in TEXT_FILES},
        path=folder,
    )
    if verify_weights:
        check_weights(bundle)
    return bundle


def check_weights(bundle: Bundle) -> None:
    """Hash the whole weights file of a bundle that was read from disk. Raises BundleError when it was damaged."""
    if bundle.path is None:
        return
    file = bundle.path / WEIGHTS_FILE
    if file_checksum(file) != bundle.manifest.checksums.get(WEIGHTS_FILE):
        raise BundleError("the weights are damaged: their checksum is not the manifest's", str(file), _AGAIN)


def _read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"not a bundle: there is no {MANIFEST_FILE} in it", str(folder)) from None
    except OSError as wrong:
        raise BundleError(f"cannot be read: {wrong.strerror}", str(file)) from None
    except ValueError as wrong:
        raise BundleError(f"damaged or half-written: {wrong}", str(file), _AGAIN) from None
    try:
        manifest = Manifest.from_json(data)
    except BundleError as wrong:
        place = f"{file} ({wrong.where})" if wrong.where else str(file)
        raise BundleError(wrong.message, place, wrong.hint or _AGAIN) from None
    if manifest.checksums.get(MANIFEST_FILE) != manifest_checksum(manifest):
        raise BundleError("damaged: it does not have the checksum that it names", str(file), _AGAIN)
    return manifest


def _read_text(folder: Path, name: str, manifest: Manifest) -> str:
    file = folder / name
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise BundleError("missing from the bundle", str(file), _AGAIN) from None
    except OSError as wrong:
        raise BundleError(f"cannot be read: {wrong.strerror}", str(file)) from None
    if hashlib.sha256(content).hexdigest() != manifest.checksums[name]:
        raise BundleError("damaged: its checksum is not the manifest's", str(file), _AGAIN)
    return content.decode("utf-8")


def _is_text(name: str) -> bool:
    return name not in (MANIFEST_FILE, WEIGHTS_FILE)
