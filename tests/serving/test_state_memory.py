"""The memory that an engine has for states when nobody says how much."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import distir_relax as dr
from distir_relax.bundle import Manifest, local_bytes
from distir_relax.runtime.requests import StateBytes
from distir_relax.serving import EngineOptions, state_memory
from distir_relax.serving.state_memory import default_state_memory, free_memory


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    config = transformers.GPT2Config(n_layer=1, n_head=3, n_embd=24, vocab_size=61, n_positions=64)
    plan = dr.compile_generation(transformers.GPT2LMHeadModel(config).eval(), strategy="1/2/1/1").plan
    return plan.bundle(("torch",)).manifest


def test_it_is_what_is_left_beside_the_weights(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = sum(local_bytes(tensor, manifest.mesh, rank) for tensor in manifest.weights for rank in range(2))
    for free, replicas in ((10 << 30, 1), (64 << 30, 3)):
        monkeypatch.setattr(state_memory, "free_memory", lambda free=free: free)
        expected = (0.9 * free / replicas - weights) / 2 - (1 << 28)
        assert abs(default_state_memory(manifest, 16, None, replicas=replicas) - expected) <= 1
    # No more than the requests can use, and never so little that a small model does not start.
    monkeypatch.setattr(state_memory, "free_memory", lambda: 1 << 50)
    token = StateBytes(manifest).token[0]
    assert default_state_memory(manifest, 100_000, 64) == 2 * 100_000 * 64 * token
    monkeypatch.setattr(state_memory, "free_memory", lambda: 0)
    assert default_state_memory(manifest, 16, 64) == 1 << 28
    EngineOptions(memory=1 << 28).check(manifest)


def test_free_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = free_memory()
    assert machine > 1 << 28
    monkeypatch.setattr(state_memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, expected in (("5000\n", 4000), ("500\n", 0), ("max\n", None)):
        (tmp_path / "memory.max").write_text(limit)
        assert expected is None or free_memory() == expected
