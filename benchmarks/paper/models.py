"""The DistIR paper's models (its table 1), on the meta device: no weight is ever made.

    distir simulate benchmarks/paper/models.py:mlp_103b --profile dgx2-v100 --strategy 4/2/2/32 --global-batch 131072
    distir simulate benchmarks/paper/models.py:gpt2_13b --profile dgx2-v100 --strategy 1/8/2/2 --global-batch 1024

They are torch models as anybody writes them; the strategy says how they are distributed. The MLPs are trained: layers
without bias, each a product and a ReLU; the loss is half the squared error, averaged over the batch; the optimizer is
plain SGD. GPT-2 is a forward pass over sequences of 8 tokens, as in the paper's program (gpt2-10 of the ONNX model
zoo): token and position embeddings, the blocks, and the last norm. It has no head: its result is hidden states; keys
and values are not kept. All is in float16: weights, activations, gradients and their sums.

That program was exported op by op, and its authors ran it so: a norm is nine kernels, a GELU eight, and attention is
made of products, a mask that is multiplied and subtracted, and a softmax. So the blocks are written here, as their
runtime runs them (`dist_ir/backend/torch.py` in their repository): a Gemm multiplies its operand and its weight by
alpha and beta before the product, though both are 1. Between its ops the program has 156 more in each block, on shapes:
what the exporter of TorchScript writes for sizes that follow the input. They are counted where it has them
(`annotate_shape_ops`).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax import annotate_shape_ops

VOCABULARY, POSITIONS = 50257, 1024
TOKENS = 8
OF_ROWS, OF_RESULT, OF_HEADS, OF_MASK, OF_MERGE = 12, 4, 18, 21, 17
"""Ops on shapes before and after a Gemm, for each of q, k and v, for the mask, and for the result of attention."""


def mlp_1b(global_batch: int = 64) -> dr.Training:
    """16 layers of 8192 x 8192: 1.1 billion parameters, 2.1 GB."""
    return mlp(16, 8192, global_batch)


def mlp_17b(global_batch: int = 64) -> dr.Training:
    """64 layers of 16384 x 16384: 17 billion parameters, 34 GB."""
    return mlp(64, 16384, global_batch)


def mlp_103b(global_batch: int = 64) -> dr.Training:
    """96 layers of 32768 x 32768: 103 billion parameters, 206 GB."""
    return mlp(96, 32768, global_batch)


def gpt2_1_6b(global_batch: int = 128) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """24 layers of 2048 with 16 heads: 1.3 billion parameters, 2.6 GB. (The paper counts 3.2 GB.)"""
    return gpt2(24, 16, 2048, global_batch)


def gpt2_13b(global_batch: int = 128) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """40 layers of 5120 with 40 heads: 13 billion parameters, 26 GB.

    The paper's table says 5140, which 40 heads do not divide; its program has 5120.
    """
    return gpt2(40, 40, 5120, global_batch)


def gpt2_175b(global_batch: int = 128) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """96 layers of 12288 with 96 heads: 175 billion parameters, 349 GB. (The paper's 394.4 GB are a slip.)"""
    return gpt2(96, 96, 12288, global_batch)


def mlp(layers: int, width: int, batch: int, dtype: torch.dtype = torch.float16) -> dr.Training:
    """A step of training `layers` layers of `width` x `width` on `batch` samples."""
    with torch.device("meta"):
        stack = [nn.Sequential(nn.Linear(width, width, bias=False, dtype=dtype), nn.ReLU()) for _ in range(layers)]
        x, y = (torch.empty(batch, width, dtype=dtype) for _ in range(2))
        return dr.Training(nn.Sequential(*stack), half_squared_error, dr.optim.SGD(lr=0.01), (x, y))


def half_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half the squared error of each sample, averaged over samples."""
    return F.mse_loss(output, target, reduction="sum") * (0.5 / output.shape[0])


def gpt2(layers: int, heads: int, width: int, batch: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A GPT-2 of `layers` blocks, and `batch` sequences of 8 tokens."""
    with torch.device("meta"):
        return GPT2(layers, heads, width).eval(), (torch.zeros(batch, TOKENS, dtype=torch.int64),)


class GPT2(nn.Module):
    """Token numbers (batch, tokens) to hidden states (batch, tokens, width)."""

    def __init__(self, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width, dtype=torch.float16)
        self.wpe = nn.Embedding(POSITIONS, width, dtype=torch.float16)
        self.h = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.ln_f = Norm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The hidden states of each token behind the last norm."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        found: torch.Tensor = self.ln_f(x)
        return found


class Block(nn.Module):
    """Attention to the tokens before, and a feed-forward net of four times the width, each behind a norm."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        half = torch.float16
        self.heads = heads
        self.ln_1, self.ln_2 = Norm(width), Norm(width)
        self.c_attn, self.c_proj = Gemm(width, 3 * width), Gemm(width, width)
        self.up, self.down = Gemm(width, 4 * width), Gemm(4 * width, width)
        self.register_buffer("before", torch.ones(TOKENS, TOKENS, dtype=half).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states, both (batch, tokens, width)."""
        batch, tokens, width = x.shape
        q, k, v = (
            annotate_shape_ops(part.view(batch, tokens, self.heads, width // self.heads), OF_HEADS)
            for part in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        scores = torch.matmul(q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1)) / math.sqrt(width // self.heads)
        scores = annotate_shape_ops(scores, OF_MASK)
        scores = scores * self.before - 1e4 * (1 - self.before)
        found = torch.matmul(torch.softmax(scores, dim=-1), v.permute(0, 2, 1, 3))
        found = annotate_shape_ops(found.permute(0, 2, 1, 3).reshape(batch, tokens, width), OF_MERGE)
        x = x + self.c_proj(found)
        return x + self.down(gelu(self.up(self.ln_2(x))))


class Gemm(nn.Module):
    """A linear layer as an ONNX op that is run step by step."""

    def __init__(self, inner: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inner, columns, dtype=torch.float16))
        self.bias = nn.Parameter(torch.empty(columns, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of other columns, (batch, tokens, columns)."""
        product = torch.matmul(1.0 * annotate_shape_ops(x, OF_ROWS), 1.0 * self.weight) + self.bias
        return annotate_shape_ops(product, OF_RESULT)


class Norm(nn.Module):
    """A layer norm, step by step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(width, dtype=torch.float16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor like `x`."""
        centred = x - x.mean(-1, keepdim=True)
        variance = torch.pow(centred, 2).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5) * self.weight + self.bias


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh, step by step, in an order that the compiler does not take for its own one kernel."""
    share = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))
    return x * share
