"""Families of models that give their loss, as small as they can be, and of odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

ROWS, LENGTH, WORDS = 5, 7, 31


@dataclass(frozen=True)
class Family:
    """A model that gives its loss, a batch, what is split by tensor, and how far from torch's numbers may be."""

    model: nn.Module
    args: tuple[torch.Tensor, ...]
    shardings: dict[str, str]
    tolerance: float = 1e-9


class Loss(nn.Module):
    """The loss that a model of transformers gives for labels, or in the model's own dtype that of the next words."""

    def __init__(self, model: nn.Module, name: str = "input_ids", own: bool = True, **options: Any) -> None:
        super().__init__()
        self.model, self.name, self.own, self.options = model, name, own, options

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.own:
            return self.model(**{self.name: x}, labels=labels, **self.options).loss
        logits = self.model(**{self.name: x}, **self.options).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def words() -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and labels of which some rows have none."""
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    labels = ids.clone()
    labels[:, :2] = -100
    labels[1] = -100
    return ids, labels


def sizes(**more: Any) -> dict[str, Any]:
    return {"vocab_size": WORDS, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
            "max_position_embeddings": 16, "pad_token_id": 0, **more}  # fmt: skip


def gpt2() -> Family:
    """Tied weights."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=12, n_layer=2, n_head=3, **none)
    model = Loss(transformers.GPT2LMHeadModel(config), own=False, use_cache=False)
    return Family(model, words(), {"*.c_attn.weight": "S[1]", "*.c_fc.weight": "S[1]", "*.wte.weight": "S[0]"})


def llama() -> Family:
    """Grouped queries; the norms and the loss, whose labels are shifted, are float32."""
    config = transformers.LlamaConfig(**sizes(num_attention_heads=6, num_key_value_heads=3, intermediate_size=17))
    model = Loss(transformers.LlamaForCausalLM(config), use_cache=False)
    return Family(
        model, words(), {"*.q_proj.weight": "S[0]", "*.gate_proj.weight": "S[0]", "*.lm_head.weight": "S[0]"}, 1e-6
    )


def bert() -> Family:
    """Words that are padding, which get no gradient."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = Loss(transformers.BertForMaskedLM(transformers.BertConfig(**sizes(intermediate_size=17, **none))))
    shardings = {"*.query.weight": "S[0]", "*.intermediate.dense.weight": "S[0]", "*.word_embeddings.weight": "S[0]"}
    ids, labels = words()
    ids[0, :3] = 0
    return Family(model, (ids, labels), shardings)


def vit() -> Family:
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17, image_size=6, patch_size=3,
        num_labels=7,
    )  # fmt: skip
    images = torch.randn(ROWS, 3, 6, 6, dtype=torch.float64), torch.randint(0, 7, (ROWS,))
    model = Loss(transformers.ViTForImageClassification(config), "pixel_values")
    return Family(model, images, {"*.q_proj.weight": "S[0]", "*.fc1.weight": "S[0]"})


def mixtral() -> Family:
    """Rows sent to the experts that are chosen, with the loss of the router; float32, as torch's grouped products."""
    config = transformers.MixtralConfig(
        **sizes(
            num_key_value_heads=3, intermediate_size=20, num_local_experts=5, num_experts_per_tok=2, num_hidden_layers=1
        )
    )
    model = Loss(transformers.MixtralForCausalLM(config), use_cache=False, output_router_logits=True).float()
    return Family(model, words(), {"*.experts.gate_up_proj": "S[0]", "*.q_proj.weight": "S[0]"}, 1e-6)


class ResNet(nn.Module):
    """Residual blocks with batch norm, whose running statistics are state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 5, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(5)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"conv": nn.Conv2d(5, 5, 3, padding=1, bias=False), "norm": nn.BatchNorm2d(5)})
            for _ in range(2)
        )
        self.last = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x)), inplace=True), 3, 2, 1)
        for block in self.blocks:
            x = F.relu(x + block["norm"](block["conv"](x)))
        return F.cross_entropy(self.last(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


def resnet() -> Family:
    images = torch.randn(ROWS, 3, 9, 7, dtype=torch.float64), torch.randint(0, 7, (ROWS,))
    return Family(ResNet(), images, {"*first.weight": "S[0]", "*conv.weight": "S[0]"})


class Recurrent(nn.Module):
    """A recurrent layer of each kind: of several layers, projected, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6, padding_idx=3)
        self.lstm = nn.LSTM(6, 5, num_layers=2, proj_size=3, batch_first=True)
        self.gru = nn.GRU(3, 5, bidirectional=True, batch_first=True)
        self.rnn = nn.RNN(10, 5, nonlinearity="relu", bias=False, batch_first=True)
        self.head = nn.Linear(5, WORDS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y, (_, cell) = self.lstm(self.words(x))
        y, last = self.rnn(self.gru(y)[0])
        return F.cross_entropy(self.head(y + last[0][:, None]).flatten(0, 1), labels.flatten()) + cell.square().mean()


def recurrent() -> Family:
    return Family(Recurrent(), words(), {"head.weight": "S[0]", "*.weight_ih_l0": "S[0]"})


FAMILIES: dict[str, Callable[[], Family]] = {
    make.__name__: make for make in (gpt2, llama, bert, vit, mixtral, resnet, recurrent)
}
