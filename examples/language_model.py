"""A small language model of Python code: trained as a pipeline, killed, resumed by data and tensor, and sampled.

The text is the standard library's source, 9 MB without its tests. A tokenizer is trained on it, and a Llama of 4 layers
with random weights. Three ranks train it as a pipeline until the run is killed; four ranks, by data and by tensor,
continue from the last checkpoint. One process of torch trains the same model on the same batches, for comparison. The
trained weights become a folder of transformers, which is compiled for text generation on two ranks.

    python examples/language_model.py             everything, 10 minutes on 2 cores; leaves build/language-model/

The commands are printed as they run. `--steps 40` is a quick look.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer

import distir_relax as dr

FOLDER = Path("build/language-model")
HERE = Path(__file__).resolve()
VOCABULARY, LENGTH, ROWS, STEPS = 2_048, 128, 24, 600
HELD_OUT = 0.02
PIPELINE, RESUMED, SAMPLED = "1/1/3/4", "2/2/1/1", "1/2/1/1"
PROMPTS = ("import os\n\ndef ", "class Error(", "    for name in ")
Batch = dict[str, torch.Tensor]

console = Console(highlight=False)


def model() -> transformers.LlamaForCausalLM:
    """The model with its random weights, the same at each call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def rate() -> dr.lr.Schedule:
    """The learning rate of a step; the number of steps is that of this run of the example."""
    steps = int((FOLDER / "steps").read_text())
    return dr.lr.Cosine(3e-3, steps, warmup=max(1, steps // 20), least=3e-4)


def build() -> dr.Training:
    """The training, for ``distir compile``."""
    optimizer = dr.optim.AdamW(lr=rate(), weight_decay=0.1, no_decay=("*norm*",))
    return dr.Training(model(), optimizer=optimizer, example_batch=next(batches()), clip_norm=1.0, metrics={})


def batches(start: int = 0) -> Iterator[Batch]:
    """Rows of the text from random places, from a step on: equal on all ranks, which take their part of each."""
    tokens, _ = texts()
    while True:
        generator = np.random.default_rng(start)
        begins = generator.integers(len(tokens) - LENGTH, size=ROWS)
        yield of(np.stack([tokens[begin : begin + LENGTH] for begin in begins]))
        start += 1


def held_out() -> list[Batch]:
    """Five batches of text that is not trained on."""
    _, tokens = texts()
    rows = tokens[: 5 * ROWS * LENGTH].reshape(-1, LENGTH)
    return [of(rows[begin : begin + ROWS]) for begin in range(0, len(rows), ROWS)]


def of(rows: np.ndarray) -> Batch:
    """A batch: the model shifts the labels itself."""
    tokens = torch.tensor(rows, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def texts() -> tuple[np.ndarray, np.ndarray]:
    """The tokens to train on and those that are held out; ranks map the file to memory."""
    tokens = np.load(FOLDER / "tokens.npy", mmap_mode="r")
    split = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:split], tokens[split:]


def prepare() -> int:
    """Write the tokenizer, the tokens and the untrained model; return the bytes of the text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    apart = ("site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings")
    files = sorted(path for path in library.rglob("*.py") if not set(path.relative_to(library).parts) & set(apart))
    # Files in an order of their own, so that the held out part is of all kinds.
    np.random.default_rng(0).shuffle(files)  # type: ignore[arg-type]
    text = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(text, VOCABULARY, special_tokens=["<|end|>"], show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    pretrained = FOLDER / "untrained"
    transformers.utils.logging.disable_progress_bar()
    tokenizer.save_pretrained(pretrained)
    model().save_pretrained(pretrained)
    ids = [np.array([*encoding.ids, 0], np.uint16) for encoding in trained.encode_batch(text)]
    np.save(FOLDER / "tokens.npy", np.concatenate(ids))
    return sum(len(part.encode()) for part in text)


def distir(*words: object) -> list[str]:
    """The command, shown as a user writes it."""
    console.print(f"[dim]$ distir {shlex.join(map(str, words))}[/]", soft_wrap=True)
    return [sys.executable, "-m", "distir_relax", *map(str, words)]


def run(command: Sequence[str]) -> str:
    """Run a command; return its output, which is shown if it fails."""
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        console.print(done.stdout + done.stderr, markup=False)
        raise SystemExit(done.returncode)
    return done.stdout


def environment() -> dict[str, str]:
    """One thread for each rank."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train(strategy: str, steps: int, kill_after: int = 0) -> None:
    """Train on as many ranks as a strategy has, from the last checkpoint on; kill the run after a checkpoint."""
    bundle = FOLDER / f"{strategy.replace('/', '-')}.dist"
    run(distir("compile", f"{HERE}:build", "--train", "--strategy", strategy, "-o", bundle, "--backend", "torch"))
    ranks = dr.Strategy.parse(strategy).devices
    every = max(1, steps // 8)
    command = distir(
        "train", "-n", ranks, bundle, "--data", f"{HERE}:batches", "--steps", steps, "--checkpoint", FOLDER / "ck",
        "--every", every, "--resume", "auto", "--log", FOLDER / "run.jsonl", "--evaluation", f"{HERE}:held_out",
        "--evaluate-every", every, "--report", FOLDER / f"report-{strategy.replace('/', '-')}.html",
    )  # fmt: skip
    with (FOLDER / "train.log").open("a") as log:
        started = subprocess.Popen(command, env=environment(), stdout=log, stderr=log, start_new_session=True)
        while started.poll() is None:
            if kill_after and last_checkpoint() >= kill_after:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
                console.print(f"killed after the checkpoint of step {last_checkpoint()}")
                return
            time.sleep(0.1)
    if started.returncode:
        console.print((FOLDER / "train.log").read_text()[-3000:], markup=False)
        raise SystemExit(started.returncode)


def last_checkpoint() -> int:
    """The step of the last complete checkpoint."""
    latest = FOLDER / "ck" / "latest"
    return int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0


def by_torch(steps: int) -> list[float]:
    """One process of torch on the same batches: its losses."""
    network = model()
    named = dict(network.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if "norm" not in n]},
        {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer, schedule, losses = torch.optim.AdamW(groups, weight_decay=0.1), rate(), []
    for step, batch in zip(range(steps), batches(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.zero_grad()
        loss = network(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def draw(
    ours: dict[int, float], evaluated: dict[int, float], theirs: Sequence[float], resumed: int, path: Path
) -> None:
    """The losses by step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes.plot(range(1, len(theirs) + 1), theirs, linewidth=5, color="#c8c8c8", label="torch, one process")
    axes.plot(list(ours), list(ours.values()), linewidth=1, color="#1f77b4", label=f"{PIPELINE}, then {RESUMED}")
    axes.plot(list(evaluated), list(evaluated.values()), "o", color="#d62728", label="held out")
    axes.axvline(resumed, color="#888888", linestyle=":", label="killed and resumed")
    axes.set(xlabel="step", ylabel="loss", title="A language model of Python code")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    begun = time.perf_counter()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    (FOLDER / "steps").write_text(str(steps))
    size = prepare()
    parameters = sum(p.numel() for p in model().parameters())
    console.print(
        f"{size / 1e6:.1f} MB of text, {len(np.load(FOLDER / 'tokens.npy', mmap_mode='r')):,} tokens, "
        f"{parameters / 1e6:.1f} M parameters, {steps} steps of {ROWS} x {LENGTH} tokens"
    )
    train(PIPELINE, steps, kill_after=steps // 2)
    resumed = last_checkpoint()
    train(RESUMED, steps)
    rows = [json.loads(line) for line in (FOLDER / "run.jsonl").read_text().splitlines()]
    ours = {row["step"]: row["loss"] for row in rows if "loss" in row}
    evaluated = {row["step"]: row["evaluation/loss"] for row in rows if "evaluation/loss" in row}

    run(distir("export-checkpoint", FOLDER / "ck", "-o", FOLDER / "trained", "--pretrained", FOLDER / "untrained"))
    bundle = FOLDER / "generate.dist"
    run(distir("compile", FOLDER / "trained", "--generate", "--strategy", SAMPLED, "-o", bundle))
    samples = [
        run(distir("generate", bundle, "--prompt", prompt, "--max-new-tokens", 60, "--temperature", 0.7, "--seed", 1))
        for prompt in PROMPTS
    ]

    console.print("\nthe same batches on one process of torch ...")
    theirs = by_torch(steps)
    draw(ours, evaluated, theirs, resumed, FOLDER / "losses.png")
    table = Table("", "steps", "loss at first", "loss at last", "furthest from torch")
    for name, first, last in ((PIPELINE, 1, resumed), (RESUMED, resumed + 1, steps)):
        apart = max(abs(ours[step] - theirs[step - 1]) for step in range(first, last + 1))
        table.add_row(name, f"{first} to {last}", f"{ours[first]:.3f}", f"{ours[last]:.3f}", f"{apart:.1e}")
    console.print(table)
    console.print(f"held out text: {', '.join(f'{loss:.3f} after step {step}' for step, loss in evaluated.items())}")
    for prompt, text in zip(PROMPTS, samples, strict=True):
        console.print(f"\n[bold]{prompt.strip()}[/]")
        console.print(text.strip(), markup=False)
    console.print(f"\n{time.perf_counter() - begun:.0f} s; curves, reports and the model are in {FOLDER}/")
    if sorted(ours) != list(range(1, steps + 1)):
        raise SystemExit("expected a loss of each step")
    # Rounding grows: torch itself is 1e-2 apart after 100 steps, if its weights begin 1e-7 apart.
    early = max(abs(ours[step] - theirs[step - 1]) for step in range(1, min(steps, 25) + 1))
    last = range(steps - steps // 10, steps + 1)
    means = [sum(losses) / len(last) for losses in ([ours[n] for n in last], [theirs[n - 1] for n in last])]
    console.print(f"mean of the last {len(last)} losses: {means[0]:.3f}, torch {means[1]:.3f}")
    if early > 1e-3 or abs(means[0] - means[1]) > 0.05:
        raise SystemExit("expected the losses of torch")


if __name__ == "__main__":
    main()
