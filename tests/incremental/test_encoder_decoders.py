"""Encoder-decoders of transformers, unmodified: random chunks on several ranks give the logits of the whole."""

from __future__ import annotations

import pytest
import torch

import distir_relax as dr
from distir_relax.bundle import Bundle
from distir_relax.errors import BundleError, RunError
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.incremental import ComputeOnce
from distir_relax.ir import CachedState, verify
from distir_relax.ops import check
from distir_relax.runtime.session import Session
from tests.chunk_acceptance import check_cuts, compiled, imported, whole
from tests.incremental.chunks import cuts, derived, in_chunks

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.shares("chunks of encoder-decoders")]
WAYS = 4
LAYOUTS = [
    ("t5 with gates, eager", "1/3/1/1"), ("bart", "1/5/1/1"), ("bart", "1/2/2/1"), ("bart", "2/1/1/1"),
    ("whisper eager", "1/1/3/1"), ("whisper eager", "1/1/1/1"),
]  # fmt: skip


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("name", "strategy"), LAYOUTS)
def test_chunks_give_the_logits_of_the_whole(name: str, strategy: str) -> None:
    check_cuts(name, strategy, WAYS)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["t5 with gates, eager", "bart", "whisper eager"])
def test_keys_and_values_of_each_layer_are_kept(name: str) -> None:
    records = [r for r in imported(name).module.records if isinstance(r, CachedState)]
    kept = [r.input for r in records if not r.grows]
    types = {i.value.name: i.value.tensor for i in imported(name).module.main.inputs}
    # Of two layers; in a batch of 1, of 7 tokens or 13 frames, with heads of 6 in five.
    length = 13 if "whisper" in name else 7
    assert [types[state].typical.elements for state in kept] == [length * 30] * 4


def test_each_call_has_no_part_of_the_encoder() -> None:
    plan = compiled("bart", "1/1/2/1")
    assert plan.encoder is not None
    names = [{i.value.name for i in p.modules["distributed"].main.inputs} for p in (plan.encoder, plan)]
    assert {name for name in names[0] & names[1] if "encoder.layers" in name} == set()
    assert any("encoder.layers.1.fc1" in name for name in names[0])
    assert any("decoder.layers.1.encoder_attn.k_proj" in name for name in names[0])
    assert any("decoder.layers.1.encoder_attn.q_proj" in name for name in names[1])


def test_a_session_takes_the_input_of_the_encoder_in_the_first_call() -> None:
    session, sequence = compiled("bart", "1/2/1/1").session(), whole("bart")
    ids, source = sequence.inputs["decoder_input_ids"], sequence.inputs["input_ids"]
    session({"input_ids": source, "decoder_input_ids": ids[:, :4]})
    with pytest.raises(RunError, match=r"the program has no such input\n.*decoder_input_ids"):
        session({"input_ids": source, "decoder_input_ids": ids[:, 4:]}, past=4)
    with pytest.raises(RunError, match="batch is 1 in the input of the encoder, found 2"):
        session({"input_ids": source[:1], "decoder_input_ids": ids[:, :4]})
    with pytest.raises(RunError, match="expected an input with batch, such as 'input_ids'"):
        session({"decoder_input_ids": ids})
    # Refused calls leave the sequence as it was.
    found = session({"decoder_input_ids": ids[:, 4:]}, past=4)["logits"]
    torch.testing.assert_close(found, sequence.logits[:, 4:], rtol=1e-4, atol=1e-4)
    # Another sequence, of another length of the encoder's input.
    session({"input_ids": source[:, :3], "decoder_input_ids": ids[:, :4]})
    assert not torch.allclose(session({"decoder_input_ids": ids[:, 4:]}, past=4)["logits"], found)


def test_an_encoder_that_does_not_fit_is_refused() -> None:
    bundle, other = (compiled(n, "1/2/1/1").bundle(("torch",)) for n in ("bart", "whisper eager"))
    assert isinstance(bundle.encoder, Bundle)
    assert isinstance(other.encoder, Bundle)
    with pytest.raises(BundleError, match=r"expected outputs of the encoder that are states, found .*\.kept\.next"):
        bundle.with_encoder(other.encoder, 2)
    elsewhere = compiled("bart", "1/3/1/1").bundle(("torch",)).encoder
    assert elsewhere is not None
    with pytest.raises(BundleError, match=r"expected an encoder of input_ids on .*, found <manifest"):
        bundle.with_encoder(elsewhere, 2)
    assert Session(bundle).bundle is bundle


class Grouped(torch.nn.Module):
    """Cross-attention with a mask, to keys and values that are repeated for the heads of a group; the input twice."""

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        queries = x.unflatten(2, (6, 2)).transpose(1, 2)
        keys = encoded.unflatten(2, (2, 2)).transpose(1, 2).repeat_interleave(3, 1)
        seen = mask[:, None, None, :].expand(-1, 6, x.shape[1], -1)
        attended = torch.nn.functional.scaled_dot_product_attention(queries, keys * 1.5, keys, attn_mask=seen)
        weights = torch.arange(encoded.shape[1]) / x.shape[1] ** 0
        return attended.transpose(1, 2).flatten(2) + (encoded * weights[None, :, None]).sum(1, keepdim=True).mean()


def test_the_smallest_tensor_is_kept() -> None:
    dims = {
        "x": {0: "batch", 1: dr.Dim("sequence", max=64)}, "encoded": {0: "batch", 1: dr.Dim("source", max=64)},
        "mask": {0: "batch", 1: dr.Dim("source", max=64)},
    }  # fmt: skip
    example = (torch.randn(2, 9, 12), torch.randn(2, 5, 4), torch.ones(2, 5, dtype=torch.bool))
    found = import_torch(Grouped(), example, dynamic_shapes=dims)
    plain = derived(found)
    module = ComputeOnce(("encoded", "mask")).run(plain)
    verify(module, check)
    kept = {r.input for r in module.records if isinstance(r, CachedState)}
    sizes = sorted(i.value.tensor.typical.elements for i in module.main.inputs if i.value.name in kept)
    # A mean; a mask; values before they are repeated, and keys, which are multiplied afterwards.
    assert sizes == [1, 2 * 5, 2 * 5 * 4, 2 * 5 * 12]
    x, encoded = torch.randn(2, 11, 12), torch.randn(2, 7, 4)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    fixed = {"encoded": encoded, "mask": mask}
    for seed in range(3):
        result = in_chunks(module, found, {"x": x}, cuts(11, seed), whole=fixed, source=7)
        torch.testing.assert_close(result["output"], Grouped()(x, encoded, mask), rtol=1e-5, atol=1e-5)
