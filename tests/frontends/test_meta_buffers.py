"""Models made without memory for weights, whose buffers are computed, with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import distir_relax as dr
from distir_relax.errors import ImportModelError


class Computed(nn.Module):
    """Constants are computed from a buffer of the checkpoint, and from one that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)
        self.register_buffer("scale", torch.arange(1.0, 8.0))
        self.register_buffer("places", torch.arange(7.0).unsqueeze(0) * 0.1, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale[None].cos() + self.places


def test_empty_weights_keep_computed_buffers(tmp_path: Path) -> None:
    real, x = Computed().eval(), torch.randn(3, 7)
    save_file(real.state_dict(), tmp_path / "model.safetensors")
    with dr.empty_weights():
        model = Computed().eval()
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    plan = dr.compile(model, (x,), strategy="1/3/1/1", checkpoint=tmp_path)
    torch.testing.assert_close(plan(x), real(x).detach())
    # Modules that are made afterwards have data.
    assert not nn.Linear(2, 2).weight.is_meta


def test_buffers_of_a_checkpoint_are_read_before_constants_are_computed(tmp_path: Path) -> None:
    real, x = Computed().eval(), torch.randn(3, 7)
    save_file(real.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Computed().eval()
    model.register_buffer("places", real.places, persistent=False)
    plan = dr.compile(model, (x,), strategy="1/3/1/1", checkpoint=tmp_path)
    torch.testing.assert_close(plan(x), real(x).detach())
    assert model.scale.is_meta
    with torch.device("meta"):
        lacking = Computed().eval()
    with pytest.raises(ImportModelError, match="no data for places") as raised:
        dr.compile(lacking, (x,), checkpoint=tmp_path)
    assert "empty_weights" in raised.value.hint


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_transformers_models_initialize_their_buffers(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    make = {
        "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(vocab_size=61, **sizes)),
        "bert": lambda: transformers.BertModel(transformers.BertConfig(vocab_size=61, **sizes)),
    }[kind]
    real, ids = make().eval(), torch.randint(0, 61, (2, 7))
    real.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = make().eval()
    options = {"use_cache": False} if kind == "llama" else {}
    plan = dr.compile(model, (ids,), options, strategy="1/2/1/1", checkpoint=tmp_path)
    expected = real(ids, **options).last_hidden_state.detach()
    torch.testing.assert_close(plan(ids, **options).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
    assert all(b.is_meta for b in model.buffers())


class Options(nn.Module):
    """Takes tensors in a pair and a dict, and arguments that are no tensors."""

    def forward(
        self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 2.0, *, more: dict, flag: bool
    ) -> torch.Tensor:
        return (x + pair[0] - pair[1]) * scale + (more["bias"] if flag else 0)


def test_a_loaded_bundle_takes_the_call_of_the_plan(tmp_path: Path) -> None:
    x, a, b, bias = (torch.randn(5, 3) for _ in range(4))
    plan = dr.compile(Options(), (x, (a, b)), {"more": {"bias": bias}, "flag": True}, shardings={"x": "S[0]"}, mesh=3)
    loaded = dr.load(plan.save(tmp_path / "options.dist", ("torch",)))
    expected = plan(x, (a, b), more={"bias": bias}, flag=True)
    torch.testing.assert_close(loaded(x, (a, b), more={"bias": bias}, flag=True), expected)
    torch.testing.assert_close(loaded(x, (a, b), 2.0, more={"bias": bias}, flag=True), expected)
    torch.testing.assert_close(loaded(x=x, pair=[a, b], more={"bias": bias}), expected)
    with pytest.raises(dr.DistIRError, match=r"'scale' was 2\.0 when the model was compiled, found 3\.0"):
        loaded(x, (a, b), 3.0, more={"bias": bias}, flag=True)
    with pytest.raises(dr.DistIRError, match="'flag' was True when the model was compiled, found False"):
        loaded(x, (a, b), more={"bias": bias}, flag=False)
    with pytest.raises(dr.DistIRError, match="other"):
        loaded(x, (a, b), more={"bias": bias}, flag=True, other=x)
