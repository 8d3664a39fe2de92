"""Weights that a bundle refers to: found in files of another folder, read in slices, and missed if they changed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distir_relax.bundle import Bundle, Manifest, TensorWeights, local_intervals, read_bundle, write_bundle
from distir_relax.errors import BundleError
from tests.runtime.handmade import mlp_bundle


def made() -> tuple[Bundle, dict[str, torch.Tensor]]:
    """A bundle of two weights, which a bfloat16 holds exactly, and the weights."""
    bundle = mlp_bundle([3, 2])
    whole = {t.name: bundle.weights.read(t.name, [[(0, n)] for n in t.shape]) for t in bundle.manifest.weights}
    tensors = {name: tensor.bfloat16().float() for name, tensor in whole.items()}
    return replace(bundle, weights=TensorWeights(tensors)), tensors


def written(folder: Path, **files: dict[str, torch.Tensor]) -> tuple[Path, dict[str, torch.Tensor]]:
    """The bundle, written beside a folder `model` with these safetensors files."""
    bundle, tensors = made()
    (folder / "model").mkdir()
    for name, content in files.items():
        save_file(content, folder / "model" / f"{name}.safetensors")
    paths = sorted((folder / "model").iterdir())
    return write_bundle(bundle, folder / "bundles" / "m.dist", weight_files=paths), tensors


def check(path: Path, tensors: dict[str, torch.Tensor]) -> Manifest:
    """Compare the slices of all ranks with those of the tensors; returns the manifest."""
    bundle, expected = read_bundle(path), TensorWeights(tensors)
    for tensor in bundle.manifest.weights:
        for rank in range(bundle.manifest.mesh.size):
            pieces = local_intervals(tensor, bundle.manifest.mesh, rank)
            found = bundle.weights.read(tensor.name, pieces)
            assert found.dtype == torch.float32
            assert torch.equal(found, expected.read(tensor.name, pieces))
    return bundle.manifest


def test_weights_in_two_files_of_other_dtypes_and_names(tmp_path: Path) -> None:
    _, tensors = made()
    path, _ = written(
        tmp_path,
        a={"model.up": tensors["up"].bfloat16(), "more": torch.zeros(3)},
        b={"tied": tensors["down"], "b": torch.ones(5)},
        c={"unused": torch.ones(2)},
    )
    manifest = check(path, tensors)
    assert [(file.path, dict(file.tensors)) for file in manifest.weight_files] == [
        ("../../model/a.safetensors", {"up": "model.up"}),
        ("../../model/b.safetensors", {"down": "tied"}),
    ]
    assert load_file(path / "weights.safetensors") == {}
    # They are moved together, or reached over a link.
    shutil.move(tmp_path / "bundles", tmp_path / "moved")
    shutil.copytree(tmp_path / "model", tmp_path / "other" / "model")
    check(tmp_path / "moved" / "m.dist", tensors)
    (tmp_path / "other" / "link").symlink_to(tmp_path / "moved" / "m.dist")
    check(tmp_path / "other" / "link", tensors)
    # A bundle that is written again has a copy.
    again = write_bundle(read_bundle(tmp_path / "moved" / "m.dist"), tmp_path / "again.dist")
    assert check(again, tensors).weight_files == ()
    assert load_file(again / "weights.safetensors").keys() == {"up", "down"}


def test_weights_that_differ_are_copied(tmp_path: Path) -> None:
    _, tensors = made()
    changed = tensors["up"].clone()
    changed[0, 0] += 1
    path, _ = written(tmp_path, a={"up": changed, "down": tensors["down"].T.contiguous(), "z": tensors["up"].double()})
    assert check(path, tensors).weight_files == ()
    assert {*load_file(path / "weights.safetensors")} == {"up", "down"}


def test_files_that_are_gone_when_the_bundle_is_written(tmp_path: Path) -> None:
    bundle, tensors = made()
    path = write_bundle(bundle, tmp_path / "m.dist", weight_files=[tmp_path / "gone.safetensors"])
    assert check(path, tensors).weight_files == ()
    (tmp_path / "a.safetensors").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"a\.safetensors: the weights are damaged or half-written"):
        write_bundle(bundle, tmp_path / "other.dist", weight_files=[tmp_path / "a.safetensors"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "m.dist"]


def test_files_that_are_moved_truncated_or_changed(tmp_path: Path) -> None:
    _, tensors = made()
    path, _ = written(tmp_path, a=tensors)
    file = tmp_path / "model" / "a.safetensors"
    content = file.read_bytes()
    hint = "move the file back, or compile the model again; with --weights copy"

    def refused(message: str, verify: bool = False) -> None:
        with pytest.raises(BundleError) as error:
            read_bundle(path, verify_weights=verify)
        assert f"{file}: {message}" in str(error.value)
        assert hint in str(error.value)

    file.write_bytes(content[:-10])
    refused(f"the weights have changed: expected {len(content)} bytes, found {len(content) - 10}")
    file.write_bytes(content[:-10] + b"x" * 10)
    read_bundle(path, verify_weights=False)
    refused("the weights are damaged: their checksum is not the manifest's", True)
    save_file({"a": torch.zeros(16, 4)}, file)
    file.write_bytes(file.read_bytes().ljust(len(content), b" "))
    refused("the weights file lacks 'up'")
    file.write_bytes(b"x" * len(content))
    refused("the weights are damaged or half-written")
    file.unlink()
    refused("the weights are missing")
    os.mkfifo(file)
    refused("expected a file, found a FIFO")
    file.unlink()
    file.write_bytes(content)
    check(path, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"path": "/etc/a.safetensors"},
            "expected the relative path of a .safetensors file, found '/etc/a.safetensors'",
        ),
        ({"path": "../../etc/passwd"}, "expected the relative path of a .safetensors file, found '../../etc/passwd'"),
        ({"path": "a\0.safetensors"}, "expected the relative path of a .safetensors file"),
        ({"path": 3}, "expected text for 'path', found 3"),
        ({"size": -1}, "expected a whole number of at least 0 for 'size', found -1"),
        ({"tensors": {"none": "up"}}, "expected weights in one file each, found 'none' in a.safetensors"),
        ({"tensors": {"up": 1}}, "expected text for 'up', found 1"),
    ],
)
def test_manifests_that_are_wrong(change: dict[str, Any], message: str) -> None:
    file = {"path": "a.safetensors", "size": 9, "checksum": "0", "tensors": {"up": "up"}}
    plain = json.loads(json.dumps(made()[0].manifest.to_json()))
    Manifest.from_json({**plain, "weight_files": [file]})
    with pytest.raises(BundleError) as refused:
        Manifest.from_json({**plain, "weight_files": [{**file, **change}]})
    assert message in str(refused.value)
    with pytest.raises(BundleError, match=r"found 'up' in b\.safetensors"):
        Manifest.from_json({**plain, "weight_files": [file, {**file, "path": "b.safetensors"}]})
