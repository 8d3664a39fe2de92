"""Pairs of features, each run beside one device, or refused: ``python -m tests.composition.cells`` writes the table."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.export import Dim

import distir_relax as dr
from distir_relax.errors import DistIRError
from distir_relax.integrations.adapters import adapt
from tests.composition.features import FEATURES, GENERATION, TRAINING, Apart, Feature, Overlap, Setup, together

WORDS, LENGTH, ROWS, STEPS, TOKENS = 61, 13, 5, 3, 7
PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
_SMALL: dict[str, Any] = {
    "num_hidden_layers": 4, "num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": WORDS, "initializer_range": 0.2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """What came of two features: ``runs``, ``refused`` with the error, ``one of`` with what both set, ``apart``, or
    ``wrong``."""

    one: str
    other: str
    result: str
    text: str = ""


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Iterate over all pairs, of each feature with itself too."""
    return combinations_with_replacement(FEATURES, 2)


def tried(one: Feature, other: Feature) -> Cell:
    """Run two features together on the ranks of their strategy, as threads, and compare with one device."""
    names = one.name, other.name
    try:
        setup = together(one, other)
    except Overlap as overlap:
        return Cell(*names, "one of", str(overlap))
    except Apart:
        return Cell(*names, "apart")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _trained(setup) if setup.run == TRAINING else _generated(setup)
    except DistIRError as error:
        return Cell(*names, "refused", str(error).splitlines()[0])
    except Exception as error:
        return Cell(*names, "wrong", f"{type(error).__name__}: {error}")
    expected = _expected(setup)
    text = _difference(found, expected, setup)
    return Cell(*names, "wrong" if text else "runs", text or f"{setup.run}, {setup.devices} devices")


def _expected(setup: Setup) -> Any:
    """The result of one device: with the same precision and lengths, without all that only distributes."""
    kept = {name: value for name, value in setup.arguments.items() if name in ("precision", "averaging")}
    others = {name: value for name, value in setup.others.items() if name != "elastic"}
    return _on_one_device(setup.run, tuple(kept.items()), tuple(others.items()))


@cache
def _on_one_device(run: str, arguments: tuple[tuple[str, Any], ...], others: tuple[tuple[str, Any], ...]) -> Any:
    setup = Setup(run, "1/1/1/1", 1, dict(arguments), dict(others))
    return _trained(setup) if run == TRAINING else _generated(setup)


def _difference(found: Any, expected: Any, setup: Setup) -> str:
    """Return how results differ, or nothing."""
    if setup.run != TRAINING:
        return "" if found == expected else f"tokens {found}, expected {expected}"
    # Losses of these models are float32, and products of bf16 have 8 bits.
    loose = setup.arguments.get("precision") == "bf16"
    for name in expected:
        close = torch.allclose(found[name], expected[name], rtol=0.05 if loose else 1e-5, atol=0.05 if loose else 1e-6)
        if not close:
            return f"{name} differs by {float((found[name] - expected[name]).abs().max()):.2g}"
    return ""


# ------------------------------------------------------------------------------------------------------------- training


def _trained(setup: Setup) -> dict[str, torch.Tensor]:
    """Return the losses of steps, and the trained parameters after them."""
    step, batches = _step(setup), _batches(setup.others)
    if setup.others.get("elastic"):
        losses, step = _resumed(setup, step, batches)
    else:
        losses = [float(step(batch)) for batch in batches]
    found = {"losses": torch.tensor(losses, dtype=torch.float64), **step.parameters()}
    if "averaging" in setup.arguments:
        found |= {f"average of {name}": value for name, value in step.parameters(averaged=True).items()}
    return found


def _step(setup: Setup, strategy: str = "") -> dr.TrainingStep:
    model = _model(setup)
    batch = _batches(setup.others)[0]
    more: dict[str, Any] = {}
    if "lengths" in setup.others:
        length = Dim("t", min=4, max=32)
        # A mask has rows and keys after the heads.
        more["dynamic_shapes"] = {
            name: dict.fromkeys(range(1, x.dim()) if x.dim() < 3 else (2, 3), length) for name, x in batch.items()
        }
    return dr.compile_training(
        model.train(), optimizer=dr.optim.SGD(0.1, momentum=0.9), example_batch=batch,
        strategy=strategy or setup.strategy,
        **more, **setup.arguments,
    )  # fmt: skip


def _resumed(
    setup: Setup, step: dr.TrainingStep, batches: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[list[float], dr.TrainingStep]:
    """Train until a checkpoint, and go on with a strategy of another number of devices."""
    losses: list[float] = []

    class Losses(dr.callbacks.Callback):
        def done(self, result: Any) -> None:
            losses.append(result.loss)

    with tempfile.TemporaryDirectory() as folder:
        dr.train(step, list(batches), steps=2, checkpoint=folder, callbacks=[Losses()])
        other = _step(setup, "3/1/1/1" if setup.devices == 2 else "1/1/1/1")
        dr.train(other, list(batches), steps=len(batches), checkpoint=folder, resume="last", callbacks=[Losses()])
    return losses, other


@cache
def _all_batches(packed: bool, lengths: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in lengths:
        if packed:
            documents = [
                torch.randint(1, WORDS, (n,), generator=generator) for n in [length, 3, length - 3, *[length // 2] * 6]
            ]
            made = dr.pack(documents, length, mask=True)
            batches.append(
                {name: made[name][:ROWS] for name in ("input_ids", "labels", "position_ids", "attention_mask")}
            )
        else:
            ids = torch.randint(0, WORDS, (ROWS, length), generator=generator)
            batches.append({"input_ids": ids, "labels": ids})
    return batches


def _batches(others: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    return _all_batches(others.get("batch") == "packed", others.get("lengths", (LENGTH,) * STEPS))


# ----------------------------------------------------------------------------------------------------------- generation


def _generated(setup: Setup) -> list[list[int]]:
    """Return the tokens of prompts of different lengths."""
    generation = dr.compile_generation(_model(setup).eval(), max_length=40, strategy=setup.strategy, **setup.arguments)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, WORDS, (n,), generator=generator).tolist() for n in setup.others.get("lengths", (13, 5))
    ]
    if setup.run == GENERATION:
        return [generation.generate(prompt, TOKENS).tolist() for prompt in prompts]
    with generation.engine() as engine:
        requests = [engine.submit(prompt, TOKENS) for prompt in prompts]
        engine.run()
    return [list(request.tokens) for request in requests]


def _model(setup: Setup) -> Any:
    torch.manual_seed(0)
    has_experts = setup.others.get("model") == "experts"
    if has_experts:
        config: Any = transformers.MixtralConfig(**_SMALL, num_local_experts=3, num_experts_per_tok=2)
        model: Any = transformers.MixtralForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL))
    model.config.use_cache = False
    model.generation_config.eos_token_id = None
    if rank := setup.others.get("adapters"):
        adapt(model, rank)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2)
    # Experts in one product have no float64 in torch.
    return model if has_experts or "precision" in setup.arguments else model.double()


# ---------------------------------------------------------------------------------------------------------------- table


_INTRODUCTION = """# Features together

Each pair of these features, tried by `make composition` ([tests/composition](../tests/composition)): a Llama, or a
Mixtral, of 4 layers and 5 heads on 2 to 6 ranks of which many have uneven parts, 5 texts of 13 tokens. It is trained
for 3 steps, or continues prompts, alone or from an engine; losses, parameters and tokens are those of one device,
within rounding. The suite tries some of the pairs each time.

`+` is such a pair. `=` are two values of one option or degree, of which a plan has one. `-` never meet: one belongs to
trainings, the other to plans that generate. A letter is a refusal, quoted below. Options of training, such as ZeRO,
change nothing of a plan that generates.
"""


def page(cells: Sequence[Cell]) -> str:
    """Return the page of all cells. Raises ValueError if one is wrong."""
    found = {(cell.one, cell.other): cell for cell in cells}
    reasons: dict[str, str] = {}
    width = max(len(feature.name) for feature in FEATURES)
    numbers = range(1, len(FEATURES) + 1)
    lines = [" " * (width + 4) + "".join(f"{number:3}" for number in numbers)]
    for number, other in zip(numbers, FEATURES, strict=True):
        symbols = [_symbol(found[one.name, other.name], reasons) for one in FEATURES[:number]]
        lines.append(f"{number:2}  {other.name:{width}}" + "".join(f"{symbol:>3}" for symbol in symbols))
    table = "\n".join(f"    {line}" for line in lines)
    listed = "\n".join(f"- `{letter}` {reason}" for reason, letter in reasons.items())
    return f"{_INTRODUCTION}\n{table}\n\n## Refusals\n\n{listed}\n"


def read_page(text: str) -> dict[tuple[str, str], str]:
    """Return the cells of a page: ``+``, ``=``, or the reason of a refusal."""
    reasons = dict(line[3:].split("` ", 1) for line in text.splitlines() if line.startswith("- `"))
    rows = [line.split() for line in text.splitlines() if line.startswith("    ")][1:]
    found = {}
    for number, (feature, row) in enumerate(zip(FEATURES, rows, strict=True), 1):
        for one, symbol in zip(FEATURES, row[-number:], strict=False):
            found[one.name, feature.name] = reasons.get(symbol, symbol)
    return found


def shown(cell: Cell) -> str:
    """Return what a page says of a cell. Raises ValueError if it is wrong."""
    if cell.result == "wrong":
        raise ValueError(f"{cell.one} x {cell.other}: {cell.text}")
    if cell.result == "refused":
        # Without the strategy: each pair has another one.
        return re.sub(r"[0-9]+(/[0-9]+){3}[^ ]*", "D/T/P/K", cell.text.removeprefix("llamaforcausallm: "))
    return {"runs": "+", "one of": "=", "apart": "-"}[cell.result]


def _symbol(cell: Cell, reasons: dict[str, str]) -> str:
    text = shown(cell)
    return text if cell.result != "refused" else reasons.setdefault(text, "abcdefghijklmnopqrstuvwxyz"[len(reasons)])


def main() -> None:
    """Try all pairs, and write the page."""
    cells = []
    for one, other in pairs():
        cells.append(tried(one, other))
        print(f"{cells[-1].result:8} {one.name} x {other.name}: {cells[-1].text}", flush=True)
    PAGE.write_text(page(cells))


if __name__ == "__main__":
    main()
