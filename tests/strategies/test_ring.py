"""Devices that share a sequence exchange keys in turns (``ring``): results, parts that are sent, when it is chosen."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import distir_relax as dr
from distir_relax.cost.profile import load_profile
from distir_relax.ir import Op, inlined_main
from distir_relax.lowering import overlap as OVERLAP
from distir_relax.sharding import factor_selection
from distir_relax.simulation.simulator import simulate_module
from distir_relax.strategies import balanced_rows
from tests.strategies.test_context import language_model, losses
from tests.training.test_attention_training import trained


def distributed_ops(plan: dr.Plan) -> list[Op]:
    return [op for function in plan.modules["distributed"].functions for op in function.ops]


@pytest.mark.parametrize("balanced", [1.05, 1.0], ids=["", "in turns"])
@pytest.mark.parametrize(
    "strategy",
    [
        "1/1/1/1,context=5", "1/2/1/1,context=3", "2/1/1/1,context=2,zero=3",
        "2/1/1/2,context=2,zero=2,checkpoint=block", "1/1/2/2,context=2",
    ],
)  # fmt: skip
def test_every_mask_with_other_options(strategy: str, balanced: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `test_context`; keys are gathered for a mask of each sample, and for a bias, alone."""
    monkeypatch.setattr(balanced_rows, "_BALANCED", balanced)
    step = trained(torch.float64, strategy=f"{strategy},ring=on")
    counts = Counter(op.name for op in distributed_ops(step.plan))
    assert counts["resplit"]
    assert counts["attention_part"]


def test_gradients_of_split_keys_take_what_the_forward_has_computed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.query(x), memory, memory).tanh().square().mean()

    torch.manual_seed(0)
    batch = {name: torch.randn(2, 3, 13, 4, dtype=torch.float64) for name in ("x", "memory")}
    model = Model()
    found = []
    for mesh, marks in ((1, {}), (5, {"memory": "S[2]"})):
        step = dr.compile_training(
            model, optimizer=dr.optim.SGD(1.0), example_batch=batch, mesh=mesh, shardings=marks, check=True
        )
        found.append([float(step(batch)) for _ in range(3)])
    assert found[1] == pytest.approx(found[0], abs=1e-13)
    counts = Counter(op.name for op in distributed_ops(step.plan))
    assert (counts["attention_part"], counts["attention_part_grad"]) == (1, 1)


@pytest.mark.parametrize("kind", ["learned positions", "rotary, grouped heads"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_parts_are_attended_to_again_only_where_blocks_are_recomputed(recomputed: bool, kind: str) -> None:
    model, ids = language_model(kind), torch.zeros(1, 13, dtype=torch.int64)
    step = dr.compile_training(
        model, optimizer=dr.optim.SGD(lr=0.3), example_batch={"input_ids": ids, "labels": ids},
        strategy="1/1/1/1,context=3,ring=on" + ",checkpoint=block" * recomputed,
    )  # fmt: skip
    counts = Counter(op.name for op in inlined_main(step.plan.modules["distributed"]).function.ops)
    assert (counts["attention_part"], counts["attention_part_grad"]) == (3 * 2 * (1 + recomputed), 3 * 2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["learned positions", "rotary, grouped heads", "windows, soft caps", "sinks, experts"])
def test_language_models_learn_as_on_one_device(kind: str) -> None:
    assert losses(kind, strategy="1/1/1/1,context=3,ring=on", check=True) == pytest.approx(losses(kind), abs=3e-6)


class Attention(nn.Module):
    """Each row attends to itself and to the `window` rows before it."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        row, column = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
        mask = (column <= row) & (row - column <= self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize(
    ("window", "cut"), product([2, 5, 100], ["S[2]", "S[2: 2|0|5|1|5]", "S[2: 2|2|1|3|0 + 1|1|1|1|1]"])
)
def test_parts_that_no_row_attends_to_are_not_sent(
    window: int, cut: str, tail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair of devices exchanges keys if and only if some row of one attends to some key of the other."""
    length, ranks = 13, 5
    operands = tuple(torch.randn(2, 3, length, 4, dtype=torch.float64) for _ in range(3))
    model = Attention(window)
    # As if turns took no time.
    monkeypatch.setattr(factor_selection, "_TURN", -1e12)
    plan = dr.compile(model, operands, mesh=ranks, shardings=dict.fromkeys("qkv", cut), tail=tail, check=True)
    torch.testing.assert_close(plan(*operands), model(*operands), rtol=1e-13, atol=1e-13)
    ops = distributed_ops(plan)
    assert not any(op.name == "all_gather" for op in ops)
    placement = plan.modules["sharded"].main.inputs[0].value.dtensor.placements[0]
    held = [[n for start, stop in placement.cut.intervals(rank) for n in range(start, stop)] for rank in range(ranks)]
    needed = {
        (own, other)
        for own, other in product(range(ranks), range(ranks))
        if own != other and any(0 <= row - key <= window for row, key in product(held[own], held[other]))
    }
    sent = [op.attrs["pieces"] for op in ops if op.name == "resplit"]
    pairs = Counter(
        (receiver, sender) for pieces in sent for sender, row in enumerate(pieces)
        for receiver, count in enumerate(row) if count
    )  # fmt: skip
    # Keys and values.
    assert pairs == dict.fromkeys(needed, 2)


@pytest.mark.parametrize(("dtype", "overlap"), [(torch.float64, 0.0), (torch.float64, 4.0), (torch.bfloat16, 4.0)])
@pytest.mark.parametrize(("window", "cut"), product([2, 5], ["S[2]", "S[2: 4|0|5|1|3]"]))
def test_gradients_return_to_the_owners_of_keys(
    window: int, cut: str, dtype: torch.dtype, overlap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factor_selection, "_TURN", -1e12)
    monkeypatch.setattr(OVERLAP, "_LEAST_WORK", 1)
    torch.manual_seed(0)
    weights = nn.ParameterDict({name: torch.randn(2, 3, 13, 4, dtype=dtype) for name in "qkv"})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of, self.attention = weights, Attention(window)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return (self.attention(self.of["q"], self.of["k"], self.of["v"]) * y).sum()  # type: ignore[no-any-return]

    y = torch.randn(2, 3, 13, 4, dtype=dtype)
    step = dr.compile_training(
        Model(), optimizer=dr.optim.SGD(lr=1.0), example_batch=(y,), mesh=5, check=True, overlap=overlap,
        shardings={f"of.{name}": cut for name in "qkv"} | {"y": cut},
    )  # fmt: skip
    before = {name: value.detach().clone() for name, value in weights.items()}
    Model()(y).backward()
    step(y)
    for name, value in weights.items():
        expected = before[name] - value.grad
        tolerance = 1e-13 if dtype == torch.float64 else 0.03
        torch.testing.assert_close(step.parameters()[f"of.{name}"], expected, rtol=tolerance, atol=tolerance)
    ops = Counter(op.name for op in distributed_ops(step.plan))
    assert not ops["all_gather"] + ops["reduce_scatter"]
    assert bool(ops["wait"]) is bool(overlap)


@pytest.mark.parametrize(
    ("heads", "length", "devices", "expected"),
    [
        (7, 128, 4, "all_gather"), (7, 1024, 4, "resplit"), (7, 8192, 4, "all_gather"), (7, 4096, 2, "all_gather"),
        (8, 128, 4, "all_to_all"), (8, 1024, 4, "resplit"), (8, 8192, 4, "all_to_all"),
    ],
)  # fmt: skip
def test_turns_are_taken_where_they_cost_less(heads: int, length: int, devices: int, expected: str) -> None:
    """Few bytes are gathered sooner than sent in turns; beside many operations the exchange takes little time.

    Heads that divide evenly are fewer bytes than keys, but are not sent while a device computes.
    """

    class Model(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    operands = tuple(torch.empty(8, heads, length, 64, device="meta") for _ in range(3))
    plan = dr.compile(Model(), operands, mesh=devices, shardings=dict.fromkeys("qkv", "S[2]"))
    names = {op.name for op in distributed_ops(plan)}
    assert names & {"all_gather", "all_to_all", "resplit"} == {expected}


def test_no_device_has_all_keys() -> None:
    """Of two layers on 16 devices: keys and values of a layer are most of what a device has, if it gathers them.

    Heads are 16 wide. The forward's normalizers, which are kept, are two numbers for each row and head.
    """
    ids = torch.zeros(1, 4001, dtype=torch.int64)
    model = language_model("learned positions", n_positions=4096, n_embd=96).float()
    batch = {"input_ids": ids, "labels": ids}

    def activations(strategy: str) -> float:
        plan = dr.compile_training(model, optimizer=dr.optim.SGD(lr=0.3), example_batch=batch, strategy=strategy).plan
        distributed = plan.modules["distributed"]
        machine = load_profile("cpu-local").with_devices(distributed.meshes[0].size)
        return max(peak.split[1] for peak in simulate_module(distributed, machine).peaks)

    gathered, in_turns = (activations(f"1/1/1/1,context=16,ring={kind}") for kind in ("off", "on"))
    share = activations("1/1/1/1") / 16
    assert gathered > 2.5 * share
    assert in_turns < 1.3 * share


def test_plans_of_real_sizes_are_proved() -> None:
    """A layer of a Llama of 8 billion parameters on 128,000 tokens, whose rows take turns on 16 devices."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=1 << 17, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, 128_000, dtype=torch.int64)
    plan = dr.compile(model, (ids,), strategy="1/1/1/1,context=16,ring=on", check=True)
    largest = max(v.placed.local(0).elements for op in distributed_ops(plan) for v in op.results)
    assert largest == 128_000 // 16 * 128256
