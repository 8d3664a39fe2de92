"""Provenance of a bundle as text and as JSON: model, source files of weights, and versions of software."""

from __future__ import annotations

from typing import Any

from distir_relax.bundle import Manifest


def provenance_lines(manifest: Manifest) -> list[str]:
    """Return a line for the model, one for each source file of weights, and one for all versions."""
    plain = provenance_json(manifest)
    model, checksum = plain["model"], plain["model_checksum"]
    lines = [] if model is None else [f"model    {model}{'' if checksum is None else f', sha256 {checksum}'}"]
    lines += [f"weights  {file['name']}, sha256 {file['checksum']}" for file in plain["checkpoints"]]
    versions = ", ".join(f"{name} {version}" for name, version in plain["versions"].items())
    return [*lines, f"made by  {versions}"] if versions else lines


def provenance_json(manifest: Manifest) -> dict[str, Any]:
    """Return plain values; the weight files that the bundle refers to are among its checkpoints, with their paths."""
    known = manifest.provenance
    files = [(file.path, file.checksum) for file in manifest.weight_files]
    files += [(file.name, file.checksum) for file in known.checkpoints]
    return {
        "model": known.model,
        "model_checksum": known.model_checksum,
        "checkpoints": [{"name": name, "checksum": checksum} for name, checksum in files],
        "versions": dict(known.versions),
    }
