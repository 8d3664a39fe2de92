"""Bugs of distributed training that others have published, made again in plans: each is found in seconds, and named.

The kinds are those of Jiang et al., TTrace: Lightweight Error Checking and Diagnosis for Distributed Training, 2025
(silent bugs of Megatron-LM), and of Lu et al., TrainVerify, 2025: wrong masks, groups, scales, slices, missing sums,
stale weights. Each changes one place of a plan, as the bug did.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

import distir_relax as dr
from distir_relax.errors import VerificationError
from distir_relax.ir import Module, parse, print_module, verify
from distir_relax.ops import check
from distir_relax.proof import check_model, check_projection, check_schedule, prove
from tests.proof.language_model import step

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("1/3/1/1", {}),
    "sequence": ("1/3/1/1,sequence_parallel=on", {"overlap": 0.0}),
    "data": ("3/1/1/1", {"clip_norm": 1.0, "overlap": 0.0}),
    "data and tensor": ("3/3/1/1", {}),
    "ZeRO": ("3/1/1/2,zero=3", {"clip_norm": 1.0}),
    "recomputation": ("1/1/1/2,checkpoint=block", {}),
    "pipeline": ("1/1/2/3", {}),
    "bfloat16": ("2/1/1/1", {"precision": "bf16-true"}),
}


@cache
def plan(name: str) -> dr.Plan:
    strategy, options = PLANS[name]
    return step(strategy, **options)


@dataclass(frozen=True)
class Bug:
    """A change of a plan's program at a stage: the first match of a pattern becomes `new`; the error has `message`."""

    plan: str
    stage: str
    pattern: str
    new: str
    message: str


BUGS: dict[str, Bug] = {
    # Megatron-LM: rows of words beyond the rank's own were not masked.
    "wrong mask of the words of a rank": Bug(
        "tensor", "distributed", r"= where\(%embedding\.partial_10, %(\S+), %(\S+)\)",
        r"= where(%embedding.partial_10, %\1, %\1)", r"embedding|words",
    ),
    "recomputation from another input": Bug(
        "recomputation", "sharded", r"(?s)(nn\.gelu\(%linear_2_1\).*?nn\.gelu\()%linear_2_1\)", r"\1%linear_2)",
        r"nn\.gelu",
    ),
    "the loss scaled by the wrong number of ranks": Bug(
        "data", "distributed", r"(%cross_entropy_loss_14: [^\n]*) = all_reduce\(%(\S+)\)[^\n]*", r"\1 = abs(%\2)",
        r"= abs",
    ),
    "gradients averaged where the loss is a mean already": Bug(
        "data", "distributed", r'(%add_3\.linear\.grad: [^\n]*axis="data", op=)"sum"', r'\1"mean"', r"reduces by mean",
    ),
    "tied words trained by one of their two uses": Bug(
        "tensor", "sharded", r"= add\(%(layer_norm_4\.grad_1), %(words\.weight\.sharded\.grad_2)\)",
        r"= add(%\2, %\2)", r"words\.weight",
    ),
    "norm weights that ranks of a sequence do not sum": Bug(
        "sequence", "distributed", r"(%add_1\.x\.grad: [^\n]*) = all_reduce\(%(\S+)\)[^\n]*", r"\1 = abs(%\2)",
        r"= abs.*is not the model's",
    ),
    "a sum over the wrong group": Bug(
        "data and tensor", "distributed", r'(= all_reduce\([^\n]*axis=)"tensor"(, op="sum")', r'\1"data"\2',
        r"no term of a sum",
    ),
    "attention's gradient with keys for queries": Bug(
        "tensor", "sharded", r"(= attention_grad\w*\()%(\S+), %(\S+),", r"\1%\3, %\2,", r"attention_grad",
    ),
    "weights of the step before after an update": Bug(
        "ZeRO", "sharded", r'"words\.weight\.new": %[\w.]+', '"words.weight.new": %words.weight', r"words\.weight\.new",
    ),
    "two stages with the same layer": Bug(
        "pipeline", "distributed", r"(%add_1\.1_1: [^\n]*= send\()%add_1\.1\)", r"\1%add_1.0)", r"no such op",
    ),
    "a result read before its transfer has ended": Bug(
        "ZeRO", "ranked", r'"output": %cross_entropy_loss_16\b', '"output": %cross_entropy_loss_16.started', r"output",
    ),
    "a cast to the wrong dtype and back": Bug(
        "bfloat16", "sharded", r"(%norm\.weight\.bfloat16: [^\n]*)= astype\(%norm\.weight\)",
        r"\1= astype(%norm.bias)", r"norm\.bias|another value",
    ),
    "a slice of the wrong rank": Bug(
        "ZeRO", "distributed", r"(= all_gather\([^\n]*sizes=)\(7, 6, 6\)", r"\1(6, 7, 6)", r"sizes",
    ),
    "the norm of gradients without one of them": Bug(
        "data", "sharded", r"= square\(%add_3\.linear\.grad\)", "= square(%add_1.linear.grad)", r"gradient_norm",
    ),
}  # fmt: skip


def with_bug(made: dr.Plan, bug: Bug) -> Module:
    """The program of the bug's stage, with the bug."""
    module = made.modules[bug.stage]
    text = print_module(module)
    changed, count = re.subn(bug.pattern, bug.new, text, count=1)
    assert count == 1, bug.pattern
    assert changed != text
    return replace(parse(changed), records=module.records)


def compare(made: dr.Plan, stage: str, module: Module) -> None:
    """Compare a program with the stage before it, from which a compiler with the bug would have made it."""
    verify(module, check)
    if stage == "sharded":
        check_model(made.imported.module, module)
    elif stage == "distributed":
        check_schedule(made.modules["sharded"], module)
    else:
        check_projection(made.modules["distributed"], module)


@pytest.mark.parametrize("name", BUGS)
def test_it_is_found(name: str) -> None:
    bug = BUGS[name]
    made = plan(bug.plan)
    module = with_bug(made, bug)
    start = time.perf_counter()
    with pytest.raises(VerificationError, match=bug.message):
        compare(made, bug.stage, module)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("name", PLANS)
def test_without_it_the_plan_is_right(name: str) -> None:
    made = plan(name)
    modules = made.modules
    proof = prove(modules["ranked"], modules["distributed"], modules["sharded"], made.imported.module)
    assert not any(proof.statements.values())
