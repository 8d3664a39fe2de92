"""Memory of ranks that read their weights: once in use, little more while they are packed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import distir_relax as dr
from distir_relax.bundle import read_bundle

# Loads each bundle by threads, and the last also as the rank of a launch; prints for each load the peak of memory and
# the memory that stays, in bytes.
_SCRIPT = """
import json, re, sys
from pathlib import Path
import torch
from distir_relax.bundle import read_bundle
from distir_relax.kernels.packing import pack_linear
from distir_relax.runtime.launched import load_rank
from distir_relax.runtime.requests.sequence_program import load_sequence_programs
from distir_relax.runtime.session import Session
from distir_relax.runtime.transports.mpi import MPIWorld

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def session(path):
    return Session(read_bundle(path, verify_weights=False), load_sequences=load_sequence_programs)

def rank(path):
    return load_rank(world, Path(path), "torch", "cpu", lambda bundle: {}, load_sequences=load_sequence_programs)

# The first product of a machine measures which kernel is faster.
pack_linear(torch.zeros(64, 64), rows=1)(torch.zeros(1, 64))
world, loaded, sizes = MPIWorld(), [], []
for path, load in [*((path, session) for path in sys.argv[1:]), (sys.argv[-1], rank)]:
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    loaded.append(load(path))
    sizes.append((status("VmHWM") - before, status("VmRSS") - before))
print(json.dumps(sizes))
"""


def compile_model(folder: Path, hidden: int, vocabulary: int, tied: bool) -> tuple[Path, int]:
    """Return the path of a language model's bundle, and the bytes of its weights on a CPU."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    plan = dr.compile_generation(folder, strategy="1/1/1/1", max_length=64).plan
    path = plan.save(f"{folder}.dist", backends=("torch",))
    stored = sum(math.prod(tensor.shape) * 4 for tensor in read_bundle(path).manifest.weights)
    assert plan.footprint.weights == (stored,)
    # The table of embeddings is also packed for the classifier that shares it.
    assert plan.footprint.packed == (vocabulary * hidden * 4 if tied else 0,)
    return path, stored + plan.footprint.packed[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_held_once(tmp_path: Path, tied: bool) -> None:
    (tiny, _), (large, weights) = (
        compile_model(tmp_path / "tiny", 64, 64, tied),
        compile_model(tmp_path / "large", 1024, 8192, tied),
    )
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(tiny), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Programs, and the analysis that writes their text, take the rest.
    for peak, steady in json.loads(done.stdout.splitlines()[-1])[1:]:
        assert steady < 1.05 * weights + 6e6
        assert peak < 1.15 * weights + 20e6
