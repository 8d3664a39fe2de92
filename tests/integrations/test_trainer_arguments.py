"""Arguments of transformers' Trainer: the run is its own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
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


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "chosen",
    [
        {}, {"optim": "adafactor"}, {"label_smoothing_factor": 0.2},
        {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": ROWS // 2},
    ],
)  # fmt: skip
def test_a_run_is_that_of_the_trainer(chosen: dict[str, Any], tmp_path: Path) -> None:
    tokens = torch.randint(127, (STEPS * ROWS, 15), generator=torch.Generator().manual_seed(4))
    labels = tokens.masked_fill(torch.arange(15) > 8 + torch.arange(STEPS * ROWS)[:, None] % 5, -100)
    theirs, options, logged = model(), arguments(tmp_path, **chosen), Logged()
    batches = [{"input_ids": a, "labels": b} for a, b in zip(tokens.split(ROWS), labels.split(ROWS), strict=True)]
    training = dr.Training(copy.deepcopy(theirs), example_batch=batches[0], arguments=options)
    step, losses = training.compile(strategy="2/1/1/1"), []
    assert training.run_options() == {"steps": STEPS, "seed": 42, "in_order": True}
    for batch in batches:
        losses.append(step(batch))
    rows = [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]
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


class Embedded(transformers.PreTrainedModel):  # type: ignore[misc]
    """A model whose loss is the mean square of its embeddings' noise."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = torch.nn.Embedding(127, 36)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        noise = self.embeddings(input_ids) - self.embeddings.weight[input_ids]
        return noise.square().mean()


@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1"])
def test_noise_of_embeddings(strategy: str, tmp_path: Path) -> None:
    """Noise from -a to a has the mean square a ** 2 / 3, is another one in each step, and absent in evaluations."""
    tokens, alpha, length = torch.randint(127, (60, 15)), 5.0, 15
    training = dr.Training(
        Embedded(model().config), example_batch={"input_ids": tokens}, metrics={},
        arguments=arguments(tmp_path, neftune_noise_alpha=alpha),
    )  # fmt: skip
    step = training.compile(strategy=strategy)
    found = [step({"input_ids": tokens}) for _ in range(2)]
    expected = alpha**2 / (length * 36) / 3
    assert found == pytest.approx([expected] * 2, rel=0.03)
    assert found[0] != found[1]
    assert step.evaluate([{"input_ids": tokens}]) == {"loss": 0.0}
    with pytest.raises(DistIRError, match="get_input_embeddings returns its embeddings"):
        dr.compile_training(
            torch.nn.Linear(5, 5), torch.nn.functional.mse_loss, optimizer=dr.optim.SGD(0.1), neftune_noise_alpha=5.0,
            example_batch=(torch.ones(3, 5), torch.ones(3, 5)),
        )  # fmt: skip


def test_options_of_the_loop(tmp_path: Path) -> None:
    options = arguments(
        tmp_path, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=3, bf16=True, save_strategy="steps",
        save_steps=0.1, save_total_limit=2, eval_strategy="epoch", metric_for_best_model="eval_accuracy",
        gradient_checkpointing=True, seed=9, train_sampling_strategy="group_by_length",
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
        "best": "accuracy:max", "grouped_by": "length",
    }  # fmt: skip
    source = training.read({"strategy": "2/1/1/1"})
    assert source.options["strategy"] == dr.Strategy.parse("2/1/1/3,checkpoint=block")


def test_seeds_and_strategies_of_saving(tmp_path: Path) -> None:
    tokens = torch.randint(127, (ROWS, 15))

    def options(**chosen: Any) -> dict[str, Any]:
        example = {"input_ids": tokens, "labels": tokens}
        return dr.Training(model(), example_batch=example, arguments=arguments(tmp_path, **chosen)).run_options()

    assert options(data_seed=0)["seed"] == 0
    assert options(seed=3)["seed"] == 3
    best = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2}
    assert options(**best, metric_for_best_model="acc").items() >= {"best": "acc:max", "every": STEPS}.items()
    for chosen in (best, {"save_strategy": "best", "metric_for_best_model": "acc"}):
        with pytest.raises(DistIRError, match="no equal of save_strategy='best'"):
            options(**chosen)
    for saving in ("no", "steps"):
        with pytest.raises(DistIRError, match="no equal of resume_from_checkpoint='/elsewhere/checkpoint-500'"):
            options(save_strategy=saving, resume_from_checkpoint="/elsewhere/checkpoint-500")
    assert options(save_strategy="steps", resume_from_checkpoint=True)["resume"] == "last"
    assert options(resume_from_checkpoint=True)["resume"] == str(tmp_path)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """Of random tokens the first of four evaluations is the best; a run resumes from a checkpoint by its path."""
    tokens = torch.randint(127, (2, ROWS * 4, 15), generator=torch.Generator().manual_seed(4))
    sets = [[{"input_ids": row, "labels": row} for row in part] for part in tokens]
    data, held = (torch.utils.data.DataLoader(rows, batch_size=ROWS) for rows in sets)  # type: ignore[arg-type]
    saving = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss", "max_steps": 8}
    rates = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "warmup_steps": 0}

    class Metrics(dr.Callback):
        def __init__(self) -> None:
            self.losses: dict[int, float] = {}

        def evaluated(self, step: int, metrics: Any) -> None:
            self.losses[step] = metrics["loss"]

    def run(name: str, **chosen: Any) -> tuple[Any, Any, dict[int, float], set[str]]:
        options = arguments(tmp_path / name, **saving, **{**rates, **chosen})
        training = dr.Training(model(), example_batch=next(iter(data)), arguments=options, metrics={})
        step, metrics = training.compile(), Metrics()
        ended = dr.train(step, data, evaluation=held, callbacks=[metrics], **training.run_options())
        return ended, step, metrics.losses, {path.name for path in (tmp_path / name).glob("step-*")}

    ended, step, losses, saved = run("every", save_strategy="steps", save_steps=2, load_best_model_at_end=True)
    best = min(losses, key=losses.__getitem__)
    assert (ended.step, ended.best, step.steps) == (8, best, best)
    assert step.evaluate(held)["loss"] == pytest.approx(losses[best], rel=1e-5)
    assert best < 8
    assert len(saved) == 4
    *_, written = run("best", save_strategy="best")
    improving = {n for n in losses if losses[n] == min(loss for m, loss in losses.items() if m <= n)}
    assert written == {f"step-{n:08}" for n in improving | {8}}
    first = str(tmp_path / "every" / "step-00000002")
    ended, plain, resumed, _ = run("other", resume_from_checkpoint=first)
    assert ended.step == 8
    assert dr.train(plain, data, steps=9, resume=Path(first)).step == 9
    assert resumed == {n: pytest.approx(loss, rel=1e-5) for n, loss in losses.items() if n > 2}
    with pytest.raises(DistIRError, match="checkpoints here already"):
        run("best", save_strategy="steps", resume_from_checkpoint=first)


def test_mistakes_are_errors(tmp_path: Path) -> None:
    tokens = torch.randint(127, (ROWS, 15))
    batch = {"input_ids": tokens, "labels": tokens}
    for option, value in {
        "eval_on_start": True, "auto_find_batch_size": True, "ignore_data_skip": True, "optim_target_modules": "all",
        "report_to": ["comet_ml"], "push_to_hub": True,
    }.items():  # fmt: skip
        options = arguments(tmp_path)
        setattr(options, option, value)
        with pytest.raises(DistIRError, match=f"TrainingArguments: there is no equal of {option}="):
            dr.compile_training(model(), example_batch=batch, arguments=options)

    @dataclass
    class Longer(transformers.TrainingArguments):  # type: ignore[misc]
        packed: bool = False

    chosen = {"max_steps": 3, "use_cpu": True, "save_strategy": "no"}
    with pytest.raises(DistIRError, match="there is no equal of packed=True"):
        dr.compile_training(model(), example_batch=batch, arguments=Longer(str(tmp_path), packed=True, **chosen))
    dr.Training(model(), example_batch=batch, arguments=Longer(str(tmp_path), **chosen)).run_options()
    with pytest.raises(DistIRError, match="found epochs"):
        dr.compile_training(model(), example_batch=batch, arguments=arguments(tmp_path, max_steps=-1))
    options = arguments(tmp_path, gradient_accumulation_steps=3)
    with pytest.raises(DistIRError, match="found 4"):
        dr.compile_training(model(), example_batch=batch, arguments=options, strategy="1/1/1/4")
    with pytest.raises(DistIRError, match="found int"):
        dr.compile_training(model(), example_batch=batch, arguments=3)
