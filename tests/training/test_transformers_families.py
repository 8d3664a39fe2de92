"""Models of transformers whose layers or losses look at tensors: the error says what to do, and then they train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import distir_relax as dr
from distir_relax.errors import ImportModelError

SMALL = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}


def tokens(rows: int = 6, length: int = 9) -> torch.Tensor:
    return torch.randint(4, 99, (rows, length))


def m2m100(**options: float) -> Any:
    config = transformers.M2M100Config(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, dropout=0.0,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=40,
        attention_dropout=0.0, activation_dropout=0.0, **options,
    )  # fmt: skip
    return transformers.M2M100ForConditionalGeneration(config)


def deberta(**options: str) -> Any:
    config = transformers.DebertaV2Config(
        vocab_size=99, max_position_embeddings=40, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **SMALL, **options,
    )  # fmt: skip
    return transformers.DebertaV2ForSequenceClassification(config)


def wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        vocab_size=20, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, **SMALL,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def ctc(output: Any, labels: torch.Tensor) -> torch.Tensor:
    logs = output.logits.log_softmax(-1).transpose(0, 1)
    length, rows, _ = logs.shape
    sizes = (torch.full((rows,), length), torch.full((rows,), labels.shape[1]))
    return F.ctc_loss(logs, labels, *sizes, blank=0)


def steps_are_torch_s(model: Any, batch: Any, strategy: str, loss: Any = None) -> None:
    """Two steps have the losses of torch on one process."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    step = dr.compile_training(model, loss, optimizer=dr.optim.SGD(0.05), example_batch=batch, strategy=strategy)
    for _ in range(2):
        expected = reference(**batch).loss if loss is None else loss(reference(**batch[0]), batch[1])
        found = step(batch) if loss is None else step(*batch)
        assert found == pytest.approx(float(expected.detach()), rel=1e-4)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


@pytest.mark.sweep
def test_layers_that_are_dropped_by_drawn_numbers() -> None:
    torch.manual_seed(0)
    batch = {"input_ids": (ids := tokens()), "labels": ids}
    with pytest.raises(ImportModelError) as raised:
        dr.compile_training(m2m100().train(), optimizer=dr.optim.SGD(0.1), example_batch=batch)
    assert "from_pretrained(..., encoder_layerdrop=0.0, decoder_layerdrop=0.0)" in raised.value.hint
    steps_are_torch_s(m2m100(encoder_layerdrop=0.0, decoder_layerdrop=0.0).train(), batch, "3/1/1/1")


@pytest.mark.sweep
def test_a_classification_that_looks_at_its_labels() -> None:
    torch.manual_seed(0)
    batch = {"input_ids": tokens(), "labels": torch.randint(2, (6,))}
    with pytest.raises(ImportModelError) as raised:
        dr.compile_training(deberta().train(), optimizer=dr.optim.SGD(0.1), example_batch=batch)
    assert 'model.config.problem_type = "single_label_classification"' in raised.value.hint
    steps_are_torch_s(deberta(problem_type="single_label_classification").train(), batch, "1/2/1/1")


def test_a_ctc_loss_that_looks_at_its_labels() -> None:
    torch.manual_seed(0)
    sound, labels = torch.randn(6, 400), torch.randint(1, 20, (6, 5))
    batch = {"input_values": sound, "labels": labels}
    with pytest.raises(ImportModelError) as raised:
        dr.compile_training(wav2vec2().train(), optimizer=dr.optim.SGD(0.1), example_batch=batch)
    assert "a function of output.logits with F.ctc_loss" in raised.value.hint
    steps_are_torch_s(wav2vec2().train(), ({"input_values": sound}, labels), "2/1/1/1", ctc)
