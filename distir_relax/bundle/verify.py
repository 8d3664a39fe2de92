"""Verification of a bundle's files against its manifest, and signing of bundles that pass it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from distir_relax.bundle.bundle import Bundle
from distir_relax.bundle.read import read_contents, read_manifest
from distir_relax.bundle.signature import SIGNATURE_FILE, PrivateKey, PublicKey, Signature
from distir_relax.bundle.write import ENCODER_FOLDER, EVALUATION_FOLDER, MANIFEST_FILE
from distir_relax.errors import BundleError
from distir_relax.support import shown_path
from distir_relax.support.units import listed


@dataclass(frozen=True)
class VerifiedBundle:
    """A bundle all of whose files are the manifest's: `files` in its folder, without the signature, of `size` bytes.

    `signature` is that of the folder, if any, which is `checked` if a key was given.
    """

    bundle: Bundle
    files: int
    size: int
    signature: Signature | None
    checked: bool


def verify_bundle(path: str | Path, key: str | Path | None = None) -> VerifiedBundle:
    """Hash all files of a bundle, and those of weights that it refers to, and check its signature.

    `key` is the file of the public key that has signed it. Raises BundleError for files that are missing, damaged, or
    not in the manifest; SignatureError as `read_bundle` does, and for a damaged signature.
    """
    folder = Path(path)
    public = None if key is None else PublicKey.read(key)
    content = read_manifest(folder)
    if public is not None:
        signature: Signature | None = public.check(content, folder)
    else:
        signature = Signature.read(folder) if os.path.lexists(folder / SIGNATURE_FILE) else None
    bundle, names = _verify_files(folder, content)
    size = sum((folder / name).stat().st_size for name in names)
    return VerifiedBundle(bundle, len(names), size, signature, public is not None)


def sign_bundle(path: str | Path, key: PrivateKey) -> Signature:
    """Write the signature of a bundle to its folder, in place of one that it has, and return it.

    Raises BundleError unless its files are the manifest's, as `verify_bundle` does, and `DistIRError` if the signature
    cannot be written.
    """
    folder = Path(path)
    content = read_manifest(folder)
    _verify_files(folder, content)
    signature = key.sign(content)
    signature.write(folder)
    return signature


def _verify_files(folder: Path, manifest: bytes) -> tuple[Bundle, frozenset[str]]:
    """Return a bundle that was read from its manifest on, and the names of its files. Raises BundleError for others."""
    bundle = read_contents(folder, manifest)
    names = frozenset(_files(bundle))
    if others := _others(folder, names | {SIGNATURE_FILE}):
        raise BundleError(
            f"expected the files of the manifest, found also {listed(others, 3)}", shown_path(folder),
            "move them to another place: a bundle runs without them",
        )  # fmt: skip
    return bundle, names


def _files(bundle: Bundle, prefix: str = "") -> list[str]:
    """Return the names of the files of a bundle, and of those within it."""
    names = [f"{prefix}{name}" for name in (MANIFEST_FILE, *bundle.manifest.checksums)]
    for folder, part in ((ENCODER_FOLDER, bundle.encoder), (EVALUATION_FOLDER, bundle.evaluation)):
        if part is not None:
            names += _files(part, f"{prefix}{folder}/")
    return names


def _others(folder: Path, names: frozenset[str]) -> list[str]:
    """Return what a folder has besides these files, and the folders that they are in."""
    folders = {str(parent) for name in names for parent in Path(name).parents}

    def refuse(error: OSError) -> None:
        raise BundleError(f"cannot be read: {error.strerror}", shown_path(error.filename)) from None

    found = []
    for place, inside, files in os.walk(folder, onerror=refuse):
        relative = Path(place).relative_to(folder)
        found += [str(relative / name) for name in inside if str(relative / name) not in folders]
        found += [str(relative / name) for name in files if str(relative / name) not in names]
        # What an unexpected folder has is named by the folder.
        inside[:] = [name for name in inside if str(relative / name) in folders]
    return sorted(shown_path(name) for name in found)
