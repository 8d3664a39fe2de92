"""Trained weights in torch, in safetensors files, in folders of transformers, and back, against training by torch."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.checkpoints import Position, common_prefix
from distir_relax.cli import app
from distir_relax.errors import BundleError, CheckpointError, RunError
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.checkpointing import save
from distir_relax.runtime.training.executor import Executor

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.shares("model_weights")]
TIED, OTHER_NAME, FROZEN = "transformer.wte.weight", "lm_head.weight", "transformer.wpe.weight"


def language_model() -> GPT2LMHeadModel:
    """A GPT-2 in float64, with tied embeddings and frozen positions."""
    torch.manual_seed(3)
    config = GPT2Config(
        n_layer=1, n_head=3, n_embd=15, vocab_size=37, n_positions=11, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double().train()
    model.transformer.wpe.weight.requires_grad_(False)
    return model


def likelihood(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """The loss in the dtype of the model; that of transformers is float32."""
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def tokens(count: int) -> list[tuple[dict[str, Any], torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(0, 37, (6, 8), generator=generator) for _ in range(count)]
    return [({"input_ids": ids[:, :-1], "use_cache": False}, ids[:, 1:]) for ids in drawn]


def checkpoint_of(step: dr.TrainingStep, folder: Path) -> Path:
    """Write a checkpoint of a step, as `distir train` does, and its bundle; return the folder of checkpoints."""
    step.save(folder / "model.dist", ("torch",))
    executor = Executor(Session(read_bundle(folder / "model.dist")))
    save(executor, folder / "ck", Position(step.steps, 6 * step.steps, 0, "model"), keep=2)
    return folder / "ck"


@dataclass
class Trained:
    """A step after training, the same model trained by torch, their averages, and a folder with files."""

    step: dr.TrainingStep
    model: nn.Module
    averages: nn.Module
    folder: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("weights")
    model, batches = language_model(), tokens(3)
    model.save_pretrained(folder / "before", max_shard_size="4KB")
    (folder / "before" / "pytorch_model.bin").write_bytes(b"an older copy of the weights")
    step = dr.compile_training(
        model, likelihood, optimizer=dr.optim.AdamW(0.01), example_batch=batches[0], averaging=dr.optim.EMA(0.5),
        strategy="3/1/1/1,zero=1",
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    averages = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for batch in batches:
        step(*batch)
        optimizer.zero_grad()
        likelihood(model(**batch[0]), batch[1]).backward()
        optimizer.step()
        averages.update_parameters(model)
    checkpoint_of(step, folder)
    return Trained(step, model, averages.module, folder)


@pytest.fixture(scope="module")
def fresh() -> dr.TrainingStep:
    """The same model, untrained, on 2 ranks."""
    return dr.compile_training(
        language_model(),
        likelihood,
        optimizer=dr.optim.SGD(0.0),
        example_batch=tokens(1)[0],
        strategy="2/1/1/1",
        metrics={},
    )


def assert_equal_states(found: Any, expected: nn.Module, tolerance: float = 1e-11) -> None:
    """Fail unless tensors by name are those of a module."""
    state = expected.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


def loss_of(model: nn.Module) -> float:
    inputs, targets = tokens(9)[8]
    with torch.no_grad():
        return float(likelihood(model(**inputs), targets))


@pytest.mark.parametrize("averaged", [False, True])
def test_weights_are_copied_into_a_model(trained: Trained, averaged: bool) -> None:
    model = language_model()
    trained.step.copy_to_model(model, averaged=averaged)
    expected = trained.averages if averaged else trained.model
    assert_equal_states(model.state_dict(), expected)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert loss_of(model) == pytest.approx(loss_of(expected), rel=1e-10)


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export-checkpoint", *map(str, arguments)])


@pytest.mark.parametrize("averaged", [False, True])
def test_a_checkpoint_becomes_a_file_for_torch(trained: Trained, tmp_path: Path, averaged: bool) -> None:
    """Tied weights have all of their names, frozen ones come from the bundle: `load_state_dict` is strict."""
    flags = ["--averaged"] if averaged else []
    bundle = trained.folder / "model.dist"
    done = command(trained.folder / "ck", "--bundle", bundle, "-o", tmp_path / "w.safetensors", *flags)
    assert "17 tensors of step 3" in done.stdout, done.output
    model = language_model()
    model.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert_equal_states(model.state_dict(), trained.averages if averaged else trained.model)


@pytest.mark.parametrize("averaged", [False, True])
def test_a_checkpoint_becomes_a_pretrained_folder(trained: Trained, tmp_path: Path, averaged: bool) -> None:
    flags = ["--averaged"] if averaged else []
    before, after = trained.folder / "before", tmp_path / "after"
    done = command(trained.folder / "ck", "--pretrained", before, "-o", after, *flags)
    assert "15 trained tensors of step 3" in done.stdout, done.output
    assert {p.name for p in after.iterdir()} == {p.name for p in before.iterdir()} - {"pytorch_model.bin"}
    model = AutoModelForCausalLM.from_pretrained(after)
    assert_equal_states(model.state_dict(), trained.averages if averaged else trained.model)
    assert command(trained.folder / "ck", "--pretrained", before, "-o", after).exit_code != 0


def test_a_folder_keeps_its_dtype(trained: Trained, tmp_path: Path) -> None:
    language_model().bfloat16().save_pretrained(tmp_path / "narrow")
    assert command(trained.folder / "ck", "--pretrained", tmp_path / "narrow", "-o", tmp_path / "o").exit_code == 0
    found = load_file(tmp_path / "o" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    expected = trained.step.parameters()[TIED].bfloat16()
    torch.testing.assert_close(found[TIED], expected, rtol=0, atol=0)


def as_state_dict(trained: Trained, folder: Path) -> Any:
    return trained.model.state_dict()


def as_file(trained: Trained, folder: Path) -> Any:
    """One name of the tied weights is enough."""
    state = {n: t.clone() for n, t in trained.model.state_dict().items() if n != TIED}
    save_file(state, folder / "w.safetensors")
    return str(folder / "w.safetensors")


def as_pretrained(trained: Trained, folder: Path) -> Any:
    trained.model.save_pretrained(folder, max_shard_size="4KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder


def as_checkpoint(trained: Trained, folder: Path) -> Any:
    return trained.folder / "ck"


def as_distributed(trained: Trained, folder: Path) -> Any:
    """A checkpoint of torch with an optimizer's state beside the model."""
    optimizer = {"state": {TIED: {"exp_avg": torch.zeros(37, 15)}}, "lr": 0.1}
    dcp.save({"model": trained.model.state_dict(), "optim": optimizer}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.drawn(3)
@pytest.mark.parametrize("form", [as_state_dict, as_file, as_pretrained, as_checkpoint, as_distributed])
def test_weights_are_loaded_from(
    trained: Trained, fresh: dr.TrainingStep, tmp_path: Path, form: Callable[[Trained, Path], Any]
) -> None:
    fresh.load_parameters(language_model().state_dict())
    batch = tokens(9)[8]
    untrained = fresh.evaluate([batch])["loss"]
    fresh.load_parameters(form(trained, tmp_path))
    assert_equal_states(fresh.parameters(), trained.model)
    assert fresh.evaluate([batch])["loss"] == pytest.approx(loss_of(trained.model), rel=1e-10)
    assert fresh(*batch) == pytest.approx(loss_of(trained.model), rel=1e-10)
    assert abs(fresh(*batch) - untrained) > 0.01


def test_frozen_weights_are_loaded_also_after_steps(trained: Trained, fresh: dr.TrainingStep) -> None:
    """The optimizer's state stays: momentum goes on. The evaluation has the frozen weights, too."""
    batches = tokens(4)
    model = language_model()
    step = dr.compile_training(
        model,
        likelihood,
        optimizer=dr.optim.SGD(0.1, momentum=0.5),
        example_batch=batches[0],
        strategy="3/1/1/1",
        metrics={},
    )
    step.evaluate(batches[:1])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.5)
    for number, batch in enumerate(batches):
        if number == 2:
            with torch.no_grad():
                model.load_state_dict({name: tensor * 0.9 for name, tensor in model.state_dict().items()})
            step.load_parameters({FROZEN: model.state_dict()[FROZEN]}, strict=False)
            step.load_parameters(model.state_dict())
        step(*batch)
        optimizer.zero_grad()
        likelihood(model(**batch[0]), batch[1]).backward()
        optimizer.step()
    assert_equal_states(step.parameters(), model)
    assert step.evaluate([tokens(9)[8]])["loss"] == pytest.approx(loss_of(model), rel=1e-10)


def test_averages_are_loaded(trained: Trained, fresh: dr.TrainingStep) -> None:
    fresh.load_parameters(trained.folder / "ck", averaged=True)
    assert_equal_states(fresh.parameters(), trained.averages)


class Classifier(nn.Module):
    """A batch norm, a buffer that is a constant, one that is not saved, and a parameter without influence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.spare = nn.Linear(2, 2)
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))) + self.table + self.hidden


class ScaledLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output * self.scale, target)


def classifier(dtype: torch.dtype = torch.float64) -> Classifier:
    torch.manual_seed(5)
    return Classifier().to(dtype).train()


def samples(dtype: torch.dtype, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [tuple(torch.randn(9, n, generator=generator).to(dtype) for n in (5, 3)) for _ in range(count)]


@pytest.fixture(scope="module")
def normalized(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("normalized")
    model, loss, batches = classifier(), ScaledLoss().double(), samples(torch.float64, 3)
    step = dr.compile_training(model, loss, optimizer=dr.optim.SGD(0.1), example_batch=batches[0], strategy="3/1/1/1")
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1)
    for batch in batches:
        step(*batch)
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    checkpoint_of(step, folder)
    return Trained(step, model, loss, folder)


def test_running_statistics_are_copied_and_exported(normalized: Trained, tmp_path: Path) -> None:
    copied, read = classifier(), classifier()
    normalized.step.copy_to_model(copied)
    assert_equal_states(copied.state_dict(), normalized.model)
    assert int(copied.norm.num_batches_tracked) == 3
    assert command(normalized.folder / "ck", "-o", tmp_path / "w.safetensors").exit_code == 0
    missing, unexpected = read.load_state_dict(load_file(tmp_path / "w.safetensors"), strict=False)
    assert (sorted(missing), unexpected) == (["spare.bias", "spare.weight", "table"], [])
    assert_equal_states(read.state_dict(), normalized.model)


def test_a_state_dict_is_loaded_into_a_model_with_a_loss(normalized: Trained) -> None:
    """The running statistics are state; the parameter of the loss is missing in the model's state dict."""
    other = classifier()
    with torch.no_grad():
        other.load_state_dict({n: t + (t.is_floating_point() and n != "table") for n, t in other.state_dict().items()})
    batch = samples(torch.float64, 1)[0]
    loss = ScaledLoss().double()
    step = dr.compile_training(classifier(), loss, optimizer=dr.optim.SGD(0.1), example_batch=batch, strategy="3/1/1/1")
    step.load_parameters(other.state_dict())
    assert_equal_states(state_of(step), other)
    assert step(*batch) == pytest.approx(float(loss(other(batch[0]), batch[1])), rel=1e-12)
    step.load_parameters(normalized.folder / "ck")
    assert_equal_states(state_of(step), normalized_but_spare(normalized, other))
    torch.testing.assert_close(step.parameters()["loss.scale"], normalized.averages.scale.detach())


def state_of(step: dr.TrainingStep) -> dict[str, torch.Tensor]:
    """The state dict of a classifier that has been copied from a step."""
    model = classifier()
    step.copy_to_model(model)
    return model.state_dict()


def normalized_but_spare(normalized: Trained, other: nn.Module) -> nn.Module:
    model = copy.deepcopy(normalized.model)
    model.spare = other.spare
    return model


def test_float32_masters_of_a_bfloat16_model(tmp_path: Path) -> None:
    """They are copied, exported and loaded as they are: a resumed step has the same bits."""
    batches = samples(torch.float32, 3)

    def step_of() -> dr.TrainingStep:
        model = classifier(torch.float32)
        return dr.compile_training(
            model,
            F.mse_loss,
            optimizer=dr.optim.SGD(0.01),
            example_batch=batches[0],
            strategy="3/1/1/1",
            precision="bf16",
        )

    step, other = step_of(), step_of()
    for batch in batches[:2]:
        step(*batch)
    model = classifier(torch.float32)
    step.copy_to_model(model)
    found = step.parameters()
    assert not torch.equal(found["first.weight"], found["first.weight"].bfloat16().float())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), found[name], rtol=0, atol=0)
    command(checkpoint_of(step, tmp_path), "-o", tmp_path / "w.safetensors")
    assert {str(t.dtype) for n, t in load_file(tmp_path / "w.safetensors").items() if "norm.run" not in n} == {
        "torch.float32", "torch.int64",
    }  # fmt: skip
    other.load_parameters(model.state_dict())
    assert other(*batches[2]) == step(*batches[2])


CHANGES: list[tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = [
    ("missing", lambda s: s.pop("transformer.ln_f.bias"), "expected tensors for transformer.ln_f.bias, found none"),
    ("unknown", lambda s: s.update({"transformer.ln_f.bia": torch.ones(15)}), "did you mean 'transformer.ln_f.bias'?"),
    ("shape", lambda s: s.update({"transformer.ln_f.bias": torch.ones(16)}), r"expected \(15,\) for 'transformer.ln"),
    ("dtype", lambda s: s.update({"transformer.ln_f.bias": torch.ones(15).int()}), "expected torch.float64 for"),
    ("kind", lambda s: s.update({"transformer.ln_f.bias": 7}), "expected a tensor for 'transformer.ln_f.bias', found"),
    ("meta", lambda s: s.update({"transformer.ln_f.bias": torch.ones(15, device="meta")}), "expected data for"),
    ("tied", lambda s: s.update({OTHER_NAME: s[TIED] + 1}), "which are tied, found different"),
    ("frozen", lambda s: s.pop(FROZEN), f"expected tensors for {FROZEN}"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES])
def test_tensors_that_do_not_fit(trained: Trained, fresh: dr.TrainingStep, change: Any, message: str) -> None:
    fresh.load_parameters(trained.model.state_dict())
    state = {name: tensor + 1 for name, tensor in language_model().state_dict().items()}
    change(state)
    with pytest.raises(CheckpointError, match=message):
        fresh.load_parameters(state)
    assert_equal_states(fresh.parameters(), trained.model)


def test_names_with_a_prefix_and_of_another_model(fresh: dr.TrainingStep) -> None:
    state = language_model().state_dict()
    with pytest.raises(CheckpointError, match=r"remove the prefix 'module\.'"):
        fresh.load_parameters({f"module.{name}": tensor for name, tensor in state.items()})
    with pytest.raises(CheckpointError, match="they may be of another model"):
        fresh.load_parameters({"a": torch.ones(3)}, strict=False)
    assert common_prefix(["a.b", "c"], ["x.a.b", "x.c", "y.x.c"]) == "x."
    assert common_prefix(["a.b", "c"], ["a.b", "x.c"]) == ""


@dataclass
class Attribute:
    """The attribute of something, in a pickle."""

    of: object
    name: str

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.of, self.name)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def test_files_that_cannot_be_loaded(
    trained: Trained, fresh: dr.TrainingStep, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(source: Path, message: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=message):
            fresh.load_parameters(source, **options)

    refused(tmp_path / "none", "weights are missing")
    refused(tmp_path, "expected safetensors files or a checkpoint in the folder, found none")
    damaged = tmp_path / "w.safetensors"
    damaged.write_bytes(b"\xff" * 9)
    refused(damaged, "damaged")
    refused(trained.folder / "before", "expected a checkpoint of a training run, which may hold", averaged=True)
    with pytest.raises(CheckpointError, match="expected the path of a checkpoint"):
        fresh.load_parameters(trained.model.state_dict(), averaged=True)
    distributed = tmp_path / "dcp"
    dcp.save({"model": trained.model.state_dict()}, checkpoint_id=distributed, no_dist=True)
    for file in distributed.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:900])
    refused(distributed, "the distributed checkpoint cannot be read")
    for content, message in (
        (pickle.dumps(Evil()), "found builtins.print"), (b"\x80", "cannot be read"),
        (pickle.dumps(Attribute(torch.Size, "numel")), "expected a member of an enum, found the attribute 'numel'"),
        # As Python 3.11.2 writes it.
        (pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")), "no attribute 'state_dict_metadata'"),
    ):  # fmt: skip
        (distributed / ".metadata").write_bytes(content)
        refused(distributed, message)
    assert "must not run" not in capfd.readouterr().out


def test_checkpoints_that_cannot_be_exported(trained: Trained, normalized: Trained, tmp_path: Path) -> None:
    def refused(message: str, *arguments: object) -> None:
        done = command(*arguments, "-o", tmp_path / "out")
        assert isinstance(done.exception, (CheckpointError, BundleError)), done.output
        assert message in str(done.exception)
        assert not [*tmp_path.glob("*out*")]

    checkpoint = trained.folder / "ck"
    refused(f"the checkpoint does not have {FROZEN}, which training does not change", checkpoint)
    refused(f"expected the weights {FROZEN} in the bundle", checkpoint, "--bundle", normalized.folder / "model.dist")
    refused("the checkpoint has no averages of weights", normalized.folder / "ck", "--averaged")
    refused("in the folder, found none", normalized.folder / "ck", "--pretrained", trained.folder / "before")
    refused("there is no such folder", tmp_path / "none")
    refused("expected --bundle or --pretrained", checkpoint, "--bundle", tmp_path, "--pretrained", tmp_path)
    refused("expected --trained or a source", checkpoint, "--bundle", tmp_path, "--trained")
    config = copy.deepcopy(trained.model.config)
    config.vocab_size = 39
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "wider")
    refused("expected (37, 15) for the weight 'transformer.wte.weight'", checkpoint, "--pretrained", tmp_path / "wider")
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    (newest,) = checkpoint.glob("step-*")
    (nameless / "state.safetensors").write_bytes((newest / "state.safetensors").read_bytes())
    position = json.loads((newest / "position.json").read_text())
    del position["names"]
    (nameless / "position.json").write_text(json.dumps(position))
    refused("the checkpoint does not have the model's names", nameless)


def test_models_that_cannot_take_the_weights(trained: Trained, normalized: Trained) -> None:
    step = normalized.step
    with pytest.raises(CheckpointError, match=r"the model has no norm\.running_mean"):
        step.copy_to_model(language_model())
    model = classifier()
    model.more = nn.Linear(1, 1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"found more.weight, more.bias, too"):
        step.copy_to_model(model)
    del model.more
    model.last = nn.Linear(7, 4)
    with pytest.raises(CheckpointError, match=r"expected a tensor of \(3, 7\) for 'last.weight', found \(4, 7\)"):
        step.copy_to_model(model)
    assert torch.equal(before["first.weight"], model.first.weight)
    with pytest.raises(CheckpointError, match="found one without data"):
        step.copy_to_model(classifier().to("meta"))
    with pytest.raises(RunError, match="keeps no averages"):
        step.copy_to_model(classifier(), averaged=True)
    changed = {**classifier().state_dict(), "table": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="the buffer 'table' has other numbers than at compilation"):
        step.load_parameters(changed)
