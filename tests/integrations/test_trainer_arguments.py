"""Arguments of transformers' Trainer: the run is its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import distir_relax as dr
from distir_relax.errors import DistIRError

STEPS, ROWS = 7, 6


def model() -> Any:
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=127, hidden_size=36, intermediate_size=60, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def arguments(folder: Path, **options: Any) -> Any:
    chosen = {
        "max_steps": STEPS, "learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 2, "save_strategy": "no",
        "lr_scheduler_type": "cosine", "max_grad_norm": 0.7, "logging_steps": 1, "per_device_train_batch_size": ROWS,
        "train_sampling_strategy": "sequential", **options,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **chosen)


class Logged(transformers.TrainerCallback):  # type: ignore[misc]
    """The losses that a Trainer logs."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self.losses.append(logs["loss"])


def test_a_run_is_that_of_the_trainer(tmp_path: Path) -> None:
    tokens = torch.randint(127, (STEPS * ROWS, 15), generator=torch.Generator().manual_seed(4))
    theirs, options, logged = model(), arguments(tmp_path), Logged()
    batches = [{"input_ids": rows, "labels": rows} for rows in tokens.split(ROWS)]
    training = dr.Training(copy.deepcopy(theirs), example_batch=batches[0], arguments=options)
    step, losses = training.compile(strategy="2/1/1/1"), []
    assert training.run_options() == {"steps": STEPS, "seed": 42}
    for batch in batches:
        losses.append(step(batch))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(theirs, options, train_dataset=rows, callbacks=[logged])
    trainer.train()
    assert losses == pytest.approx(logged.losses, rel=1e-5)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(step.parameters()[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_a_pretrained_model_trains_in_training_mode(tmp_path: Path) -> None:
    """As `Trainer` does with a model in evaluation mode, whose mode stays here."""
    config = transformers.GPT2Config(vocab_size=127, n_embd=12, n_layer=1, n_head=3, n_positions=16)
    pretrained = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(127, (ROWS, 15))
    training = dr.Training(
        pretrained, example_batch={"input_ids": tokens, "labels": tokens}, arguments=arguments(tmp_path)
    )
    step = training.compile()
    assert "seed" in {item.value.name for item in step.plan.modules["global"].main.inputs}
    assert not any(module.training for module in pretrained.modules())


def test_options_of_the_loop(tmp_path: Path) -> None:
    options = arguments(
        tmp_path, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=3, bf16=True, save_strategy="steps",
        save_steps=0.1, save_total_limit=2, eval_strategy="epoch", metric_for_best_model="eval_accuracy",
        gradient_checkpointing=True, seed=9,
    )  # fmt: skip
    tokens = torch.randint(127, (ROWS, 15))
    batch = {"input_ids": tokens, "labels": tokens}
    training = dr.Training(model(), example_batch=batch, arguments=options, steps_per_epoch=10)
    state = torch.random.get_rng_state()
    resolved = training.resolved
    assert torch.equal(state, torch.random.get_rng_state())
    assert (resolved.precision, resolved.clip_norm, resolved.seed) == ("bf16", 0.7, 9)
    assert training.run_options() == {
        "steps": 20, "seed": 9, "checkpoint": str(tmp_path), "every": 2, "keep": 2, "evaluate_every": 10,
        "best": "accuracy:max",
    }  # fmt: skip
    source = training.read({"strategy": "2/1/1/1"})
    assert source.options["strategy"] == dr.Strategy.parse("2/1/1/3,checkpoint=block")


def test_mistakes_are_errors(tmp_path: Path) -> None:
    tokens = torch.randint(127, (ROWS, 15))
    batch = {"input_ids": tokens, "labels": tokens}
    with pytest.raises(DistIRError, match="label_smoothing_factor"):
        dr.compile_training(model(), example_batch=batch, arguments=arguments(tmp_path, label_smoothing_factor=0.1))
    with pytest.raises(DistIRError, match="found epochs"):
        dr.compile_training(model(), example_batch=batch, arguments=arguments(tmp_path, max_steps=-1))
    options = arguments(tmp_path, gradient_accumulation_steps=3)
    with pytest.raises(DistIRError, match="found 4"):
        dr.compile_training(model(), example_batch=batch, arguments=options, strategy="1/1/1/4")
    with pytest.raises(DistIRError, match="found int"):
        dr.compile_training(model(), example_batch=batch, arguments=3)
