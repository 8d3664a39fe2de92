"""Language models cut into random chunks: incremental programs on several ranks give the logits of the whole sequence.

``python -m tests.chunk_acceptance [--ways N] [WORD ...]`` takes all models, or those whose name has one of the words,
on 1, 2, 3 and 5 ranks, by tensor and by pipeline, and cuts a sequence in N random ways, 200 by default. It prints a
line for each layout, and exits 1 if the logits of one differ from the model's.
`tests/incremental/test_encoder_decoders.py` does so for a few layouts and ways.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import distir_relax as dr
from distir_relax.compiler.compile import Plan, compile_source
from distir_relax.compiler.language_model import LengthLimits, encoder_input, import_language_model
from distir_relax.compiler.options import complete
from distir_relax.compiler.source import Source
from distir_relax.frontends.imported_model import Imported
from distir_relax.incremental import ComputeOnce, EachCall, FirstCall, Incremental
from distir_relax.interpret.causality import check_causality
from distir_relax.interpret.length_dependence import check_length_independence
from tests.incremental import language_models
from tests.incremental.chunks import cuts
from tests.incremental.language_models import ENCODER_DECODERS, LENGTH, MODELS, STATE_SPACE, VOCABULARY

STRATEGIES = ("1/1/1/1", "1/2/1/1", "1/1/2/1", "1/3/1/1", "1/1/3/1", "1/5/1/1", "1/1/5/1")
BATCH, SOURCE = 2, 11
TOLERANCE = 5e-5
"""Largest difference of logits, relative to the largest. A state that is wrong by 1 % gives 1e-2; T5 rounds most."""


@dataclass(frozen=True)
class Whole:
    """A sequence of a model: its inputs by name, that of the tokens first, and the logits of all positions."""

    tokens: str
    inputs: dict[str, torch.Tensor]
    logits: torch.Tensor


@cache
def model(name: str) -> Any:
    """Return a model with large weights."""
    if name in ENCODER_DECODERS:
        return language_models.encoder_decoder(name)
    return language_models.with_large_weights(language_models.language_model(name))


@cache
def imported(name: str) -> Imported:
    """Return the incremental program of a model."""
    encoder = encoder_input(model(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = import_language_model(model(name), LengthLimits(64, 4, 64), encoder)
    check_causality(found.module, found.tensors, "sequence")
    check_length_independence(found.module, found.tensors, "sequence")
    module = Incremental().run(found.module)
    return replace(found, module=module if encoder is None else ComputeOnce((encoder.name,)).run(module))


@cache
def whole(name: str) -> Whole:
    """Return a sequence with the model's own logits."""
    encoder = encoder_input(model(name))
    tokens = "input_ids" if encoder is None else "decoder_input_ids"
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = {tokens: ids}
    if encoder is not None:
        inputs[encoder.name] = language_models.encoder_input(name, BATCH, SOURCE)
    with torch.no_grad():
        return Whole(tokens, inputs, model(name)(**inputs, use_cache=False).logits)


def compiled(name: str, strategy: str) -> Plan:
    """Compile the incremental program of a model, whose logits are those of all new tokens."""
    plan = compile_source(Source(imported(name), complete({"strategy": strategy}, "model")))
    encoder = encoder_input(model(name))
    if encoder is None:
        return plan
    return replace(plan.part(EachCall()), encoder=plan.part(FirstCall()), start=encoder.start)


def check_cuts(name: str, strategy: str, ways: int) -> float:
    """Run a sequence in random chunks; return the largest difference, relative to the largest logit.

    Raises AssertionError for logits that differ by more than `TOLERANCE`.
    """
    session, sequence = compiled(name, strategy).session(), whole(name)
    ids = sequence.inputs[sequence.tokens]
    encoded = {key: x for key, x in sequence.inputs.items() if key != sequence.tokens}
    scale, worst = float(sequence.logits.abs().max()), 0.0
    for seed in range(ways):
        parts = []
        for first, last in itertools.pairwise(cuts(LENGTH, seed)):
            inputs = {sequence.tokens: ids[:, first:last], **({} if first else encoded)}
            parts.append(session(inputs, outputs=["logits"], past=first)["logits"])
        logits = torch.cat(parts, 1)
        difference = float((logits - sequence.logits).abs().max()) / scale
        assert difference < TOLERANCE, f"way {seed}: the logits differ by {difference:.1e} of the largest"
        worst = max(worst, difference)
    return worst


def main(words: list[str]) -> int:
    """Check all models, or those with one of the words, and print how each layout of them ends."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    ways = 200
    if words[:1] == ["--ways"]:
        ways, words = int(words[1]), words[2:]
    failed, begun = 0, time.perf_counter()
    for name in (*MODELS, *STATE_SPACE, *ENCODER_DECODERS):
        if words and not any(word in name for word in words):
            continue
        for strategy in STRATEGIES:
            start = time.perf_counter()
            try:
                verdict = f"{ways} ways, logits within {check_cuts(name, strategy, ways):.1e}"
            except Exception as error:
                failed += 1
                verdict = "failed: " + "".join(traceback.format_exception(error, limit=-3))
            print(f"{name}, {strategy}: {verdict} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{failed} failed, {time.perf_counter() - begun:.0f} s, distir-relax {dr.__version__}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
