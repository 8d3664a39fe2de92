"""The paper's GPT-2, written op by op, is GPT-2; and no pass makes fewer ops of it than its program has."""

from __future__ import annotations

from collections import Counter

import torch
from torch.nn import functional as F

from benchmarks.paper import models
from distir_relax import Strategy, load_profile
from distir_relax.compiler.inputs import classify_input
from distir_relax.compiler.options import CompileOptions


def test_a_block_is_attention_and_a_feed_forward_net_behind_norms() -> None:
    torch.manual_seed(0)
    width, heads = 33, 3
    block = models.Block(heads, width).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(5, models.TOKENS, width, dtype=torch.float64)
    normed = F.layer_norm(x, (width,), block.ln_1.weight, block.ln_1.bias)
    parts = block.c_attn(normed).view(5, models.TOKENS, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(x.shape)
    y = x + block.c_proj(attended)
    normed = F.layer_norm(y, (width,), block.ln_2.weight, block.ln_2.bias)
    expected = y + block.down(F.gelu(block.up(normed), approximate="tanh"))
    torch.testing.assert_close(block(x), expected, rtol=1e-9, atol=1e-9)


def test_a_block_runs_op_by_op() -> None:
    profile = load_profile("dgx2-v100")
    source = classify_input(models.gpt2(3, 3, 33, 7)).read(CompileOptions(profile=profile))
    program = source.with_strategy(Strategy(tensor=3)).distributed()
    (block,) = [function for function in program.functions if function.name != "main"]
    ops = Counter(op.name for op in block.ops)
    # Two norms of nine ops, a GELU of eight, four Gemms that scale both operands, two products of attention, a softmax.
    norms = Counter({"mean": 2, "subtract": 1, "square": 1, "add": 2, "sqrt": 1, "divide": 1, "multiply": 1})
    gelu = Counter({"power": 1, "multiply": 4, "add": 2, "tanh": 1})
    attention = Counter({"matmul": 2, "divide": 1, "multiply": 1, "subtract": 1, "nn.softmax": 1})
    # Those behind a sum of all devices add their bias apart.
    gemms = Counter({"multiply": 8, "matmul": 2, "matmul_bias": 2, "add": 2})
    expected = norms + norms + gelu + attention + gemms + Counter({"add": 2})
    assert {name: ops[name] for name in expected} == dict(expected)
    assert ops["all_reduce"] == 2
    counted = source.with_shape_ops().imported.module.main.ops
    counts = sum(int(op.attrs["count"]) for op in counted if op.name == "shape_ops")  # type: ignore[call-overload]
    assert counts == 3 * (4 * 16 + 3 * 18 + 21 + 17) == 3 * 156
