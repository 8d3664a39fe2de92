"""Callbacks of training runs: the protocol, logs, early stopping, the best checkpoint, and the dashboard."""

from __future__ import annotations

import csv
import io
import json
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.checkpoints import best, saved_steps
from distir_relax.cli.training_data import UserCallbacks
from distir_relax.errors import CheckpointError, DistIRError, ImportModelError, RunError
from distir_relax.runtime.training.callbacks import Ended, RunInfo, StepResult, logger
from distir_relax.runtime.training.callbacks.loss_chart import History, line_chart
from distir_relax.runtime.training.options import Metric, TrainOptions
from tests.runtime.processes import mpirun
from tests.training import data, observers, perceptron

pytestmark = pytest.mark.timeout(120)
DATA, OBSERVERS = Path(data.__file__), Path(observers.__file__)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training of a small model on 2 ranks."""
    step = perceptron.step("2/1/1/1", evaluates=True)
    return step.save(tmp_path_factory.mktemp("bundles") / "m.dist", backends=("torch",))


def values(*numbers: float, name: str = "loss") -> Any:
    """Evaluations with these values of a metric, one after the other."""
    rest = iter(numbers)
    return lambda step: {name: next(rest)}


def run(bundle: Path, steps: int, *callbacks: dr.Callback, **options: Any) -> Ended:
    return dr.train(bundle, data.batches, steps=steps, callbacks=callbacks, **options)


def test_callbacks_are_called_in_order(bundle: Path, tmp_path: Path) -> None:
    calls = observers.Calls()
    ended = run(
        bundle, 5, calls, checkpoint=tmp_path, every=3, evaluate=values(0.5, 0.25, 0.75), evaluate_every=2
    )  # fmt: skip
    assert calls.calls == [
        "begun 0", "done 1", "done 2", "evaluated 2 {'loss': 0.5}", "done 3", "saved step-00000003 3", "done 4",
        "evaluated 4 {'loss': 0.25}", "done 5", "evaluated 5 {'loss': 0.75}", "saved step-00000005 5", "ended 5",
        "close",
    ]  # fmt: skip
    assert (ended.step, ended.saved, ended.best) == (5, 5, None)
    training = read_bundle(bundle).manifest.training
    assert training is not None
    for result in calls.results:
        assert result.rates == {"learning_rate": training.rates["learning_rate"](result.step - 1)}
        assert 0 < result.communication_seconds < result.seconds
        # This process has torch loaded.
        assert 2**26 < result.peak_memory < 2**40


def test_a_callback_ends_the_run_and_is_closed_after_errors(bundle: Path, tmp_path: Path) -> None:
    calls = observers.Calls()
    ended = run(bundle, 9, observers.Stop(), calls, checkpoint=tmp_path)
    assert (ended.step, ended.reason, ended.saved) == (4, "step 4 is enough", 4)
    assert calls.calls[-2:] == ["ended 4 step 4 is enough", "close"]
    calls = observers.Calls()
    with pytest.raises(LookupError, match="no such column"):
        run(bundle, 9, calls, observers.Failing())
    assert calls.calls[-2:] == ["done 3", "close"]
    with pytest.raises(RunError, match=r"expected a dr.Callback, found type"):
        run(bundle, 9, observers.Calls)  # type: ignore[arg-type]


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_ranks_agree_on_the_end_and_on_errors_of_callbacks(bundle: Path, tmp_path: Path) -> None:
    command = ("-m", "distir_relax", "train", bundle, "--data", f"{DATA}:loader", "--steps", 9)
    log, rows = tmp_path / "log.csv", tmp_path / "log.jsonl"
    done = mpirun(
        2, *command, "--callbacks", f"{OBSERVERS}:stopping", "--checkpoint", tmp_path / "ck", "--log", log,
        "--log", rows, "--evaluation", f"{DATA}:held_out", "--evaluate-every", 2, "--best", "error", "--keep", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trained to step 4 of 9 (step 4 is enough)" in done.stdout
    # A loader shuffles in the same order on all ranks, and threads of one process have the same results.
    calls = observers.Calls()
    options: dict[str, Any] = {"evaluation": data.held_out, "evaluate_every": 2}
    dr.train(bundle, data.loader(), steps=4, callbacks=[calls], **options)
    found = list(csv.DictReader(log.open()))
    assert [row["step"] for row in found] == ["1", "2", "2", "3", "4", "4"]
    losses = [float(row["loss"]) for row in found if row["loss"]]
    assert losses == pytest.approx([result.loss for result in calls.results], rel=1e-5)
    assert losses == [item["loss"] for item in map(json.loads, rows.open()) if "loss" in item]
    errors = {int(row["step"]): float(row["evaluation/error"]) for row in found if row["evaluation/error"]}
    assert errors == pytest.approx({step: metrics["error"] for step, metrics in calls.metrics.items()}, rel=1e-5)
    chosen = best(tmp_path / "ck")
    assert chosen is not None
    assert errors[chosen.position.step] == chosen.position.metrics["error"] == min(errors.values())
    assert saved_steps(tmp_path / "ck") == sorted({chosen.position.step, 4})
    done = mpirun(2, *command, "--callbacks", f"{OBSERVERS}:failing", "--checkpoint", tmp_path / "failed")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert saved_steps(tmp_path / "failed") == [3]
    assert "raised LookupError when it was called (Failing.done): there is no such column" in done.stderr
    assert f"{OBSERVERS}:" in done.stderr
    assert "Traceback" not in done.stderr


def test_functions_without_callbacks_are_refused(bundle: Path) -> None:
    with pytest.raises(ImportModelError, match="the function 'stoping' does not exist"):
        UserCallbacks(f"{OBSERVERS}:stoping")
    with pytest.raises(ImportModelError, match=r"expected a dr.Callback or a list of them, found NoneType"):
        run(bundle, 2, UserCallbacks(f"{OBSERVERS}:nothing"))


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_a_resumed_run_continues_its_log(name: str, bundle: Path, tmp_path: Path) -> None:
    path, folder = tmp_path / name, tmp_path / "ck"
    whole = observers.Calls()
    run(bundle, 7, whole, logger(path), checkpoint=folder, every=5)
    (folder / "latest").write_text("step-00000005\n")
    run(bundle, 9, logger(path), checkpoint=folder, resume="last", evaluate=values(0.5, name="accuracy"))
    text = path.read_text()
    rows: list[dict[str, Any]] = (
        [{k: v for k, v in row.items() if v} for row in csv.DictReader(text.splitlines())]
        if name.endswith(".csv")
        else [json.loads(line) for line in text.splitlines()]
    )
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert {key: float(value) for key, value in rows[-1].items()} == {"step": 9, "evaluation/accuracy": 0.5}
    for row, result in zip(rows[:5], whole.results, strict=False):
        assert float(row["loss"]) == result.loss
        assert float(row["seconds"]) == result.seconds
        assert float(row["samples"]) == result.work == 11
        assert float(row["learning_rate"]) == result.rates["learning_rate"]
        assert float(row["communication_seconds"]) == result.communication_seconds
        assert float(row["peak_memory"]) == result.peak_memory
    path.write_text("no log\nof ours\n")
    with pytest.raises(RunError, match="expected the log of the run that is resumed"):
        run(bundle, 11, logger(path), checkpoint=folder, resume="last")


def test_tensorboard_reads_the_log(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    calls = observers.Calls()
    run(bundle, 3, calls, logger(tmp_path / "tb"), evaluate=values(0.5))
    found = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3]
    assert [event.value for event in found.Scalars("train/loss")] == pytest.approx([r.loss for r in calls.results])
    assert [(event.step, event.value) for event in found.Scalars("evaluation/loss")] == [(3, 0.5)]


class Client:
    """A client of MLflow that keeps its calls."""

    calls: list[tuple[Any, ...]]

    def __init__(self, uri: str | None) -> None:
        self.calls.append(("uri", uri))

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        self.calls.append(("experiment", name))
        return "17"

    def create_run(self, experiment: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run of {experiment}"))

    def log_param(self, run: str, key: str, value: object) -> None:
        self.calls.append((run, key, value))

    def log_batch(self, run: str, metrics: Sequence[tuple[Any, ...]]) -> None:
        self.calls.extend((run, name, value, step) for name, value, _, step in metrics)

    def set_terminated(self, run: str, status: str) -> None:
        self.calls.append((run, status))


def test_mlflow_gets_parameters_metrics_and_the_status(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, object]] = {
        "mlflow": {},
        "mlflow.exceptions": {"MlflowException": KeyError},
        "mlflow.tracking": {"MlflowClient": Client},
        "mlflow.entities": {"Metric": lambda *values: values},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    Client.calls = []
    calls = observers.Calls()
    run(bundle, 2, calls, logger("mlflow:http://host:5000"), evaluate=values(0.5))
    found = Client.calls
    assert found[:2] == [("uri", "http://host:5000"), ("experiment", "perceptron")]
    for entry in (
        ("ranks", 2),
        ("samples_per_step", 11),
        ("loss", calls.results[1].loss, 2),
        ("evaluation/loss", 0.5, 2),
    ):
        assert ("run of 17", *entry) in found
    assert found[-1] == ("run of 17", "FINISHED")
    with pytest.raises(LookupError):
        run(bundle, 9, logger("mlflow:"), observers.Failing())
    assert found[-1] == ("run of 17", "FAILED")


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a file of Weights & Biases: parts of them in blocks of 32 KiB, as LevelDB's log has them."""
    assert content.startswith(b":W&B")
    place, record = 7, b""
    while place + 7 <= len(content):
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            yield record
            record = b""
        if place % 32768 > 32761:
            place += 32768 - place % 32768


def test_weights_and_biases_reads_the_log(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in files alone."""
    from wandb.proto.wandb_internal_pb2 import Record

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    calls = observers.Calls()
    run(bundle, 3, calls, logger("wandb:harbour"), evaluate=values(0.5))
    with pytest.raises(LookupError):
        run(bundle, 9, logger("wandb:"), observers.Failing())
    records: dict[str, list[Any]] = {}
    # Another process writes the files.
    for _ in range(200):
        records.clear()
        for file in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb")):
            for content in records_of(file.read_bytes()):
                record = Record()
                record.ParseFromString(content)
                records.setdefault(record.WhichOneof("record_type"), []).append(record)
        if len(records.get("exit", ())) == len(records.get("run", ())) == 2:
            break
        time.sleep(0.1)
    projects = sorted(record.run.project for record in records["run"])
    assert projects == ["harbour", "perceptron"]
    config = next({i.key: json.loads(i.value_json) for i in r.run.config.update} for r in records["run"])
    assert config["ranks"] == 2
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records["history"]
    ]
    found = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert found[:3] == [(r.step, pytest.approx(r.loss)) for r in calls.results]
    assert [(row["step"], row["evaluation/loss"]) for row in rows if "evaluation/loss" in row] == [(3, 0.5)]
    assert sorted(record.exit.exit_code for record in records["exit"]) == [0, 1]


def test_python_s_logging_gets_lines_and_measurements(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "my.app")
    calls = observers.Calls()
    run(bundle, 2, calls, logger("logging:my.app"), evaluate=values(0.5))
    records = [record for record in caplog.records if record.name == "my.app"]
    assert (
        records[0].getMessage().startswith("training of perceptron: ranks 2, steps 2, first_step 1, samples_per_step")
    )
    assert records[2].getMessage().startswith(f"step 2: loss {calls.results[1].loss:.6g}, ")
    assert records[2].measurements["loss"] == calls.results[1].loss  # type: ignore[attr-defined]
    assert [r.getMessage() for r in records[3:]] == ["step 2: evaluation/loss 0.5", "training finished"]
    caplog.clear()
    with pytest.raises(LookupError):
        run(bundle, 9, logger("logging:my.app"), observers.Failing())
    assert (caplog.records[-1].levelname, caplog.records[-1].getMessage()) == ("WARNING", "training failed")


class Own(dr.callbacks.Tracker):
    """A tracker of a service that the package does not know."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, name: str, parameters: Mapping[str, float | str]) -> None:
        self.calls.append((name, parameters["steps"]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls.append((step, next(iter(values))))

    def end(self, status: str) -> None:
        self.calls.append(status)


def test_three_methods_are_a_tracker(bundle: Path) -> None:
    own = Own()
    run(bundle, 2, own, evaluate=values(0.5))
    assert own.calls == [("perceptron", 2), (1, "loss"), (2, "loss"), (2, "evaluation/loss"), "finished"]


def test_logs_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"a folder, mlflow:URI, wandb:PROJECT or logging:NAME, found .txt"):
        logger("log.txt")
    for target in ("neptune:project", "comet:", "https://host/run"):
        with pytest.raises(RunError, match=f"or logging:NAME, found {target.partition(':')[0]}:"):
            logger(target)
    with pytest.raises(RunError, match="there is no such folder"):
        logger(tmp_path / "none" / "log.csv")
    for module, target in (("tensorboard", tmp_path), ("mlflow", "mlflow:"), ("wandb", "wandb:")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(RunError, match="found none") as caught:
            logger(target)
        assert "pip install" in caught.value.hint


def test_full_disk_of_a_log_leaves_a_checkpoint(bundle: Path, tmp_path: Path) -> None:
    """The log is on another disk than the checkpoints."""
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    log, calls = logger(tmp_path / "run.jsonl"), observers.Calls()
    with pytest.raises(RunError, match=r"run\.jsonl: cannot read or write the log: .* No space left on device"):
        run(bundle, 9, log, calls, checkpoint=tmp_path / "ck")
    assert saved_steps(tmp_path / "ck") == [1]
    assert calls.calls[-1] == "close"
    ended = run(bundle, 3, checkpoint=tmp_path / "ck", resume="last")
    assert (ended.step, ended.saved) == (3, 3)


def test_error_of_an_evaluation_leaves_a_checkpoint(bundle: Path, tmp_path: Path) -> None:
    class Refusing(dr.Callback):
        def evaluated(self, step: int, metrics: Any) -> None:
            raise RunError("no")

    options: dict[str, Any] = {"checkpoint": tmp_path / "ck", "evaluate": values(0.5, 0.5), "evaluate_every": 4}
    with pytest.raises(RunError, match="no"):
        run(bundle, 9, Refusing(), **options)
    assert saved_steps(tmp_path / "ck") == [4]


@pytest.mark.parametrize(
    ("numbers", "options", "step"),
    [
        ([3, 2, 1, 1.5, 1.2, 0.5], {"patience": 2}, 5),
        ([3, 2, 1, 1.5, 0.9, 1.2], {"patience": 2}, None),
        ([3, 2, 1.9, 1.85, 1.8, 1.7], {"patience": 3, "min_delta": 0.25}, 5),
        ([1, 2, 1.5, float("nan")], {"patience": 2, "mode": "max"}, 4),
    ],
)
def test_early_stopping_counts_evaluations(
    numbers: list[float], options: dict[str, Any], step: int | None, bundle: Path
) -> None:
    stopping = dr.callbacks.EarlyStopping("accuracy", **options)
    ended = run(
        bundle, len(numbers), stopping, evaluate=values(*numbers, name="accuracy"), evaluate_every=1
    )  # fmt: skip
    assert ended.step == (step or len(numbers))
    assert ("accuracy has not improved" in ended.reason) == (step is not None)


def test_metrics_that_do_not_exist_are_refused(bundle: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"callbacks": [dr.callbacks.EarlyStopping("f1")]}, "expected the metric loss in a run without evaluations"),
        ({"best": "f1", "checkpoint": tmp_path}, "expected the metric loss in a run without evaluations, found 'f1'"),
        ({"best": "f1", "checkpoint": tmp_path, "evaluate": values(1.0)}, "expected the metric 'f1' .*, found loss"),
        ({"best": "loss"}, "expected a checkpoint folder for the best one"),
        ({"best": "loss:least", "checkpoint": tmp_path}, "expected the mode min or max of a metric, found 'least'"),
        (
            {"resume": "newest", "checkpoint": tmp_path},
            "expected last, auto, best, the path of a checkpoint, or nothing, found 'newest'",
        ),
        ({"every": 0}, "expected 1 or more, or epoch, found 0"),
    ):
        with pytest.raises(RunError, match=words):
            dr.train(bundle, data.batches, steps=2, **options)  # type: ignore[arg-type]
    with pytest.raises(DistIRError, match="patience of 1 or more"):
        dr.callbacks.EarlyStopping(patience=0)
    assert not Metric("loss").improves(1.0, 1.0)


@pytest.mark.parametrize("options", [{"best": "acc:max"}, {"callbacks": [dr.callbacks.EarlyStopping("acc")]}])
def test_unknown_metric_is_refused_before_the_first_step(options: dict[str, Any], bundle: Path, tmp_path: Path) -> None:
    calls = observers.Calls()
    options = {**options, "callbacks": [*options.get("callbacks", ()), calls]}
    with pytest.raises(RunError, match="expected the metric 'acc' of an evaluation, found loss"):
        dr.train(bundle, data.batches, steps=2, evaluation=data.samples, checkpoint=tmp_path, **options)
    assert not [call for call in calls.calls if call.startswith("done")]


def test_the_best_checkpoint_is_kept_and_resumed(bundle: Path, tmp_path: Path) -> None:
    def states(name: str) -> bytes:
        return (tmp_path / name / "state.safetensors").read_bytes()

    options: dict[str, Any] = {
        "checkpoint": tmp_path,
        "every": 3,
        "keep": 1,
        "best": "accuracy:max",
        "evaluate_every": 2,
    }
    accuracies = values(0.25, 0.75, 0.5, 0.625, 0.75, name="accuracy")
    ended = run(bundle, 9, evaluate=accuracies, **options)
    assert (ended.saved, ended.best) == (9, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest", "step-00000004", "step-00000009"]
    assert (tmp_path / "best").read_text() == "step-00000004\n"
    last = states("step-00000009")
    calls = observers.Calls()
    ended = run(bundle, 9, calls, resume="best", evaluate=values(0.5, 0.5, 0.625, name="accuracy"), **options)
    # It continues after step 4; what follows is written again, and its best is still that of the first run.
    assert calls.calls[:2] == ["begun 4", "done 5"]
    assert ended.best == 4
    assert saved_steps(tmp_path) == [4, 9]
    assert states("step-00000009") == last
    (tmp_path / "best").unlink()
    with pytest.raises(CheckpointError, match="there is no best checkpoint in this folder"):
        run(bundle, 9, resume="best", checkpoint=tmp_path)


def test_without_evaluations_the_metric_is_the_mean_training_loss(bundle: Path, tmp_path: Path) -> None:
    calls = observers.Calls()
    ended = run(bundle, 6, calls, checkpoint=tmp_path, every=2, best="loss")
    losses = [result.loss for result in calls.results]
    means = {step: sum(losses[step - 2 : step]) / 2 for step in (2, 4, 6)}
    assert ended.best == min(means, key=means.__getitem__)
    chosen = best(tmp_path)
    assert chosen is not None
    assert chosen.position.metrics == {"loss": pytest.approx(min(means.values()))}


def test_later_checkpoints_go_when_a_run_goes_back(bundle: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path, "every": 2, "best": "loss", "evaluate_every": 2}
    run(bundle, 8, evaluate=values(0.5, 1, 1, 1), **options)
    assert saved_steps(tmp_path) == [2, 4, 6, 8]
    run(bundle, 3, resume="best", evaluate=values(1), **options)
    assert saved_steps(tmp_path) == [2, 3]


def test_a_chart_joins_its_points() -> None:
    # Four columns of four dots: the lowest, the two lowest, the two in the middle, the two highest.
    assert line_chart([0, 1, 2, 3], 2, 1) == ["⣠⠞"]
    assert line_chart([4.0], 2, 1) == ["⠂ "]
    history = History(8)
    for number in range(17):
        history.add(float(number))
    history.add(float("nan"))
    assert history.means(99) == pytest.approx([1.5, 5.5, 9.5, 13.5, 16.0])
    assert history.means(2) == pytest.approx([3.5, 13.0])


def test_the_dashboard_shows_a_run(bundle: Path) -> None:
    manifest = read_bundle(bundle).manifest
    console = Console(width=90, record=True, force_terminal=True, file=io.StringIO())
    progress = dr.callbacks.Progress(console)
    progress.begun(RunInfo(0, TrainOptions(500), manifest, 11, "samples"))
    for step in range(1, 201):
        progress.done(StepResult(step, 8.0 - step / 100, 0.05, 11, {"learning_rate": 3e-4}, 0.01, 2**30))
    progress.evaluated(200, {"loss": 5.5})
    progress.saved(Path("ck/step-00000200"), 200)
    assert progress._dashboard is not None
    progress.close()
    console.print(progress._dashboard.render(90))
    text = console.export_text()
    for words in (
        "perceptron, 2 ranks", "step 200/500", "0:00:15 left", "7.99", "220 samples/s", "communication 20%",
        "peak memory   1.07 GB", "learning rate 0.0003", "evaluation    loss 5.5 (step 200)", "ck/step-00000200",
    ):  # fmt: skip
        assert words in text, text
    assert "gradient norm" not in text
    progress.begun(RunInfo(0, TrainOptions(500), manifest, 11, "samples"))
    progress.done(StepResult(1, 8.0, 0.05, 11, {"learning_rate": 3e-4}, gradient_norm=0.84172))
    progress.close()
    console.print(progress._dashboard.render(90))
    assert "gradient norm 0.8417" in console.export_text()
