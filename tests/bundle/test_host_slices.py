"""Copies of bundles on other hosts: their ranks read what they read from the whole bundle, and nothing else."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import distir_relax as dr
from distir_relax.bundle import Bundle, check_weights, read_bundle
from distir_relax.bundle.file_slices import SUFFIX
from distir_relax.bundle.host_slices import host_files
from distir_relax.bundle.manifest import local_intervals
from distir_relax.errors import BundleError
from distir_relax.runtime.agents.file_copies import LaunchFile, copies_folder, digest, find, receive, send
from distir_relax.support.file_slices import COPIES, HostFile, Slice

TOKEN = b"a token of a launch"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(35, 127), torch.nn.Linear(127, 35)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return copies_folder()


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    torch.manual_seed(0)
    plan = dr.compile(Model(), (torch.randn(5, 35),), strategy="1/3/1/1")
    plan.save(tmp_path / "m.dist")
    return read_bundle(tmp_path / "m.dist")


def copied(files: Sequence[HostFile], key: str = "key", change: Callable[[bytes], bytes] = bytes) -> Path:
    """Send files as a launcher does; `change` is what happens to them on the way."""
    source, middle = socket.socketpair()
    relay, target = socket.socketpair()

    def pass_on() -> None:
        received = b""
        while data := middle.recv(1 << 16):
            received += data
        relay.sendall(change(received))
        relay.close()

    def give() -> None:
        send(source, TOKEN, "m.dist", files)
        source.close()

    threads = [threading.Thread(target=give), threading.Thread(target=pass_on)]
    for thread in threads:
        thread.start()
    try:
        return receive(target, TOKEN, key)
    finally:
        for thread in threads:
            thread.join(10)
        for sock in (middle, target):
            sock.close()


@pytest.mark.parametrize("ranks", [(0,), (1, 2), (0, 1, 2)])
def test_a_copy_has_the_slices_of_its_ranks(
    bundle: Bundle, ranks: tuple[int, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = host_files(bundle, ranks)
    place = copied(files)
    monkeypatch.setenv(COPIES, str(cache))
    found = read_bundle(place)
    manifest = bundle.manifest
    is_split = {t.name for t in manifest.weights if t.shards}
    assert is_split, "the test is of slices"
    for rank in range(3):
        for tensor in manifest.weights:
            intervals = local_intervals(tensor, manifest.mesh, rank)
            if rank in ranks or tensor.name not in is_split:
                assert torch.equal(
                    found.weights.read(tensor.name, intervals), bundle.weights.read(tensor.name, intervals)
                )
            else:
                with pytest.raises(BundleError, match="slices of other ranks"):
                    found.weights.read(tensor.name, intervals)
    (weights,) = (file for file in files if file.path == "weights.safetensors")
    sent = sum(one.bytes for one in weights.slices)
    assert sent == weights.size if len(ranks) == 3 else sent < (len(ranks) + 0.2) / 3 * weights.size
    assert (place / "weights.safetensors").stat().st_size == weights.size


def test_a_damaged_copy_is_noticed(bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = copied(host_files(bundle, (1,)))
    monkeypatch.setenv(COPIES, str(cache))
    check_weights(read_bundle(place, verify_weights=False))
    file = place / "weights.safetensors"
    data = bytearray(file.read_bytes())
    position = max(np.flatnonzero(np.frombuffer(data, np.uint8)))
    data[position] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match="the weights are damaged"):
        read_bundle(place)


def test_slices_are_believed_in_the_folder_of_copies_alone(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    place = copied(host_files(bundle, (1,)))
    with pytest.raises(BundleError, match="the weights are damaged"):
        read_bundle(place)
    shutil.copytree(place, tmp_path / "elsewhere.dist")
    assert (tmp_path / "elsewhere.dist" / f"weights.safetensors{SUFFIX}").is_file()
    monkeypatch.setenv(COPIES, str(cache))
    with pytest.raises(BundleError, match="the weights are damaged"):
        read_bundle(tmp_path / "elsewhere.dist")


def changed(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize(
    "change", [lambda x: x[:-40], lambda x: changed(x, -50), lambda x: changed(x, -1), lambda _: b""]
)
def test_a_copy_that_was_changed_on_its_way_is_none(
    bundle: Bundle, cache: Path, change: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(OSError, match=r"the connection has ended|was changed|another form"):
        copied(host_files(bundle, (0,)), change=change)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("path", [b"../../x/abc", b"/tmp/x/abcd", b"m/../../abc"])
def test_no_file_is_written_outside_of_a_copy(cache: Path, path: bytes) -> None:
    with pytest.raises(OSError, match="outside"):
        copied([HostFile("file", 3, text=b"abc")], change=lambda data: data.replace(b"m.dist/file", path))
    assert list(cache.iterdir()) == []


def test_weights_outside_of_the_bundle_are_in_the_copy(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "w.safetensors").write_bytes(bytes(range(100)))
    place = copied([
        HostFile("manifest.json", 2, text=b"{}"),
        HostFile("../far/w.safetensors", 100, tmp_path / "far" / "w.safetensors", slices=[Slice(3, 2, 10, 5)]),
    ])  # fmt: skip
    data = (place / "../far/w.safetensors").read_bytes()
    assert [n for n in data if n] == [n for i in range(5) for n in (3 + 10 * i, 4 + 10 * i)]
    assert len(data) == 100


def test_a_host_with_the_same_files_needs_no_copy(bundle: Bundle, tmp_path: Path) -> None:
    path = str(tmp_path / "m.dist")
    file = LaunchFile(path, lambda ranks: host_files(bundle, ranks))
    request = file.request((1, 2))
    assert find(request) == Path(path)
    elsewhere = {**request, "path": str(tmp_path / "not-here.dist")}
    assert find(elsewhere) is None
    assert copied(file.files_of((1, 2)), request["key"]) == find(elsewhere)
    assert file.request((0,))["key"] != request["key"]


def test_a_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    first = digest(tmp_path / "a")
    os.utime(tmp_path / "a" / "x", (1, 1))
    assert digest(tmp_path / "a") == first
    (tmp_path / "a" / "x").write_text("2")
    assert digest(tmp_path / "a") != first
    assert digest(tmp_path / "none") == ""
