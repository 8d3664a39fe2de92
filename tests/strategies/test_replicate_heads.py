"""Query heads are divided apart from the key/value heads that groups of them share, where that is faster."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import distir_relax as dr
from distir_relax.bundle import local_intervals, read_bundle
from distir_relax.ir import HeadPartition, parse_records, print_records
from distir_relax.report.explain import explain
from distir_relax.runtime.requests import Slot, ThreadRequests
from distir_relax.strategies.head_division import HeadDivision, divide_heads
from tests.incremental.language_models import VOCABULARY, with_large_weights
from tests.runtime import sequences_main
from tests.runtime.processes import mpirun

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LENGTH = 29


@cache
def model(kind: str, heads: int, groups: int, width: int = 6, layers: int = 1) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=heads * width, intermediate_size=2 * heads * width + 1,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
    )  # fmt: skip
    made = with_large_weights(getattr(transformers, f"{kind}ForCausalLM")(config).eval())
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return made


def generation(kind: str, heads: int, groups: int, strategy: str, **options: Any) -> dr.Generation:
    return dr.compile_generation(model(kind, heads, groups), strategy=strategy, max_length=LENGTH, **options)


def heads_of(plan: dr.Plan, weight: str) -> tuple[Sequence[int], ...] | None:
    """The heads of each tensor rank, None if they follow from the balance of a factor class."""
    records = [r for r in plan.modules["sharded"].records if isinstance(r, HeadPartition)]
    return next((record.heads for record in records if record.value.endswith(weight)), None)


def largest_part(plan: dr.Plan) -> int:
    """The most query heads of a rank, from the rows of its projection, of width 6."""
    manifest = plan.bundle(("torch",)).manifest
    weight = next(w for w in manifest.weights if w.name.endswith("layers.0.self_attn.q_proj.weight"))
    rows = [sum(b - a for a, b in local_intervals(weight, manifest.mesh, r)[0]) for r in range(manifest.mesh.size)]
    assert sum(rows) == weight.shape[0]
    return max(rows) // 6


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("kind", "heads", "groups", "strategy", "tail", "largest", "read"), [
    ("Llama", 9, 3, "1/2/1/1", "ragged", 5, ((0, 1), (1, 2))),
    ("Qwen2", 14, 2, "1/3/1/1", "pad", 5, ((0,), (0, 1), (1,))),
    ("Llama", 8, 2, "1/4/1/1", "ragged", 2, ((0,), (0,), (1,), (1,))),
    ("Qwen2", 14, 2, "1/5/1/1", "ragged", 3, ((0,), (0,), (0, 1), (1,), (1,))),
])  # fmt: skip
def test_steps_of_several_requests_give_the_logits_of_the_model(
    kind: str, heads: int, groups: int, strategy: str, tail: str, largest: int, read: tuple[tuple[int, ...], ...]
) -> None:
    compiled = generation(kind, heads, groups, strategy, tail=tail)
    assert heads_of(compiled.plan, "layers.0.self_attn.k_proj.weight") == read
    assert largest_part(compiled.plan) == largest < heads // groups * -(-groups // len(read))
    ids = torch.randint(VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(kind, heads, groups)(ids, use_cache=False).logits
    ranks = ThreadRequests(compiled.plan.bundle(("torch",)))
    # A prompt in one piece, one in two, and one token by token.
    chunks = {0: [13], 1: [6, 7], 2: [1] * 13}
    done = dict.fromkeys(chunks, 0)
    for sizes in itertools.zip_longest(*chunks.values()):
        slots = [
            Slot(n, done[n], ids[n, done[n] : done[n] + size].tolist(), size, 13)
            for n, size in enumerate(sizes)
            if size
        ]
        wanted = [expected[slot.request, slot.past : slot.past + len(slot.tokens)] for slot in slots]
        torch.testing.assert_close(ranks.logits(slots), torch.cat(wanted), rtol=1e-4, atol=1e-4)
        done = {slot.request: slot.past + len(slot.tokens) for slot in slots}
    ranks.close()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("strategy", "precision"), [("1/2/2/1", "int8"), ("2/2/1/1", "int4")])
def test_tokens_are_those_of_one_rank(strategy: str, precision: str) -> None:
    """With quantized rows of heads, data parallelism and pipeline stages."""
    made = model("Qwen2", 9, 3, 32, layers=2)
    prompts = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))
    tokens = []
    for degrees in ("1/1/1/1", strategy):
        compiled = dr.compile_generation(made, strategy=degrees, max_length=LENGTH, precision=precision)
        tokens.append(compiled.generate(prompts, max_new_tokens=7))
    assert heads_of(compiled.plan, ".k_proj.weight.scales") == ((0, 1), (1, 2))
    assert tokens[0].tolist() == tokens[1].tolist()


@pytest.mark.sweep
@pytest.mark.mpirun
@pytest.mark.timeout(90)
def test_processes_give_the_tokens_of_the_model(tmp_path: Path) -> None:
    """By steps of requests, where all ranks can; else all run the program of the batch."""
    made = model("Llama", 9, 3)
    compiled = generation("Llama", 9, 3, "1/2/1/1", max_batch=2)
    assert heads_of(compiled.plan, "layers.0.self_attn.k_proj.weight") == ((0, 1), (1, 2))
    path = compiled.plan.save(tmp_path / "m.dist", ("torch",))
    done = mpirun(2, Path(sequences_main.__file__), path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ids = torch.tensor(sequences_main.PROMPTS)
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 0}
    with torch.no_grad():
        expected = made.generate(ids, max_new_tokens=9, do_sample=False, **options)[:, ids.shape[1] :].tolist()
    assert found["all"] == [[["SequenceProgram", 1]] * 2, expected]
    assert found["one cannot"] == [[["TorchProgram", 0]] * 2, expected]
    assert found["one fails"] == found["one fails early"] == ["no room (on rank 1 of 2)"] * 2


def test_a_forward_of_the_model_has_its_logits_and_explains_its_heads(tmp_path: Any) -> None:
    """In a program with a causal mask, whose bundle is read from files."""
    ids = torch.randint(VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(3))
    made = model("Qwen2", 14, 2)
    plan = dr.compile(made, (ids,), {"use_cache": False}, strategy="1/4/1/1")
    with torch.no_grad():
        expected = made(ids, use_cache=False).logits
    torch.testing.assert_close(plan(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    text = "the tensor ranks have key/value heads 0 | 0 | 1 | 1 of %model.layers.0.self_attn.k_proj.weight"
    bundle = read_bundle(plan.save(tmp_path / "model.dist", ("torch",)))
    assert "  heads    key/value heads 0 | 0 | 1 | 1; query heads 0 to 3 | 4 to 6 | 7 to 10 | 11 to 13" in str(plan)
    assert text in explain(bundle, "model.layers.0.self_attn.k_proj.weight")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("pattern", "placements"), [
    ("*.k_proj.weight", "R, S[0]"), ("*.o_proj.weight", "R, R"), ("*.self_attn.v_proj.bias", "R, R"),
])  # fmt: skip
def test_annotated_heads_stay_in_groups(pattern: str, placements: str) -> None:
    compiled = generation("Qwen2", 14, 2, "1/4/1/1", shardings={pattern: placements})
    assert heads_of(compiled.plan, "") is None


@pytest.mark.sweep
def test_weights_that_are_sliced_along_the_data_axis_too_stay_in_groups() -> None:
    assert heads_of(generation("Llama", 8, 2, "2/4/1/1,zero=3").plan, "") is None


def test_trained_heads_stay_in_groups() -> None:
    """The gradient of a key/value head would be a sum over its copies."""
    ids = torch.randint(VOCABULARY, (2, 7))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    step = dr.compile_training(
        model("Llama", 8, 2), optimizer=dr.optim.SGD(0.1), example_batch=batch, strategy="1/4/1/1"
    )
    assert heads_of(step.plan, "") is None


def test_the_division_has_the_least_cost() -> None:
    """Of all divisions into consecutive query heads, by enumeration."""
    draw = random.Random(0)
    for _ in range(60):
        each, groups, ranks = draw.randint(2, 4), draw.randint(2, 3), draw.randint(2, 5)
        heads, costs = each * groups, (draw.choice((1.0, 2.5)), draw.choice((0.3, 1.0, 4.0)))
        division = divide_heads(heads, groups, ranks, *costs)
        assert (sum(division.sizes), len(division.sizes), sum(division.queries)) == (heads, ranks, heads)
        ends = itertools.combinations_with_replacement(range(heads + 1), ranks - 1)
        sizes = (tuple(b - a for a, b in itertools.pairwise((0, *end, heads))) for end in ends)
        least = min(HeadDivision(size, each).slowest(*costs) for size in sizes)
        assert division.slowest(*costs) == pytest.approx(least)


def test_a_division_of_heads() -> None:
    division = HeadDivision((5, 4), 3)
    assert (division.copies, division.queries) == ((0, 1, 1, 2), (3, 2, 1, 3))
    assert divide_heads(9, 3, 2, 1.0, 1.0) == division
    # A key/value head costs more than the query heads that it lets move.
    assert divide_heads(8, 2, 3, 1.0, 9.0).sizes == (4, 4, 0)
    record = HeadPartition("w", 0, (2, 0, 1), (0, 1, 2), 3)
    assert parse_records(print_records([record])) == (record,)
    assert str(record) == "the tensor ranks have key/value heads 0 to 1 | none | 2 of %w"
