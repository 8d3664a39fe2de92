"""Experts with weights of 8 and 4 bits: stacks of weights that grouped products use, on any ranks."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.compiler.compile import compile_source
from distir_relax.compiler.options import complete
from distir_relax.compiler.source import Source
from distir_relax.cost.roofline import op_work
from distir_relax.errors import DistIRError
from distir_relax.frontends.imported_model import snapshot
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.ir import TensorType
from distir_relax.kernels.quantized import dequantize, linear, quantize_int4, quantize_int8, quantize_int8_groups
from distir_relax.layout import DTYPES
from distir_relax.ops import infer, lookup
from distir_relax.precision import quantize_weights
from distir_relax.precision.quantized_tensors import quantized_tensors
from distir_relax.proof import prove
from distir_relax.runtime.requests import Slot, ThreadRequests

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(120)]
QUANTIZE: dict[str, Any] = {
    "int8": quantize_int8_groups, "int8-channel": quantize_int8, "int4": quantize_int4,
}  # fmt: skip
SIZES = {"vocab_size": 127, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
         "max_position_embeddings": 64, "num_experts_per_tok": 2}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 3}
MODELS = {
    "mixtral": ("Mixtral", {**GROUPED, "intermediate_size": 160, "num_local_experts": 5}),
    "qwen3_moe": ("Qwen3Moe", {**GROUPED, "head_dim": 16, "intermediate_size": 160, "moe_intermediate_size": 96,
                               "num_experts": 7}),
    # A dense layer, experts that every token has, and those that it chooses.
    "deepseek_v3": ("DeepseekV3", {**SIZES, "num_key_value_heads": 6, "intermediate_size": 160, "n_group": 1,
                                   "moe_intermediate_size": 64, "n_routed_experts": 5, "topk_group": 1,
                                   "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
                                   "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}),
    # Weights of (experts, in, out), biases, and gates between the other outputs.
    "gpt_oss": ("GptOss", {**GROUPED, "head_dim": 16, "intermediate_size": 64, "num_local_experts": 5,
                           "sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
}  # fmt: skip
STACKS = ("gate_up_proj", "down_proj")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 126]])


@cache
def model(name: str) -> Any:
    torch.manual_seed(3)
    prefix, options = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**options)
    made = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        # Experts and outputs of unlike sizes, so that a scale in the wrong place shows.
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.linspace(0.5, 3.0, parameter.shape[-2])[:, None])
            if parameter.dim() == 3:
                parameter.mul_(torch.linspace(1, 2, len(parameter))[:, None, None])
    return made


def stacks_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if name.endswith(STACKS) and p.dim() == 3}


@cache
def dequantized(name: str, precision: str) -> Any:
    """The model with dequantized weights."""
    copy, quantize = deepcopy(model(name)), QUANTIZE[precision]
    with torch.no_grad():
        for parameter in stacks_of(copy).values():
            for matrix in parameter:
                of_outputs = matrix.t() if name == "gpt_oss" else matrix
                of_outputs.copy_(dequantize(*quantize(of_outputs.clone())))
        for module in copy.modules():
            if isinstance(module, nn.Linear) or type(module).__name__.endswith("Router"):
                module.weight.copy_(dequantize(*quantize(module.weight)))
    return copy


def expected_logits(name: str, precision: str) -> torch.Tensor:
    with torch.no_grad():
        return dequantized(name, precision)(IDS, use_cache=False).logits[0, -1:]


def logits(generation: dr.Generation) -> torch.Tensor:
    """The logits of the last position, in two chunks."""
    ranks = ThreadRequests(generation.plan.bundle(("torch",)))
    try:
        ranks.logits([Slot(0, 0, IDS[0, :5].tolist(), 0, 32)])
        return ranks.logits([Slot(0, 5, IDS[0, 5:].tolist(), 1, 32)])
    finally:
        ranks.close()


@pytest.fixture
def exact_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with the dequantized weight: inputs are not rounded."""
    monkeypatch.setattr(linear, "_kernel", lambda *arguments: None)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "strategy", "tail", "precision"),
    [
        ("mixtral", "1/1/1/1", "ragged", "int8"), ("mixtral", "1/3/1/1", "pad", "int4"),
        ("mixtral", "1/3/1/1,experts=tensor", "ragged", "int8-channel"), ("mixtral", "1/1/2/1", "ragged", "int4"),
        ("mixtral", "1/7/1/1,experts=tensor", "pad", "int4"), ("qwen3_moe", "1/5/1/1", "ragged", "int8"),
        ("qwen3_moe", "1/3/2/1,experts=tensor", "pad", "int4"),
        ("gpt_oss", "1/3/1/1", "ragged", "int4"), ("gpt_oss", "1/2/1/1,experts=tensor", "pad", "int8"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("exact_inputs")
def test_logits_are_those_of_the_dequantized_model(name: str, strategy: str, tail: str, precision: str) -> None:
    generation = dr.compile_generation(model(name), precision=precision, strategy=strategy, tail=tail)
    kinds = {weight.name for weight in generation.plan.bundle(("torch",)).manifest.weights}
    assert {f"{stack}.values" for stack in stacks_of(model(name))} <= kinds
    expected = expected_logits(name, precision)
    torch.testing.assert_close(logits(generation), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.usefixtures("exact_inputs")
def test_shared_and_routed_experts() -> None:
    """At one length: torch exports this model with any length in 20 seconds."""
    call = {"input_ids": IDS, "use_cache": False}
    plan = dr.compile(model("deepseek_v3"), (), call, precision="int4", strategy="1/3/1/1,experts=tensor")
    found = plan(**call).logits[0, -1:]
    expected = expected_logits("deepseek_v3", "int4")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.sweep
@pytest.mark.drawn(1)
@pytest.mark.parametrize("precision", QUANTIZE)
def test_rounded_inputs_change_little(precision: str) -> None:
    """By the native kernels, as for models without experts."""
    expected = expected_logits("mixtral", precision)
    found = logits(dr.compile_generation(model("mixtral"), precision=precision, strategy="1/3/1/1"))
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_tokens_are_those_of_transformers() -> None:
    generation = dr.compile_generation(model("mixtral"), precision="int8", strategy="1/3/1/1,experts=tensor")
    found = generation.generate(IDS, max_new_tokens=8)
    with torch.no_grad():
        options = {"attention_mask": torch.ones_like(IDS), "pad_token_id": 0, "eos_token_id": None}
        expected = dequantized("mixtral", "int8").generate(IDS, max_new_tokens=8, do_sample=False, **options)
    assert torch.equal(found, expected[:, IDS.shape[1] :])


class Experts(nn.Module):
    """Rows of experts in some order, by torch's grouped product; with `ends` from the caller, sorted."""

    def __init__(self, experts: int, width: int, columns: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, columns, width))
        self.down = nn.Parameter(torch.randn(experts, columns, width))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        y = torch.ops.transformers.grouped_mm_fallback(x, self.up.transpose(1, 2), ends)
        return torch.ops.transformers.grouped_mm_fallback(y.tanh(), self.down, ends)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("precision", "sharding"),
    [("int8", "R"), ("int4", "S[0]"), ("int8-channel", "S[0]"), ("int8", "S[1]"), ("int4", "S[2]"),
     ("int8-channel", "S[2]")],
)  # fmt: skip
@pytest.mark.usefixtures("exact_inputs")
def test_sorted_rows_by_brute_force(precision: str, sharding: str) -> None:
    """Bounds of groups that are inputs: products with each expert's weight in numpy, on both backends; some rows have
    no expert, and some experts no rows."""
    torch.manual_seed(0)
    made = Experts(5, 160, 96).eval()
    x, ends = torch.randn(13, 160), torch.tensor([3, 3, 7, 7, 11], dtype=torch.int32)
    quantized = quantize_weights(snapshot(import_torch(made, (x, ends), {})), precision)
    assert {n for n in quantized.names if n.endswith(".values")} == {"up.values", "down.values"}
    marks = {"up.values": sharding, "down.values": sharding}
    plan = compile_source(Source(quantized, complete({"mesh": (3,), "shardings": marks}, "experts")))
    up, down = (
        [dequantize(*QUANTIZE[precision](w)).numpy() for w in weights.detach()]
        for weights in (made.up, made.down.transpose(1, 2))
    )
    expected, starts = np.zeros((13, 160), np.float32), [0, *ends.tolist()]
    for row in range(11):
        expert = next(e for e in range(5) if starts[e] <= row < starts[e + 1])
        expected[row] = down[expert] @ np.tanh(up[expert] @ x[row].numpy())
    for backend in ("torch", "tvm"):
        found = plan(x, ends, backend=backend)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-3, err_msg=backend)


class DenseExperts(nn.Module):
    """Experts that are modules of their own, of which a token has all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(64, 3, bias=False), nn.ModuleList(nn.Linear(64, 37) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


def test_experts_of_a_list_are_linear_layers() -> None:
    plan = dr.compile(DenseExperts().eval(), (torch.randn(5, 64),), precision="int4", strategy="1/3/1/1")
    kinds = {weight.name: weight.dtype for weight in plan.bundle(("torch",)).manifest.weights}
    assert [kinds[f"experts.{i}.weight.values"] for i in range(3)] == ["uint8"] * 3


def test_kept_experts_have_all_bits() -> None:
    plan = dr.compile_generation(model("mixtral"), precision="int4", keep=["*.experts.down_proj"]).plan
    kinds = {weight.name: (weight.dtype, weight.shape) for weight in plan.bundle(("torch",)).manifest.weights}
    assert kinds["model.layers.1.mlp.experts.down_proj"] == ("float32", (5, 96, 160))
    assert kinds["model.layers.1.mlp.experts.gate_up_proj.values"] == ("uint8", (5, 320, 3, 16))
    assert kinds["model.layers.1.mlp.experts.gate_up_proj.minimums"] == ("float16", (5, 320, 3, 1))


def test_inner_dims_that_are_no_multiple_of_a_group_stay() -> None:
    made = Experts(3, 160, 50).eval()
    imported = import_torch(made, (torch.randn(4, 160), torch.tensor([1, 2, 4], dtype=torch.int32)), {})
    names = quantize_weights(imported, "int8").names
    assert {"up.values", "down"} <= names.keys()


def test_an_expert_without_scales_names_its_weight() -> None:
    copy = deepcopy(model("mixtral"))
    with torch.no_grad():
        copy.model.layers[1].mlp.experts.down_proj[2] *= 1e-9
    with pytest.raises(
        DistIRError, match=r"layers\.1\.mlp\.experts\.down_proj: expected a weight whose largest number"
    ):
        dr.compile_generation(copy, precision="int4")


@pytest.mark.parametrize("strategy", ["1/3/1/1", "3/1/1/1,experts=data"])
def test_plans_are_proved(strategy: str) -> None:
    made = snapshot(import_torch(model("mixtral"), (), {"input_ids": IDS.repeat(3, 1), "use_cache": False}))
    quantized = quantize_weights(made, "int4")
    plan = compile_source(Source(quantized, complete({"strategy": strategy}, "mixtral")))
    modules = plan.modules
    proof = prove(modules["ranked"], modules["distributed"], modules["sharded"], quantized.module)
    assert not any(proof.statements.values())


@pytest.mark.sweep
def test_a_folder_is_quantized_when_it_is_saved(tmp_path: Path) -> None:
    """Expert by expert: the bundle has the tensors of each."""
    model("mixtral").save_pretrained(tmp_path / "folder")
    plan = dr.compile_generation(tmp_path / "folder", precision="int4", strategy="1/3/1/1").plan
    bundle = read_bundle(plan.save(tmp_path / "x.dist", backends=("torch",)))
    for name, stack in stacks_of(model("mixtral")).items():
        for expert, weight in enumerate(stack.detach()):
            for part, expected in zip(("values", "scales", "minimums"), quantize_int4(weight), strict=True):
                of_expert = [[(expert, expert + 1)], *([(0, n)] for n in expected.shape)]
                assert torch.equal(bundle.weights.read(f"{name}.{part}", of_expert)[0], expected)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_memory_of_quantization(is_transposed: bool) -> None:
    stack = torch.randn(8, 1024, 1024)
    kinds = [TensorType((8, 1024, *rest), dtype) for rest, dtype in (((32, 32), "int8"), ((32, 1), "float16"))]
    least = math.inf
    # The first runs also take what threads and libraries keep.
    for _ in range(4):
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        values, scales = quantized_tensors("experts", stack, is_transposed, quantize_int8_groups, kinds)
        least = min(least, _status("VmHWM") - before)
    assert least < values.nbytes + scales.nbytes + 1.5 * stack[0].nbytes


def _status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


@pytest.mark.sweep
def test_simulation_reads_the_experts_that_have_rows() -> None:
    """Weights in memory are those of the bundle; a step is charged for the experts that a token is expected to use."""
    generation = dr.compile_generation(model("mixtral"), precision="int4", strategy="1/2/1/1,experts=tensor")
    found = dr.simulate_generation(generation, profile="cpu-local", prompt=9, generate=5)
    tensors = generation.plan.bundle(("torch",)).manifest.weights
    experts = sum(prod(t.shape) * DTYPES[t.dtype][1] for t in tensors if ".experts." in t.name)
    # Of 5 experts 3 are on the first rank, which has more heads and words too.
    assert found.weights == tuple(generation.plan.footprint.weights)
    others = [size - experts // 5 * count for size, count in zip(found.weights, (3, 2), strict=True)]
    assert 0 < others[0] - others[1] < experts // 20
    # Two rows, each with one of 5 experts.
    kinds = [TensorType((2, 96), "float32"), TensorType((3, 160, 3, 32), "int8"), TensorType((3, 160, 3, 1), "float16"),
             TensorType((2,), "int64"), TensorType((3,), "int64")]  # fmt: skip
    (result,) = infer("quantized_routed_matmul", kinds, {"count": 5})
    work = op_work(lookup("quantized_routed_matmul"), kinds, {"count": 5}, (result,))
    choices = list(product(range(5), repeat=2))
    in_use = sum(len({e for e in choice if e < 3}) for choice in choices) / len(choices)
    of_expert = 160 * 3 * (32 + 2)
    assert work.moved == pytest.approx(in_use * of_expert + 2 * 96 * 4 + 2 * 160 * 4 + 8 * (2 + 3))
    assert work.flops == pytest.approx(2 * (2 * 3 / 5) * 96 * 160)
