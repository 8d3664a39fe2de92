"""Bundles on disk: what was written is read back, and damage is noticed."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

from distir_relax.bundle import (
    Bundle,
    FileWeights,
    Manifest,
    Program,
    Tensor,
    TensorWeights,
    read_bundle,
    write_bundle,
)
from distir_relax.errors import BundleError
from distir_relax.layout import DeviceMesh

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int8", "bool")


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(4 * 6 * 3).reshape(4, 6, 3)
    made = {f"w.{dtype}": (base % 2 if dtype == "bool" else base).to(getattr(torch, dtype)) for dtype in DTYPES}
    shared = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    return {
        **made, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "tied": shared, "tied.again": shared,
        "transposed": shared.t(), "slice": shared[1:3],
    }  # fmt: skip


def bundle() -> Bundle:
    weights = tensors()
    manifest = Manifest(
        name="m",
        mesh=DeviceMesh((1,), ("tp",)),
        tail="ragged",
        schedule_hash="",
        programs=(Program("main_0", torch="programs/main_0.py"),),
        ranks=(0,),
        inputs=(),
        outputs=(),
        weights=tuple(
            Tensor(name, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in weights.items()
        ),
    )
    texts = {"distir.txt": "the schedule, with ünicode\n", "ranked.txt": "ranked\n"}
    return Bundle(
        manifest, {"programs/main_0.py": "def main(comm, weights): return ()\n"}, TensorWeights(weights), texts
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_bundle(bundle(), tmp_path / "m.dist")


def test_round_trip(path: Path) -> None:
    made, read = bundle(), read_bundle(path)
    assert read.texts == made.texts
    assert read.programs == made.programs
    assert read.path == path
    assert read.stage("distributed") == "the schedule, with ünicode\n"
    with pytest.raises(BundleError, match=r"no sharded\.txt"):
        read.stage("sharded")
    for name, value in tensors().items():
        found = read.weights.read(name, [[(0, size)] for size in value.shape])
        assert found.dtype == value.dtype
        assert torch.equal(found, value), name


def test_slices_of_both_sources_are_those_of_indexing(path: Path) -> None:
    cuts = [
        [[(0, 4)], [(1, 3)], [(0, 3)]],
        [[(0, 4)], [(4, 6), (0, 1)], [(0, 3)]],
        [[(3, 4)], [(0, 2), (3, 6)], [(1, 2)]],
        [[(0, 4)], [], [(0, 3)]],
        [[], [(0, 6)], [(2, 3)]],
        [[(0, 4)], [(0, 6)], [(0, 1), (2, 3)]],
    ]
    file = read_bundle(path).weights
    memory = TensorWeights(tensors())
    for dtype in DTYPES:
        name = f"w.{dtype}"
        for cut in cuts:
            expected = tensors()[name]
            for dim, pieces in enumerate(cut):
                index = torch.tensor([i for a, b in pieces for i in range(a, b)], dtype=torch.long)
                expected = expected.index_select(dim, index)
            for source in (file, memory):
                found = source.read(name, cut)
                assert found.is_contiguous()
                assert torch.equal(found, expected)
                assert found.dtype == expected.dtype


def test_whole_tensors_in_memory_are_not_copied() -> None:
    weights = tensors()
    assert TensorWeights(weights).read("tied", [[(0, 5)], [(0, 4)]]).data_ptr() == weights["tied"].data_ptr()


def test_a_weight_that_is_not_there(path: Path) -> None:
    for source in (read_bundle(path).weights, TensorWeights({})):
        with pytest.raises(BundleError, match="no"):
            source.read("nobody", [])


def test_overwriting(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="exists"):
        write_bundle(bundle(), path)
    (path / "stale.txt").write_text("old")
    write_bundle(bundle(), path, overwrite=True)
    assert not (path / "stale.txt").exists()
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(BundleError, match="not a bundle"):
        write_bundle(bundle(), other, overwrite=True)
    assert (other / "thesis.txt").read_text() == "years of work"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["m.dist", "precious"], "temporary folders remain"


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    made = bundle()
    wrong = Bundle(made.manifest, made.programs, TensorWeights({**tensors(), "scalar": torch.zeros(2)}))
    with pytest.raises(BundleError, match=r"scalar: the manifest says float32 \(\)"):
        write_bundle(wrong, tmp_path / "m.dist")
    outside = Bundle(made.manifest, {**made.programs, "../escape.py": ""}, made.weights)
    with pytest.raises(BundleError, match="expected the path of a file inside the folder"):
        write_bundle(outside, tmp_path / "m.dist")
    assert list(tmp_path.iterdir()) == []


def test_all_files_have_the_modes_of_new_ones(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write_bundle(bundle(), tmp_path / "m.dist")
    finally:
        os.umask(before)
    modes = {item.name: stat.S_IMODE(item.stat().st_mode) for item in [path, *path.rglob("*")]}
    assert modes == {name: 0o750 if name in ("m.dist", "programs") else 0o640 for name in modes}
    assert "weights.safetensors" in modes


@pytest.mark.parametrize("overwrite", [True, False])
def test_several_that_save_to_one_place(tmp_path: Path, overwrite: bool) -> None:
    target = tmp_path / "m.dist"
    made = bundle()
    ends: list[Path | BundleError] = []

    def save() -> None:
        for _ in range(4):
            try:
                ends.append(write_bundle(made, target, overwrite))
            except BundleError as error:
                ends.append(error)
            read_bundle(target) if not overwrite else None

    threads = [threading.Thread(target=save) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    failed = [end for end in ends if isinstance(end, BundleError)]
    assert len(ends) == 24, "a saver died"
    assert len(failed) == (0 if overwrite else 23), failed
    assert all("a bundle of this name exists" in str(error) for error in failed)
    assert read_bundle(target).texts == made.texts
    assert [item.name for item in tmp_path.iterdir()] == ["m.dist"], "temporary folders remain"


def test_reading_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such bundle"):
        read_bundle(tmp_path / "nothing")
    with pytest.raises(BundleError, match="not a bundle"):
        read_bundle(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="not a bundle"):
        read_bundle(tmp_path / "file")


@pytest.mark.parametrize("file", ["programs/main_0.py", "distir.txt", "ranked.txt"])
def test_a_changed_or_missing_text_is_noticed(path: Path, file: str) -> None:
    original = (path / file).read_bytes()
    (path / file).write_bytes(original[:-1] + b"!")
    with pytest.raises(BundleError, match=rf"{file}: damaged"):
        read_bundle(path)
    (path / file).unlink()
    with pytest.raises(BundleError, match=rf"{file}: missing"):
        read_bundle(path)


def test_a_changed_manifest_is_noticed(path: Path) -> None:
    file = path / "manifest.json"
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    with pytest.raises(BundleError, match="half-written"):
        read_bundle(path)
    file.write_text(text.replace('"ragged"', '"pad"'))
    with pytest.raises(BundleError, match="checksum"):
        read_bundle(path)
    plain = json.loads(text)
    file.write_text(json.dumps({**plain, "format": 99}))
    with pytest.raises(BundleError, match="format 99"):
        read_bundle(path)
    file.write_text(json.dumps(plain))
    assert read_bundle(path).manifest.name == "m", "layout of the JSON does not matter"


def test_damaged_weights_are_noticed(path: Path) -> None:
    file = path / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    with pytest.raises(BundleError, match="weights are damaged"):
        read_bundle(path)
    read_bundle(path, verify_weights=False)
    file.write_bytes(content[:-10])
    with pytest.raises(BundleError, match="half-written"):
        read_bundle(path, verify_weights=False)
    file.unlink()
    with pytest.raises(BundleError, match="missing"):
        read_bundle(path, verify_weights=False)


def test_weights_unlike_the_manifest(path: Path) -> None:
    with pytest.raises(BundleError, match=r"'scalar' is float64 \(\), the file has float32 \(\)"):
        FileWeights(path / "weights.safetensors", [Tensor("scalar", "float64", ())])
    with pytest.raises(BundleError, match="lacks 'more'"):
        FileWeights(path / "weights.safetensors", [Tensor("more", "float32", ())])


def test_a_program_without_its_text() -> None:
    made = bundle()
    with pytest.raises(BundleError, match=r"programs/main_0\.py"):
        Bundle(made.manifest, {}, made.weights)
