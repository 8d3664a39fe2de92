"""Training runs: data, resumed runs, ends, with ranks as threads and under mpirun."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from distir_relax.bundle import BundleFile, read_bundle
from distir_relax.checkpoints import saved_steps
from distir_relax.cli import app
from distir_relax.cli.training_data import load_data
from distir_relax.errors import CheckpointError, DistIRError, ImportModelError, RunError
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.microbatch_io import in_parts
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import Samples, Stream, data_inputs, numbers
from distir_relax.runtime.training.callbacks import Callback, Ended, RunInfo, StepResult
from distir_relax.runtime.training.data_sources import open_data
from distir_relax.runtime.training.executor import Executor
from distir_relax.runtime.training.options import TrainOptions
from distir_relax.runtime.training.train import Run
from distir_relax.runtime.training.train import train as train_run
from distir_relax.runtime.training.training_loop import Training
from distir_relax.runtime.world import Alone
from tests.runtime.processes import environment, mpirun, python
from tests.training import data, perceptron

pytestmark = pytest.mark.timeout(120)
DATA = Path(data.__file__)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same training for 3 ranks that split the batch, and for 2 that split the model."""
    folder = tmp_path_factory.mktemp("bundles")
    return {3: perceptron.saved("3/1/1/1", folder), 2: perceptron.saved("1/2/1/1", folder)}


class Heard(Callback):
    """A callback that keeps losses and paths."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.paths: list[Path] = []
        self.unit = ""

    def begun(self, run: RunInfo) -> None:
        self.unit = f"{run.work} {run.unit}"

    def done(self, result: StepResult) -> None:
        self.losses[result.step] = result.loss

    def saved(self, path: Path, step: int) -> None:
        self.paths.append(path)


def train(bundle: Path, name: str, steps: int, stop_behind: int = 0, **options: object) -> tuple[Heard, Ended]:
    """Train here; a run that is told to stop behind a step does."""
    heard = Heard()
    stop = lambda: 0 < len(heard.losses) == stop_behind  # noqa: E731
    run = Run(BundleFile(bundle), load_data(f"{DATA}:{name}"), TrainOptions(steps, **options), [heard], stop=stop)  # type: ignore[arg-type]
    return heard, train_run(run)


def test_losses_are_those_of_torch(bundles: dict[int, Path]) -> None:
    found, ended = train(bundles[3], "batches", 8)
    torch.manual_seed(0)
    model = perceptron.Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 1.0)
    schedule = read_bundle(bundles[3]).manifest.training
    assert schedule is not None
    for number in range(8):
        x, target = data.drawn(number)
        optimizer.param_groups[0]["lr"] = schedule.rates["learning_rate"](number)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert found.losses[number + 1] == pytest.approx(loss.item(), rel=1e-4)
    assert (ended.step, ended.reason, ended.saved) == (8, "", None)
    assert found.unit == "11 samples"


@pytest.mark.parametrize("name", ["batches", "samples", "epoch"])
def test_a_run_goes_on_where_it_was_on_other_ranks(bundles: dict[int, Path], name: str, tmp_path: Path) -> None:
    whole, _ = train(bundles[3], name, 9)
    first, ended = train(bundles[3], name, 9, checkpoints=tmp_path, every=3, stop_behind=7)
    assert (ended.step, ended.reason, ended.saved) == (7, "interrupted", 6)
    rest, ended = train(bundles[2], name, 9, checkpoints=tmp_path, every=3, resume="last")
    assert sorted(first.losses) == list(range(1, 8))
    assert sorted(rest.losses) == [7, 8, 9]
    assert [*first.losses.values(), *list(rest.losses.values())[1:]] == pytest.approx(
        list(whole.losses.values()), rel=1e-4
    )
    assert rest.losses[7] == pytest.approx(first.losses[7], rel=1e-4)
    assert rest.paths == [tmp_path / "step-00000009"]


def test_data_that_ends_ends_the_run(bundles: dict[int, Path], tmp_path: Path) -> None:
    heard, ended = train(bundles[3], "few", 9, checkpoints=tmp_path, every=5)
    assert (len(heard.losses), ended.step, ended.reason, ended.saved) == (7, 7, "the data has ended", 5)


def test_a_loss_that_is_no_number_ends_the_run(bundles: dict[int, Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the loss of step 5 is nan") as caught:
        train(bundles[3], "with_nan", 9, checkpoints=tmp_path, every=2)
    assert "the last checkpoint is of step 4" in caught.value.hint


def test_what_cannot_be_is_said_before_the_first_step(bundles: dict[int, Path], tmp_path: Path) -> None:
    train(bundles[3], "batches", 1, checkpoints=tmp_path)
    with pytest.raises(CheckpointError, match="checkpoints here already, the last of step 1"):
        train(bundles[3], "batches", 2, checkpoints=tmp_path)
    with pytest.raises(CheckpointError, match="has the seed 0, found --seed 5"):
        train(bundles[3], "batches", 2, checkpoints=tmp_path, resume="last", seed=5)
    with pytest.raises(ImportModelError, match="does not exist"):
        train(bundles[3], "bacthes", 2)
    with pytest.raises(RunError, match="expected batches or a data set, found NoneType"):
        train(bundles[3], "nothing", 2)


def test_an_error_of_the_user_s_is_told_with_its_line(bundles: dict[int, Path]) -> None:
    with pytest.raises(ImportModelError, match="raised LookupError when it was asked for a batch: the file") as caught:
        train(bundles[3], "failing", 9)
    assert "data.py:" in caught.value.where


def test_batches_unlike_the_example_are_named(bundles: dict[int, Path]) -> None:
    manifest = read_bundle(bundles[3]).manifest
    x, target = data.drawn(0)
    names = [tensor.name for tensor in data_inputs(manifest)]
    items = [{names[1]: target, names[0]: x}, ({names[0]: x}, target)]
    good = Stream(manifest, lambda at: (iter(items), at))
    for step in range(2):
        batch = good.batch(step)
        assert batch is not None
        assert all(
            torch.equal(torch.cat(parts), whole)
            for parts, whole in zip(
                zip(*(batch.local(rank, "cpu")[:2] for rank in range(3)), strict=True), (x, target), strict=True
            )
        )
    for wrong, words in (
        ((x,), "expected data for"),
        ((x, target, x), "3 without a name"),
        ({"z": x}, "found 'z'"),
        ((x[1:], target), r"expected float32 \(11, 5\), found float32 \(10, 5\)"),
        ((x.double(), target), "found float64"),
    ):
        with pytest.raises(RunError, match=words):
            Stream(manifest, lambda at, wrong=wrong: (iter([wrong]), at)).batch(0)
    for samples, words in (
        ([(x[0], target[0])] * 5, "expected samples for a batch of 11, found 5"),
        ([(x[0], target[0].long())] * 11, r"expected float32 \(3,\), found int64"),
    ):
        with pytest.raises(RunError, match=words):
            Samples(manifest, samples, 0).batch(0).local(0, "cpu")


@pytest.mark.parametrize("strategy", ["3/1/1/1", "2/1/1/3"])
def test_each_rank_reads_its_own_rows(strategy: str, tmp_path: Path) -> None:
    manifest = perceptron.saved_manifest(strategy, tmp_path)
    table = data.Table()
    source = Samples(manifest, table, 7)
    seen: list[int] = []
    for step in (0, 1, 2, 3):
        batch = source.batch(step)
        rows = list(batch.rows)  # type: ignore[attr-defined]
        read = zip(*(table[row] for row in rows), strict=True)
        whole = dict(zip((t.name for t in data_inputs(manifest)), map(torch.stack, read), strict=True))
        whole |= numbers(manifest, step)
        table.read = []
        assert len(set(rows)) == data.ROWS
        for rank in range(manifest.mesh.size):
            found = batch.local(rank, "cpu")
            expected = local_inputs(manifest, in_parts(manifest, whole), rank, "cpu")
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            assert set(table.read) <= set(rows)
            if strategy == "3/1/1/1":
                assert len(table.read) in (3, 4)
            table.read = []
        if step < 3:
            seen += rows
    # An epoch has three batches, none with a sample of another; the next is in another order.
    assert len(set(seen)) == 33
    assert rows != seen[:11]


class Two(Alone):
    """Two processes."""

    size = 2


class DivergingExecutor(Executor):
    """An executor in which another process has other values."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._world = Two()

    def exchange(self, value: Any) -> list[Any]:
        if isinstance(value, list):
            other = [{key: n + 1 for key, n in item.items()} if isinstance(item, dict) else item for item in value]
            return [value, other]
        return [value, value]


def test_other_batches_on_other_ranks_are_refused(bundles: dict[int, Path]) -> None:
    bundle = read_bundle(bundles[3])
    source = open_data(data.batches, bundle.manifest, 0)
    training = Training(DivergingExecutor(Session(bundle)), lambda seed, start: source, TrainOptions(2), [Heard()])
    with pytest.raises(RunError, match="in step 1 rank 1 has other numbers for the input 'x'"):
        training.run()


class EndingExecutor(Executor):
    """An executor in which the data of another process have ended when the fourth batch is read."""

    reads = 0

    def exchange(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            return [value, value]
        self.reads += 1
        return [value, [*value[:-1], self.reads == 4]]


def test_data_that_end_early_on_a_rank_are_told_at_once(bundles: dict[int, Path]) -> None:
    bundle = read_bundle(bundles[3])
    source = open_data(data.batches, bundle.manifest, 0)
    training = Training(EndingExecutor(Session(bundle)), lambda seed, start: source, TrainOptions(9), [Heard()])
    with pytest.raises(RunError, match="after 3 steps the data have ended on rank 1, but not on all"):
        training.run()


def test_a_program_that_is_no_training_is_refused(tmp_path: Path) -> None:
    import distir_relax as dr

    path = dr.compile(torch.nn.Linear(5, 3), (torch.randn(2, 5),), mesh=1).save(tmp_path / "m.dist", ("torch",))
    with pytest.raises(DistIRError, match="not a step of training"):
        train(path, "batches", 2)


def command(bundle: Path, name: str, *options: object) -> list[str]:
    return ["-m", "distir_relax", "train", str(bundle), "--data", f"{DATA}:{name}", *map(str, options)]


@pytest.mark.mpirun
def test_ranks_of_launches_go_on_where_others_were(bundles: dict[int, Path], tmp_path: Path) -> None:
    whole, _ = train(bundles[3], "samples", 6)
    five = perceptron.saved("5/1/1/1", tmp_path)
    folder = tmp_path / "ck"
    done = mpirun(3, *command(bundles[3], "samples", "--steps", 3, "--checkpoint", folder))
    assert done.returncode == 0, done.stderr
    done = mpirun(5, *command(five, "samples", "--steps", 6, "--checkpoint", folder, "--resume"))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line[1] for line in lines] == ["4/6", "5/6", "6/6"]
    assert [float(line[3]) for line in lines] == pytest.approx([whole.losses[i] for i in (4, 5, 6)], rel=1e-4)
    assert f"wrote {folder / 'step-00000006'}" in done.stdout
    assert "the last checkpoint is of step 6" in done.stdout


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_an_error_of_a_launch_is_told_once(bundles: dict[int, Path]) -> None:
    done = python(*command(bundles[2], "with_nan", "--steps", 9, "-n", 2, "--every", 7, "--seed", 3))
    assert done.returncode == 2
    assert "-n 2" in done.stderr
    assert "--every 7" in done.stderr
    assert "--seed 3" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "the loss of step 5 is nan" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_run_says_how_to_go_on(bundles: dict[int, Path], tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    arguments = command(bundles[3], "slow", "--steps", 500, "--checkpoint", folder, "--every", 2)
    with subprocess.Popen(
        [sys.executable, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("wrote"))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "with the same command and --resume" in err
    assert "Traceback" not in out + err
    _, ended = train(bundles[2], "slow", 4, checkpoints=folder, resume="last")
    assert ended.step >= 4


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.parametrize("ranks", [(), ("-n", 2)], ids=["threads", "mpirun"])
def test_a_run_that_is_sent_sigterm_writes_its_step(
    bundles: dict[int, Path], ranks: tuple[object, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "ck"
    options = ("--steps", 500, "--checkpoint", folder, "--every", 3, *ranks)
    with subprocess.Popen(
        [sys.executable, *command(bundles[2], "slow", *options)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("wrote"))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 143, err
    step = saved_steps(folder)[-1]
    assert step >= 3
    assert f"terminated after step {step}: resume from step {step} with the same command and --resume" in err
    assert f"wrote {folder / f'step-{step:08}'}" in out
    assert "Traceback" not in err
    whole, _ = train(bundles[3], "slow", step + 1)
    heard, _ = train(bundles[3], "slow", step + 1, checkpoints=folder, resume="auto")
    assert list(heard.losses) == [step + 1]
    assert heard.losses[step + 1] == pytest.approx(whole.losses[step + 1], rel=1e-4)


def test_a_signal_before_the_first_step_ends_the_run_there(bundles: dict[int, Path], tmp_path: Path) -> None:
    heard = Heard()
    options = TrainOptions(3, tmp_path / "ck")
    run = Run(BundleFile(bundles[3]), load_data(f"{DATA}:batches"), options, [heard], stop=lambda: signal.SIGTERM)
    ended = train_run(run)
    assert (ended.step, ended.reason, ended.signal, ended.saved) == (0, "terminated", signal.SIGTERM, None)
    assert heard.losses == {}


def test_auto_goes_on_from_the_newest_whole_checkpoint(bundles: dict[int, Path], tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    first, ended = train(bundles[3], "batches", 3, checkpoints=folder, every=1, resume="auto")
    assert list(first.losses) == [1, 2, 3]
    assert ended.saved == 3
    newest = folder / "step-00000003" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="step-00000003"):
        train(bundles[3], "batches", 4, checkpoints=folder, resume="last")
    with pytest.warns(UserWarning, match=r"a checkpoint is skipped: .*step-00000003"):
        second, ended = train(bundles[2], "batches", 4, checkpoints=folder, every=1, resume="auto")
    assert list(second.losses) == [3, 4]
    assert second.losses[3] == pytest.approx(first.losses[3], rel=1e-4)
    assert saved_steps(folder) == [2, 3, 4]
    # A checkpoint of another program is not left out: the run would begin anew without a word.
    other = perceptron.step("1/1/1/1", torch.nn.Linear(5, 3)).save(tmp_path / "other.dist", backends=("torch",))
    with pytest.raises(CheckpointError, match=r"the checkpoint has up\.weight, .*, which the program does not have"):
        train(other, "batches", 5, checkpoints=folder, resume="auto")


def test_auto_begins_anew_where_no_checkpoint_is_whole(bundles: dict[int, Path], tmp_path: Path) -> None:
    train(bundles[3], "batches", 1, checkpoints=tmp_path)
    (tmp_path / "step-00000001" / "position.json").write_text("{")
    with pytest.warns(UserWarning, match="a checkpoint is skipped"):
        heard, _ = train(bundles[3], "batches", 2, checkpoints=tmp_path, resume="auto")
    assert list(heard.losses) == [1, 2]


def test_resume_may_stand_alone(bundles: dict[int, Path], tmp_path: Path) -> None:
    def steps(*options: object) -> list[str]:
        arguments = command(bundles[3], "batches", "--checkpoint", tmp_path, *options)[2:]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return [line.split()[1] for line in done.output.splitlines() if line.startswith("step ")]

    assert steps("--resume", "auto", "--steps", 1, "--best", "loss") == ["1/1"]
    assert steps("--resume", "--steps", 2) == ["2/2"]
    assert steps("--resume", "best", "--steps", 2) == ["2/2"]
    assert steps("--steps", 3, "--resume") == ["3/3"]
    assert steps("--resume=auto", "--steps", 4) == ["4/4"]
