"""Programs of models under autocast: the dtypes of all their ops are torch's, and what they keep is not rounded."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distir_relax.frontends.torch.autocast import explicit_casts, under_autocast
from distir_relax.frontends.torch.inline_subgraphs import inline_subgraphs
from distir_relax.support.torch_compat import tree_leaves

_COPIES = {"_to_copy", "clone", "_unsafe_view", "lift_fresh_copy", "_assert_tensor_metadata", "scalar_tensor"}


class Ops(TorchDispatchMode):
    """The ops that compute with floats, with the dtypes of their operands and results; casts and copies do not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name not in _COPIES and not func.is_view and any(x.is_floating_point() for x in leaves):
            results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            self.found.append((name.removesuffix("_fallback").strip("_"), *(str(x.dtype) for x in (*leaves, *results))))
        return result


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cells, self.last = kind(8, 11, batch_first=True), nn.Linear(11, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(12, 3, batch_first=True), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.attention(x, x, x)[0].mean(1))


class Called(nn.Module):
    """A function of an input and two weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Parameter(torch.randn(8, 7)), nn.Parameter(torch.randn(7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.a, self.b)


def einsum(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bi,ij,jk->bk", x, a, b)


def joined(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.cat([x @ a, x[:, :7]], 1)
    return torch.stack([y[:, :7] @ b, y[:, 7:] @ b + x[:, :5]]).sum(0)


def part_in_float32(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        y = F.layer_norm(x @ a, (7,))
    return (y @ b).softmax(-1).log()


def by_dtype(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The code asks for the dtype that autocast has given a value."""
    y = x @ a
    mask = torch.full((7,), torch.finfo(y.dtype).min, dtype=y.dtype)
    return torch.maximum(y, mask).to(x.dtype) @ b


def in_place(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x @ a
    y.mul_(2).add_(1)
    z = x.clone()
    first = z @ a
    z[:, 1:] = 3
    return (y + first + z @ a) @ b


def losses(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x @ a
    scores, target = y @ b, x[:, :5]
    parts = (F.mse_loss(scores, target), F.smooth_l1_loss(scores, target), F.huber_loss(scores, target))
    classes = target.argmax(1)
    more = (F.cross_entropy(scores, classes), F.nll_loss(scores.log_softmax(1), classes), F.softplus(scores).mean())
    return sum(parts) + sum(more) + F.binary_cross_entropy_with_logits(scores, target.sigmoid())


def reductions(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x @ a
    wide = (y.cumsum(1) + y.exp() + y.abs().log1p() + y.square().add(1).rsqrt() + y.pow(2)) @ b
    return wide.var(1) + wide.norm(dim=1) + wide.logsumexp(1) + F.cosine_similarity(wide, x[:, :5]) + wide.prod(1)


class WithLoss(nn.Module):
    """A language model's loss of token ids."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def language_model(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 32,
        "attn_implementation": "eager",
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**shape, **options})
    names = {"GPT2": "GPT2LMHeadModel"}
    return WithLoss(getattr(transformers, names.get(kind, f"{kind}ForCausalLM"))(config))


CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
    nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
)  # fmt: skip
NORMS = nn.Sequential(
    nn.Linear(8, 8), nn.Softmax(-1), nn.LayerNorm(8), nn.RMSNorm(8), nn.Hardswish(), nn.BatchNorm1d(8), nn.Linear(8, 5)
)
TRANSPOSED = nn.Sequential(
    nn.ConvTranspose1d(3, 4, 3), nn.PReLU(), nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.Linear(40, 5)
)
ENCODER = nn.Sequential(
    nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(84, 5)
)
VECTORS, SEQUENCES, IMAGES = torch.randn(6, 8), torch.randn(6, 7, 12), torch.randn(6, 3, 8, 8)

MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "norms": (lambda: NORMS, VECTORS),
    "convolutions": (lambda: CONVOLUTIONS, IMAGES),
    "transposed convolution": (lambda: TRANSPOSED, IMAGES[:, :, 0]),
    "encoder": (lambda: ENCODER, SEQUENCES),
    "attention": (Attention, SEQUENCES),
    "einsum": (lambda: Called(einsum), VECTORS),
    "joined": (lambda: Called(joined), VECTORS),
    "a part in float32": (lambda: Called(part_in_float32), VECTORS),
    "by dtype": (lambda: Called(by_dtype), VECTORS),
    "in place": (lambda: Called(in_place), VECTORS),
    "losses": (lambda: Called(losses), VECTORS),
    "reductions": (lambda: Called(reductions), VECTORS),
    "gated recurrence": (lambda: Recurrent(nn.GRU), SEQUENCES[:, :, :8]),
    "plain recurrence": (lambda: Recurrent(nn.RNN), SEQUENCES[:, :, :8]),
    **{
        kind: (partial(language_model, kind, **options), torch.arange(27).view(3, 9))
        for kind, options in {
            "Llama": {}, "Qwen2": {}, "Gemma": {"head_dim": 6}, "Mistral": {}, "Mixtral": {"num_local_experts": 3},
            "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "GPTNeoX": {},
            "OPT": {"dropout": 0.0, "ffn_dim": 32}, "Falcon": {},
        }.items()
    },
}  # fmt: skip
FUSED = {"gated recurrence", "plain recurrence"}
"""Ops that cast within, and have float32 operands here."""


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_dtypes_of_all_ops_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = copy.deepcopy(make()).train()
    other = copy.deepcopy(model)
    with under_autocast("bfloat16"):
        program = torch.export.export(model, (x,), strict=False)
        with Ops() as expected:
            wanted = other(x)
    inline_subgraphs(program)
    explicit_casts(program, "bfloat16")
    with Ops() as found:
        result = program.module()(x)
    if name not in FUSED:
        # An exported program has masks that transformers leaves out when it runs.
        assert not Counter(expected.found) - Counter(found.found)
    assert "torch.bfloat16" in {dtype for _, *dtypes in expected.found for dtype in dtypes}
    assert result.dtype == wanted.dtype
    torch.testing.assert_close(
        result, wanted, rtol=1e-2 if name in FUSED else 1e-6, atol=1e-2 if name in FUSED else 1e-6
    )
