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

from distir_relax.bundle import (
    Bundle,
    FileTensor,
    FileWeights,
    Manifest,
    TensorWeights,
    local_intervals,
    read_bundle,
    write_bundle,
)
from distir_relax.errors import BundleError
from tests.runtime.handmade import mlp_bundle


def made() -> tuple[Bundle, dict[str, torch.Tensor]]:
    """A bundle of two weights, which a bfloat16 holds exactly, and the weights."""
    bundle = mlp_bundle([3, 2])
    whole = {t.name: bundle.weights.read(t.name, [[(0, n)] for n in t.shape]) for t in bundle.manifest.weights}
    tensors = {name: tensor.bfloat16().float() for name, tensor in whole.items()}
    return replace(bundle, weights=TensorWeights(tensors)), tensors


def written(folder: Path, **files: dict[str, tuple[str, torch.Tensor]]) -> tuple[Path, dict[str, torch.Tensor]]:
    """The bundle, written beside a folder `model` with these safetensors files of weights by key; and all weights.

    A weight is (name, tensor of the file); one that no file has is in memory.
    """
    bundle, tensors = made()
    (folder / "model").mkdir()
    deferred = {}
    for name, content in files.items():
        path = folder / "model" / f"{name}.safetensors"
        save_file({key: tensor for key, (_, tensor) in content.items()}, path)
        opened = FileWeights(path, ())
        deferred |= {weight: FileTensor.deferred(opened, key).float() for key, (weight, _) in content.items()}
    weights = TensorWeights({**tensors, **deferred})
    return write_bundle(replace(bundle, weights=weights), folder / "bundles" / "m.dist", refer=True), tensors


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
        a={"model.up": ("up", tensors["up"].bfloat16()), "more": ("other", torch.zeros(3))},
        b={"tied": ("down", tensors["down"]), "b": ("b", torch.ones(5))},
        c={"unused": ("unused", torch.ones(2))},
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


def test_weights_that_no_file_has_as_they_are_are_copied(tmp_path: Path) -> None:
    _, tensors = made()
    save_file({"wide": tensors["up"].double(), "tall": tensors["down"].T.contiguous()}, tmp_path / "a.safetensors")
    opened = FileWeights(tmp_path / "a.safetensors", ())
    computed = {"up": FileTensor.deferred(opened, "wide").float(), "down": FileTensor.deferred(opened, "tall").T}
    bundle = replace(made()[0], weights=TensorWeights({**tensors, **computed}))
    path = write_bundle(bundle, tmp_path / "m.dist", refer=True)
    assert check(path, tensors).weight_files == ()
    assert {*load_file(path / "weights.safetensors")} == {"up", "down"}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_pieces_are_read_alone_or_cut_out_of_blocks(
    stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(5, 127, 3).to(stored)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    file = FileWeights(tmp_path / "w.safetensors", ())
    reads: list[int] = []
    pread = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: reads.append(pread(*arguments)) or reads[-1])
    every = [(0, 5)], [(0, 127)], [(0, 3)]
    for part, block in ((1, 1 << 22), (1 << 15, 1 << 10), (1 << 15, 1)):
        monkeypatch.setattr("distir_relax.bundle.weights_file._PART", part)
        monkeypatch.setattr("distir_relax.bundle.weights_file._BLOCK", max(block, stored.itemsize))
        for dim, pieces in ((0, [(1, 4)]), (1, [(0, 63)]), (1, [(3, 40), (40, 41), (120, 127)]), (2, [(1, 2)])):
            reads.clear()
            found = file.read_as("w", "float32", [pieces if d == dim else each for d, each in enumerate(every)])
            assert torch.equal(found, torch.cat([whole.narrow(dim, a, b - a) for a, b in pieces], dim).float())
            if part == 1:
                assert sum(reads) == found.numel() * stored.itemsize


def test_files_that_change_before_the_bundle_is_written(tmp_path: Path) -> None:
    bundle, tensors = made()
    file = tmp_path / "a.safetensors"
    save_file(tensors, file)
    opened = FileWeights(file, ())
    weights = TensorWeights({name: FileTensor.deferred(opened, name) for name in tensors})
    file.write_bytes(file.read_bytes()[:-10])
    for refer in (True, False):
        with pytest.raises(BundleError, match=r"a\.safetensors: the weights were (modified|truncated) while they were"):
            write_bundle(replace(bundle, weights=weights), tmp_path / "m.dist", refer=refer)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_files_that_are_moved_truncated_or_changed(tmp_path: Path) -> None:
    _, tensors = made()
    path, _ = written(tmp_path, a={name: (name, tensor) for name, tensor in tensors.items()})
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
