"""Predicted and measured steps on 2 and 3 hosts, which are namespaces of this machine (`tests.hosts.laboratory`).

    python -m benchmarks.host_validation [--hosts 2 3] [--links "1gbit 0.43ms" 1gbit 10gbit] [--passes 5]

Each host has one rank with one thread. A profile is fitted to measurements that are taken in turn with the steps, as
`distir validate --host ... --calibrate` does. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr

LINKS = {"1gbit 0.43ms": {"delay": 0.15e-3, "gbit": 1.0}, "1gbit": {}, "10gbit": {}}
"""Links of the laboratory: a relay of frames has the delay, a token bucket the rate alone."""


def on_two() -> dict[str, Any]:
    """Configurations on 2 ranks."""
    return configurations(2)


def on_three() -> dict[str, Any]:
    """Configurations on 3 ranks."""
    return configurations(3)


def configurations(n: int) -> dict[str, Any]:
    """Inference and training of MLPs and a GPT-2, split by samples, columns and layers over `n` ranks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    found: dict[str, Any] = {}
    for layers, width, batch in ((6, 768, 12 * n), (4, 1536, 48)):
        torch.manual_seed(0)
        linear = (nn.Linear(width, width) for _ in range(layers))
        model = nn.Sequential(*(part for layer in linear for part in (layer, nn.ReLU())))
        x = torch.randn(batch, width)
        for text in (f"1/{n}/1/1", f"1/1/{n}/4"):
            found[f"mlp {layers} x {width}, {text}"] = dr.compile(model, (x,), strategy=text, name="mlp")
        for text in (f"{n}/1/1/1", f"1/1/{n}/4"):
            step = dr.compile_training(
                model, F.mse_loss, optimizer=dr.optim.SGD(lr=1e-4), strategy=text, name="mlp", example_batch=(x, x)
            )
            found[f"training {layers} x {width}, {text}"] = step.plan
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2 * n, n_embd=384, n_head=6, vocab_size=5000)).eval()
    for batch in (1, 12):
        tokens = torch.zeros(batch, 32, dtype=torch.long)
        found[f"gpt2, 1/{n}/1/1, batch {batch}"] = dr.compile(
            gpt2, (tokens,), example_kwargs={"use_cache": False}, strategy=f"1/{n}/1/1", name="gpt2"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--links", nargs="*", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        for link in options.links:
            for count in options.hosts:
                validate(count, link, options.passes)
        return
    from tests.hosts.laboratory import UNSHARE

    command = [*UNSHARE, sys.executable, "-m", "benchmarks.host_validation", "--inside", *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)


def validate(count: int, link: str, passes: int) -> None:
    """Print the errors of all configurations on hosts with a kind of link."""
    from tests.hosts.laboratory import Laboratory

    names = [f"n{number}" for number in range(count)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Laboratory(Path(folder), names, **LINKS[link]) as laboratory,  # type: ignore[arg-type]
    ):
        for name in () if LINKS[link] else names:
            laboratory.rate(name, link)
        print(f"\n{count} hosts, {link}; n0 to n1: {laboratory.measure(*names[:2])}", flush=True)
        target = f"{__file__}:on_{'two' if count == 2 else 'three'}"
        process = laboratory.start(
            "n0", sys.executable, "-P", "-m", "distir_relax", "validate", target,
            "--host", ",".join(names), "--rsh", str(laboratory.shell), "--passes", str(passes), "--json",
            "--calibrate", str(Path(folder) / "hosts.toml"),
            stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"exit code {process.returncode}")
        text = out.decode()
        found = json.loads(text[text.index("{") :])
    print("| configuration | measured ms | predicted ms | error |\n|---|---|---|---|")
    for row in found["outcomes"]:
        measured, predicted = row["measured"], row["predicted"]
        print(f"| {row['name']} | {measured * 1e3:.2f} | {predicted * 1e3:.2f} | {predicted / measured - 1:+.1%} |")


if __name__ == "__main__":
    main()
