"""How good the best predicted strategy is: the best three of searches, run for real on 1 and 2 ranks of this machine.

    python benchmarks/regret.py                       calibrates, searches, runs; to build/regret
    python benchmarks/regret.py --until search        runs nothing yet; the next call goes on from there
    python benchmarks/regret.py --passes 1            another pass, where all is ready

The regret of a search is how much longer a step under its predicted best takes, as measured, than under the best of the
three. GPT-2 small is trained, and, so that a step takes a fraction of a second, one of its width and heads with 2
layers and 5,000 tokens; MLPs are run. (To run a model on one rank there is one strategy: nothing to decide.) The three
of a search take turns in several passes, so that a busy machine slows all alike; what counts is the undisturbed step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.calibration.calibrate import calibrate
from distir_relax.calibration.statistics import undisturbed
from distir_relax.calibration.validate import validate
from distir_relax.cost.profile import Profile
from distir_relax.strategy_search.search import write_bundles

TOP = 3
STAGES = ("calibrate", "search", "run")
SHORT = 0.05
"""Steps of fewer seconds are run more often."""
WIDTH, HEADS = 768, 12


def gpt2_small(global_batch: int = 4) -> dr.Training:
    """A step of training GPT-2 small, 124 million parameters, on sequences of 15 tokens."""
    return gpt2(global_batch, 15, 12, 50257)


def gpt2_short(global_batch: int = 8) -> dr.Training:
    """A step of training a smaller one on sequences of 15 tokens."""
    return gpt2(global_batch, 15, 2, 5000)


def gpt2_long(global_batch: int = 4) -> dr.Training:
    """A step of training it on sequences of 63 tokens."""
    return gpt2(global_batch, 63, 2, 5000)


def gpt2(batch: int, tokens: int, layers: int, words: int) -> dr.Training:
    """GPT-2 of the small one's width, trained by AdamW to predict the next token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=layers, n_embd=WIDTH, n_head=HEADS, vocab_size=words, **none)
    ids = torch.randint(words, (batch, tokens))
    return dr.Training(
        GPT2LMHeadModel(config).train(),
        next_tokens,
        dr.optim.AdamW(lr=1e-4),
        ({"input_ids": ids, "use_cache": False}, ids),
    )


def next_tokens(out: Any, labels: torch.Tensor) -> torch.Tensor:
    """The cross entropy of each token, given those before it."""
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def mlp_wide(global_batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """4 layers of 2048 to be run."""
    return mlp(4, 2048, global_batch)


def mlp_deep(global_batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """12 layers of 700 to be run."""
    return mlp(12, 700, global_batch)


def mlp(layers: int, width: int, batch: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Linear layers, a GELU behind each."""
    torch.manual_seed(0)
    parts = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU()))
    return nn.Sequential(*parts).eval(), (torch.randn(batch, width),)


@dataclass(frozen=True)
class Case:
    """One search: a function of this file, ranks, a batch, and what else is tried."""

    function: str
    ranks: int
    batch: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.function}, {self.ranks} rank{'s' if self.ranks > 1 else ''}, batch {self.batch}"

    @property
    def target(self) -> str:
        """The function, as the command line names it."""
        return f"{Path(__file__).resolve()}:{self.function}"


ALONE = {"microbatches": (1, 2, 3), "checkpoint": ("none", "selective", "block")}
PAIR = {"microbatches": (1, 2, 4), "zero": (0, 1), "schedules": ("1f1b", "zb-h1")}
CASES = (
    *(Case("gpt2_short", 1, batch, ALONE) for batch in (3, 8, 17)),
    *(Case("gpt2_long", 1, batch, ALONE) for batch in (3, 6)),
    *(Case("gpt2_short", 2, batch, PAIR) for batch in (4, 8, 16, 30)),
    *(Case("gpt2_long", 2, batch, PAIR) for batch in (4, 7, 10)),
    *(Case("gpt2_small", 1, batch, ALONE) for batch in (3, 7)),
    *(Case("gpt2_small", 2, batch, PAIR) for batch in (4, 9)),
    *(Case("mlp_wide", 2, batch) for batch in (2, 7, 16, 33, 64, 150)),
    *(Case("mlp_deep", 2, batch) for batch in (2, 9, 24, 65, 128, 400)),
)


@dataclass(frozen=True)
class Regret:
    """A search, and what running its best came to: the predicted and the measured seconds of each, in the order of the
    predictions; `measured` has a row for each pass."""

    name: str
    candidates: int
    strategies: Sequence[str]
    predicted: Sequence[float]
    measured: Sequence[Sequence[float]] = ()

    @property
    def seconds(self) -> list[float]:
        """Of each, the time of a step that nothing disturbed."""
        return [undisturbed(times) for times in zip(*self.measured, strict=True)]

    @property
    def share(self) -> float:
        """By how much the predicted best is slower than the best measured: 0.05 is a twentieth, 0 if it is the best."""
        return self.seconds[0] / min(self.seconds) - 1

    def __str__(self) -> str:
        times = zip(self.strategies, self.predicted, self.seconds, strict=True)
        shown = "   ".join(f"{s} {p * 1e3:.1f} {m * 1e3:.1f}" for s, p, m in times)
        return f"{self.name:32} {self.share:6.1%} {self.candidates:4}   {shown}"


def prepare(case: Case, profile: Profile, folder: Path) -> Regret:
    """Search, and compile the best three to bundles in `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dr.search(
            case.target, devices=case.ranks, profile=profile, global_batch=case.batch, workers=1, **case.options
        )
    best = found.ranked[:TOP]
    write_bundles(case.target, best, profile, folder)
    strategies, predicted = [o.strategy for o in best], [o.seconds for o in best]
    return Regret(str(case), len(found.outcomes), strategies, predicted)


def run_pass(regrets: Sequence[Regret], folders: Sequence[Path], profile: Profile, steps: int) -> list[Regret]:
    """Run all bundles once more, those of a search one behind the other; short steps five times as often."""
    found = list(regrets)
    for short in (True, False):
        chosen = [n for n, r in enumerate(regrets) if (r.predicted[0] < SHORT) == short]
        paths = [str(folders[n] / f"{i}.dist") for n in chosen for i in range(len(regrets[n].strategies))]
        if paths:
            outcomes = iter(validate(paths, profile, steps * 5 if short else steps, passes=1).outcomes)
            for n in chosen:
                row = [next(outcomes).measured for _ in regrets[n].strategies]
                found[n] = replace(regrets[n], measured=[*regrets[n].measured, row])
    return found


def read(path: Path) -> list[Regret]:
    """What is there from an earlier call."""
    return [Regret(**row) for row in json.loads(path.read_text())] if path.exists() else []


def write(regrets: Sequence[Regret], path: Path) -> None:
    """Keep all of it as JSON."""
    path.write_text(json.dumps([asdict(r) for r in regrets], indent=1))


def summary(regrets: Sequence[Regret]) -> str:
    """The mean, the median and the worst."""
    shares = [r.share for r in regrets]
    return (
        f"{len(shares)} searches: regret {statistics.mean(shares):.1%} in the mean, {statistics.median(shares):.1%} in "
        f"the median, {max(shares):.1%} at worst; the predicted best is the best of three in {shares.count(0.0)}"
    )


def main() -> None:
    """Read the command line, and go on from what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/regret"), help="the folder of profile and results")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last thing to do, if not all")
    parser.add_argument("--steps", type=int, default=3, help="how often each runs in a pass")
    parser.add_argument("--passes", type=int, default=4)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    kept, file = options.output / "regret.json", options.output / "cpu.toml"
    if not file.exists():
        calibrate(file, 2, "cpu", passes=options.passes)
    if options.until == "calibrate":
        return
    profile, regrets = dr.load_profile(file), read(kept)
    folders = [options.output / str(number) for number in range(len(CASES))]
    for case, folder in list(zip(CASES, folders, strict=True))[len(regrets) :]:
        regrets.append(prepare(case, profile, folder))
        write(regrets, kept)
    if options.until == "search":
        return
    for _ in range(options.passes):
        regrets = run_pass(regrets, folders, profile, options.steps)
        write(regrets, kept)
    print(f"{'search':32} regret   of   the best {TOP}: predicted, measured ms", *regrets, summary(regrets), sep="\n")


if __name__ == "__main__":
    main()
