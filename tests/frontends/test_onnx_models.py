"""Models that torch exports to ONNX, sharded by the names in the file: they give what unsharded torch gives."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers

import distir_relax as dr
from distir_relax.ir import inline, parse, print_module
from distir_relax.ops import Trait, lookup
from tests import vision

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 5, "hidden_size": 60, "intermediate_size": 70, "vocab_size": 97}
LLAMA = {"*/[qkv]_proj/MatMul.B": "S[1]", "*/gate_proj/MatMul.B": "S[1]"}

Made = tuple[Any, dict[str, torch.Tensor], dict[str, str]]


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(0))


def positions() -> torch.Tensor:
    return torch.arange(9).expand(2, 9)


def mask() -> torch.Tensor:
    found = torch.ones(2, 9, dtype=torch.long)
    found[1, 6:] = 0
    return found


def mlp() -> Made:
    layers = (
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 13),
        torch.nn.GELU(),
        torch.nn.Linear(13, 4),
        torch.nn.Softmax(-1),
    )
    return torch.nn.Sequential(*layers), {"input": torch.randn(3, 8)}, {"1.weight": "S[0]"}


def gpt2() -> Made:
    config = transformers.GPT2Config(n_layer=2, n_embd=60, n_head=5, vocab_size=97)
    shardings = {"*.c_attn.weight": "S[1]", "*.c_fc.weight": "S[1]", "*.wte.weight": "S[0]"}
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(9), "attention_mask": mask()}, shardings


def bert() -> Made:
    shardings = {"*attention/self/*/MatMul.B": "S[1]", "*intermediate/dense/MatMul.B": "S[1]"}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))
    return model, {"input_ids": tokens(9), "attention_mask": mask()}, shardings


def llama() -> Made:
    config = transformers.LlamaConfig(num_key_value_heads=5, **SMALL)
    call = {"input_ids": tokens(9), "attention_mask": mask(), "position_ids": positions()}
    return transformers.LlamaForCausalLM(config), call, LLAMA


def t5() -> Made:
    config = transformers.T5Config(d_model=60, d_ff=70, d_kv=12, num_layers=2, num_heads=5, vocab_size=97)
    call = {"input_ids": tokens(9), "decoder_input_ids": tokens(5)}
    shardings = {"*Attention/[qkv]/MatMul.B": "S[1]", "*/wi/MatMul.B": "S[1]"}
    return transformers.T5ForConditionalGeneration(config), call, shardings


def mixtral() -> Made:
    config = transformers.MixtralConfig(num_key_value_heads=5, num_local_experts=7, num_experts_per_tok=2, **SMALL)
    model = transformers.MixtralForCausalLM(config)
    # The form that sorts rows by expert has no ONNX export.
    model.set_experts_implementation("batched_mm")
    call = {"input_ids": tokens(9), "attention_mask": mask(), "position_ids": positions()}
    return model, call, {"*experts.down_proj": "S[2]"}


class Positional(torch.nn.Module):
    """Takes its inputs by position, as the exporter gives them, and returns the first result."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        found = self.model(**dict(zip(self.names, inputs, strict=True)), use_cache=False, return_dict=False)
        return found[0]


def exported(
    make: Callable[[], Made], folder: Path
) -> tuple[Path, dict[str, torch.Tensor], torch.Tensor, dict[str, str]]:
    torch.manual_seed(0)
    model, call, shardings = make()
    for parameter in model.parameters():
        # The exporter makes equal tensors one: fresh biases, all zero, would tie layers that have nothing in common.
        torch.nn.init.normal_(parameter, std=0.1)
    module = model.eval() if make is mlp else Positional(model, list(call)).eval()
    path = folder / f"{make.__name__}.onnx"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(call.values()), str(path), input_names=list(call), opset_version=18, dynamo=False
        )
        return path, call, module(*call.values()), shardings


@pytest.mark.drawn(2)
@pytest.mark.parametrize("make", [mlp, gpt2, bert, llama, t5, mixtral], ids=lambda f: f.__name__)
def test_it_gives_what_torch_gives_on_several_ranks(make: Callable[[], Made], tmp_path: Path) -> None:
    path, call, expected, shardings = exported(make, tmp_path)
    for ranks, tail in ((2, "ragged"), (3, "pad"), (5, "ragged")):
        mesh = dr.DeviceMesh((ranks,), ("tp",))
        plan = dr.compile(path, shardings=shardings, mesh=mesh, tail=tail)
        assert parse(print_module(plan.modules["global"])) == plan.modules["global"]
        torch.testing.assert_close(plan(**call), expected, atol=2e-5, rtol=2e-5)
        names = {op.name for op in inline(plan.modules["distributed"]).main.ops}
        assert "all_reduce" in names


@pytest.mark.parametrize("make", [gpt2, t5], ids=lambda f: f.__name__)
def test_layouts_written_to_the_model_are_read_from_it(make: Callable[[], Made], tmp_path: Path) -> None:
    path, call, expected, shardings = exported(make, tmp_path)
    plan = dr.compile(path, shardings=shardings, mesh=dr.DeviceMesh((3,), ("tp",)))
    again = dr.compile(plan.to_onnx_sharding(path))
    torch.testing.assert_close(again(**call), expected, atol=2e-5, rtol=2e-5)

    def communication(found: dr.Plan) -> list[tuple[str, str]]:
        ops = inline(found.modules["distributed"]).main.ops
        return [(op.name, str(op.results[0].type)) for op in ops if op.name in ("all_reduce", "all_gather")]

    assert communication(again) == communication(plan)


class Convolutional(torch.nn.Module):
    """A U-Net in small: convolutions with norms, pooling, upsampling both ways, and a sum across."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, 2, 1, groups=2), nn.SiLU(), nn.AvgPool2d(3, 1, 1))
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.Upsample(scale_factor=2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.stem(x)
        joined = first + self.up(self.down(first))
        return joined, self.head(joined)


@pytest.mark.parametrize("placement", ["S[2]", "S[3]"])
def test_an_image_is_split_in_space(placement: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Convolutional().eval(), tmp_path / "unet.onnx"
    x = torch.randn(1, 3, 20, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (x,), str(path), input_names=["x"], output_names=["image", "classes"], opset_version=17,
            dynamic_axes={"x": {2: "height", 3: "width"}}, dynamo=False,
        )  # fmt: skip
    with torch.no_grad():
        image, classes = model(x)
    for ranks in (2, 3, 5):
        mesh = dr.DeviceMesh((ranks,), ("tp",))
        plan = dr.compile(path, input_shapes={"x": (1, 3, 20, 24)}, shardings={"x": placement}, mesh=mesh)
        found = plan(x)
        assert list(found) == ["image", "classes"]
        torch.testing.assert_close(found["image"], image, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["classes"], classes, atol=1e-5, rtol=1e-5)
        assert any(op.name == "send" for op in inline(plan.modules["distributed"]).main.ops)


class OfPictures(torch.nn.Module):
    """The logits alone, by position."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values).logits


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("make", "shardings", "sent"),
    [
        (vision.resnet50, None, {"send", "all_reduce"}),
        (vision.mobilenet_v2, None, {"send", "all_reduce"}),
        (vision.vit, {"*/[qkv]_proj/MatMul.B": "S[1]", "*/fc1/MatMul.B": "S[1]"}, {"all_reduce"}),
    ],
    ids=["resnet50", "mobilenet_v2", "vit"],
)
def test_models_of_pictures(
    make: Callable[[], vision.Made], shardings: dict[str, str] | None, sent: set[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, call, in_space = make()
    module, path = OfPictures(model.eval()).eval(), tmp_path / "model.onnx"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (call["pixel_values"],), str(path), input_names=["pixel_values"], opset_version=18, dynamo=False
        )
        expected = module(**call)
    for ranks, tail in ((2, "ragged"), (3, "pad"), (5, "ragged")):
        mesh = dr.DeviceMesh((ranks,), ("tp",))
        plan = dr.compile(path, shardings=shardings or in_space, mesh=mesh, tail=tail)
        # The exporter folds batch norms into weights, which rounds anew.
        torch.testing.assert_close(plan(**call), expected, atol=1e-4, rtol=1e-4)
        assert {
            op.name
            for op in inline(plan.modules["distributed"]).main.ops
            if Trait.COMMUNICATES in lookup(op.name).traits
        } == sent
