"""Memory of ranks that read their weights: once in use, little more while they are packed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import distir_relax as dr
from distir_relax.bundle import read_bundle

# Loads each bundle by threads, by the backend in front of its path, and the last also as the rank of a launch; prints
# for each load the peak of memory and the memory that stays, in bytes.
_SCRIPT = """
import json, re, sys
from pathlib import Path
import torch
from distir_relax.bundle import BundleFile, read_bundle
from distir_relax.kernels.packing import pack_linear
from distir_relax.kernels.quantized import quantize_int8_groups
from distir_relax.kernels.quantized.linear import pack_quantized
from distir_relax.runtime.launched import RankOptions, open_session
from distir_relax.runtime.requests.sequence_program import load_sequence_programs
from distir_relax.runtime.session import Session
from distir_relax.runtime.transports.mpi import MPIWorld

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def session(backend, path):
    load_sequences = load_sequence_programs if backend == "torch" else None
    return Session(read_bundle(path, verify_weights=False), backend, load_sequences=load_sequences)

def rank(backend, path):
    return open_session(world, BundleFile(path), RankOptions(backend), lambda bundle: {}, load_sequence_programs)

# The first product of a machine measures which kernel is faster.
pack_linear(torch.zeros(64, 64), rows=1)(torch.zeros(1, 64))
pack_quantized(*quantize_int8_groups(torch.zeros(64, 64)), dtype=torch.float32, rows=1)(torch.zeros(1, 64))
world, loaded, sizes = MPIWorld(), [], []
for path, load in [*((path, session) for path in sys.argv[1:]), (sys.argv[-1], rank)]:
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    loaded.append(load(*path.split(":")))
    sizes.append((status("VmHWM") - before, status("VmRSS") - before))
print(json.dumps(sizes))
"""


def compile_model(folder: Path, hidden: int, vocabulary: int) -> tuple[Path, int]:
    """Return the path of a language model's bundle, and the bytes of its weights on a CPU."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    plan = dr.compile_generation(folder, strategy="1/1/1/1", max_length=64).plan
    path = plan.save(f"{folder}.dist", backends=("torch",))
    stored = sum(math.prod(tensor.shape) * 4 for tensor in read_bundle(path).manifest.weights)
    assert plan.footprint.weights == (stored,)
    # The table of embeddings is also packed for the classifier that shares it; frequencies of positions are not kept.
    assert plan.footprint.packed == (pytest.approx(vocabulary * hidden * 4, rel=0.01),)
    return path, stored + plan.footprint.packed[0]


def compile_experts(path: Path) -> tuple[Path, int]:
    """Return the path of the bundle of a mixture with weights of 8 bits, and the bytes of its weights."""
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=7, max_position_embeddings=64,
    )  # fmt: skip
    plan = dr.compile_generation(transformers.MixtralForCausalLM(config), precision="int8", max_length=64).plan
    plan.save(path, backends=("torch",))
    return path, (path / "weights.safetensors").stat().st_size


def compile_narrow(folder: Path, precision: str) -> tuple[Path, int]:
    """Return the path of a language model's bundle in a precision, and the bytes of its weights."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    path = dr.compile_generation(model, precision=precision, max_length=64).plan.save(folder, backends=("torch",))
    return path, (path / "weights.safetensors").stat().st_size


def compile_layers(path: Path, size: int) -> tuple[Path, int]:
    """Return the path of a bundle of 12 layers, and the bytes of its weights."""
    model = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(12)]).eval()
    dr.compile(model, (torch.zeros(3, size),), mesh=1).save(path)
    return path, 12 * 4 * (size * size + size)


def measure(*paths: Path, backend: str = "torch") -> list[tuple[int, int]]:
    """Return what the script prints for bundles."""
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, *(f"{backend}:{path}" for path in paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[tuple[int, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(200)
def test_weights_are_held_once(tmp_path: Path) -> None:
    """But a table of embeddings that is packed for a classifier, and the experts of a layer while they are packed."""
    tiny, _ = compile_model(tmp_path / "tiny", 64, 64)
    for path, size in (compile_experts(tmp_path / "experts"), compile_model(tmp_path / "large", 1024, 4096)):
        # Programs, and the analysis that writes their text, take the rest.
        for peak, steady in measure(tiny, path)[1:]:
            assert steady < 1.05 * size + 6e6
            assert peak < 1.15 * size + 8e6


@pytest.mark.drawn(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_narrow_weights_are_held_once(tmp_path: Path, precision: str) -> None:
    tiny, _ = compile_model(tmp_path / "tiny", 64, 64)
    path, size = compile_narrow(tmp_path / "narrow.dist", precision)
    for peak, steady in measure(tiny, path)[1:]:
        assert steady < 1.05 * size + 6e6
        assert peak < 1.15 * size + 8e6


@pytest.mark.sweep
def test_weights_of_the_tvm_backend_are_held_once(tmp_path: Path) -> None:
    tiny, _ = compile_layers(tmp_path / "tiny", 5)
    path, size = compile_layers(tmp_path / "large", 1536)
    for peak, steady in measure(tiny, path, backend="tvm")[1:]:
        assert steady < 1.05 * size + 6e6
        # Freed memory goes back to the system in pieces of 16 MB.
        assert peak < 1.15 * size + 40e6
