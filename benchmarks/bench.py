"""All benchmarks beside other systems in one run: ``make bench``, or ``python benchmarks/bench.py [--only gpt2]``.

`gpt2` (a forward step), `generation` (SmolLM2-135M) and `training` run one after the other, and need the machine for
themselves for about an hour. Results, tables and a plot are written to build/bench. Environments of the peers, if they
are in build/peers (``make peers``), are those of `generation_peers`. ``--draw`` only writes tables and plot again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from distir_relax.kernels.processor import processor_field, processor_flags

HERE = Path(__file__).parent
OUT, PEERS = Path("build/bench"), Path("build/peers")
OURS = ("ours", "distir-relax")
NAMES = {
    "limit": "limit of the machine", "ours-1": "distir-relax, 1 rank", "ours-2": "distir-relax, 2 ranks",
    "tvm-2": "distir-relax, 2 ranks, tvm", "eager": "torch eager", "compiled": "torch.compile",
    "dtensor": "torch DTensor, 2 ranks", "ours, 1 rank": "distir-relax, 1 rank",
    "ours, 2 ranks": "distir-relax, 2 ranks", "vllm": "vLLM", "ctranslate2": "CTranslate2", "openvino": "OpenVINO",
    "ours": "distir-relax", "ddp": "torch DDP", "ours, ZeRO-3": "distir-relax, ZeRO-3", "fsdp2": "torch FSDP2",
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """Figures of one kind of several systems: better ones are smaller, unless `more` is better."""

    title: str
    unit: str
    more: bool
    bars: Sequence[tuple[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    for name in () if options.draw else options.only:
        command = [sys.executable, *COMMANDS[name], f"--rounds={options.rounds}", f"--json={results(name)}"]
        if name == "generation":
            for peer in ("vllm", "others"):
                command += [f"--{peer}", str(PEERS / peer)] if (PEERS / peer).exists() else []
        paths = os.pathsep.join(["build/smollm", os.environ.get("PYTHONPATH", "")])
        subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)
        (OUT / "machine.txt").write_text(f"{machine()}, {datetime.date.today():%Y-%m-%d}")
    found = {name: json.loads(results(name).read_text()) for name in COMMANDS if results(name).exists()}
    panels = [panel for name, of_one in found.items() for panel in PANELS[name](of_one)]
    where = (OUT / "machine.txt").read_text()
    (OUT / "tables.md").write_text(f"{where}\n\n" + "\n".join(table(panel) for panel in panels))
    (OUT / "bench.svg").write_text(plot(panels, where))
    print(f"{OUT / 'tables.md'}, {OUT / 'bench.svg'}: {where}")
    return 0


COMMANDS = {
    "gpt2": [str(HERE / "gpt2.py")],
    "generation": [str(HERE / "generation_peers.py"), "--precision", "float32", "bf16", "int8", "int4"],
    "training": [str(HERE / "training_peers.py")],
}


def results(name: str) -> Path:
    """The file with the results of a benchmark."""
    return OUT / f"{name}.json"


def machine() -> str:
    """The processor, and its number of cores."""
    kinds = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
    kind = next((kind for flag, kind in kinds.items() if flag in processor_flags()), "")
    name = (processor_field("model name") or platform.processor()) + (f" with {kind}" if kind else "")
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def gpt2_panels(found: dict[str, Any]) -> Iterator[Panel]:
    """One panel for each precision and shape."""
    for precision, systems in found.items():
        for shape in ("1x128", "8x128", "1x1"):
            bars = [(name, row[shape]) for name, row in systems.items() if shape in row]
            yield Panel(f"GPT-2 small, {shape.replace('x', ' x ')} tokens, {precision}", "ms", False, bars)


def generation_panels(found: dict[str, Any]) -> Iterator[Panel]:
    """One panel for each precision and figure."""
    titles = {"first": "first of 128 tokens", "token": "a token", "together": "16 requests together"}
    for precision, systems in found.items():
        for key, title in titles.items():
            unit = "tokens/s" if key == "together" else "ms"
            bars = [(name, row[key]) for name, row in systems.items()]
            yield Panel(f"SmolLM2-135M, {title}, {precision}", unit, key == "together", bars)


def training_panels(found: dict[str, Any]) -> Iterator[Panel]:
    """One panel for each precision, number of ranks and model; two if there are several ranks."""
    for precision, by_ranks in found.items():
        for ranks, systems in by_ranks.items():
            for model, title in (("gpt2", "GPT-2-shaped"), ("vit", "ViT")):
                number = f"{ranks} rank{'s' if ranks != '1' else ''}"
                for names, kind in ((("ours", "ddp"), ""), (("ours, ZeRO-3", "fsdp2"), ", sharded")):
                    bars = [(name, systems[name][model]) for name in names if name in systems]
                    if bars:
                        yield Panel(f"Training, {title}, {precision}, {number}{kind}", "samples/s", True, bars)


PANELS = {"gpt2": gpt2_panels, "generation": generation_panels, "training": training_panels}


def table(panel: Panel) -> str:
    """A panel as a table, each system beside the best of the others."""
    others = [value for name, value in panel.bars if not name.startswith(OURS) and name not in ("tvm-2", "limit")]
    best = (max if panel.more else min)(others, default=float("nan"))
    lines = [f"| {panel.title} | {panel.unit} | beside the best of the others |", "|---|---|---|"]
    for name, value in panel.bars:
        ratio = value / best if panel.more else best / value
        lines.append(f"| {NAMES.get(name, name)} | {value:.1f} | {ratio:.2f} times as fast |")
    return "\n".join(lines) + "\n"


ROW, HEAD, WIDE, LABEL, COLUMNS = 16, 30, 470, 170, 2
STYLE = (
    "text{font:11px sans-serif;fill:#222}.title{font-weight:bold}.ours{fill:#0072b2}.other{fill:#8a8a8a}"
    ".limit{fill:#d55e00}.ground{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#ddd}.ours{fill:#56b4e9}"
    ".other{fill:#777}.limit{fill:#e69f00}.ground{fill:#151515}}"
)


def plot(panels: Sequence[Panel], where: str) -> str:
    """All panels as bars, in two columns."""
    tops = [40.0] * COLUMNS
    parts = []
    for panel in panels:
        column = min(range(COLUMNS), key=lambda c: tops[c])
        parts.append(f'<g transform="translate({column * WIDE + 10},{tops[column]})">{bars(panel)}</g>')
        tops[column] += HEAD + ROW * len(panel.bars)
    width, height = COLUMNS * WIDE + 10, max(tops) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}">'
        f'<style>{STYLE}</style><rect class="ground" width="{width}" height="{height:.0f}"/>'
        f'<text class="title" x="10" y="20">{escape(where)}</text>{"".join(parts)}</svg>'
    )


def bars(panel: Panel) -> str:
    """The bars of a panel, which begin at 0."""
    most = max((value for _, value in panel.bars), default=1.0)
    room = WIDE - LABEL - 90
    better = "more" if panel.more else "less"
    lines = [f'<text class="title" y="11">{escape(panel.title)} ({panel.unit}, {better} is better)</text>']
    for number, (name, value) in enumerate(panel.bars):
        kind = "limit" if name == "limit" else "ours" if name.startswith(OURS) or name == "tvm-2" else "other"
        top = 17 + ROW * number
        lines.append(
            f'<text x="{LABEL - 6}" y="{top + 10}" text-anchor="end">{escape(NAMES.get(name, name))}</text>'
            f'<rect class="{kind}" x="{LABEL}" y="{top}" width="{room * value / most:.1f}" height="{ROW - 4}"/>'
            f'<text x="{LABEL + room * value / most + 4:.1f}" y="{top + 10}">{value:.1f}</text>'
        )
    return "".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
