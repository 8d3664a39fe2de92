"""Choices by time: kept with what they were measured on, and made again after other work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distir_relax.kernels import measured, packing, products
from distir_relax.kernels.measured import Choice, choose, compare, forget_choices, kept_choices, measured_once


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distir-relax" / "kernels"


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_busy_seconds", lambda: 0.0)


def counted(numbers: Iterator[int]) -> Choice:
    return Choice("", next(numbers), {"a": 1e-3})


@pytest.mark.usefixtures("idle")
def test_a_choice_is_measured_once(folder: Path) -> None:
    numbers = iter(range(9))
    assert measured_once("rows", lambda: counted(numbers)) == 0
    assert measured_once("rows", lambda: counted(numbers)) == 0
    assert measured_once("columns", lambda: counted(numbers)) == 1
    assert measured_once("rows", lambda: counted(numbers), "other code") == 2
    (found, *_) = kept_choices()
    assert (found.name, found.chosen, found.seconds, found.other_work) == ("columns", 1, {"a": 1e-3}, 0.0)
    assert abs(found.time - time.time()) < 60
    forget_choices()
    assert not list(kept_choices())
    assert measured_once("rows", lambda: counted(numbers)) == 3
    # Damaged files, and folders of others, are no choices.
    for file in folder.glob("choice-*"):
        file.write_text("{")
    assert measured_once("rows", lambda: counted(numbers)) == 4
    folder.chmod(0o777)
    assert measured_once("rows", lambda: counted(numbers)) == 5


def test_it_is_measured_again_while_other_work_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy = iter(range(0, 900, 10)), iter([0, 90, 90, 110, 110, 110.5, 200, 290, 300, 390, 400, 490])
    monkeypatch.setattr(measured.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(measured.os, "cpu_count", lambda: 10)
    monkeypatch.setattr(measured, "_busy_seconds", lambda: next(busy))
    numbers = iter(range(9))
    found = measured._measured("rows", lambda: counted(numbers))
    assert (found.chosen, found.other_work) == (2, 0.005), "the first that was hardly disturbed"
    found = measured._measured("rows", lambda: counted(numbers))
    assert (found.chosen, found.other_work) == (3, 0.9), "the least disturbed of three"
    assert next(numbers) == 6


@pytest.mark.usefixtures("idle")
def test_a_choice_beside_other_work_is_made_again_later(folder: Path) -> None:
    numbers = iter(range(9))
    assert measured_once("rows", lambda: counted(numbers)) == 0
    (file,) = folder.glob("choice-*")
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"other_work": 0.7}))
    assert [choice.is_beside_other_work for choice in kept_choices()] == [True]
    assert measured_once("rows", lambda: counted(numbers)) == 0
    file.write_text(json.dumps(kept | {"other_work": 0.7, "time": time.time() - 1000}))
    assert measured_once("rows", lambda: counted(numbers)) == 1


def test_forms_take_turns_and_the_least_time_counts() -> None:
    calls, waits = [], {"a": iter([0.02, *[0.004] * 99]), "b": iter([0.0, *[0.008] * 99])}

    def run(name: str) -> None:
        calls.append(name)
        time.sleep(next(waits[name]))

    seconds = compare({name: lambda name=name: run(name) for name in waits})  # type: ignore[misc]
    assert calls[:6] == ["a", "b"] * 3
    assert seconds["b"] < 0.004 <= seconds["a"] < 0.02


def test_the_first_form_is_chosen_unless_another_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"a": 1.04, "b": 1.0}
    monkeypatch.setattr(measured, "compare", lambda forms: seconds)
    assert choose("", {}).chosen == "a"
    seconds["a"] = 1.06
    assert choose("", {}).chosen == "b"


def test_other_work_is_seen() -> None:
    import subprocess
    import sys

    before = measured._busy_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"], check=True)
    assert measured._busy_seconds() - before > 0.3
    before, end = measured._busy_seconds(), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert time.process_time() > 0.3


@pytest.mark.usefixtures("idle")
def test_all_choices_can_be_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (packing._most_rows, packing._is_row_faster_packed, products._is_onednn_faster):
        function.cache_clear()
    products._is_native_faster.cache_clear()
    monkeypatch.setattr(measured, "compare", lambda forms: dict.fromkeys(forms, 1.0))
    packing.measure_choices()
    products.measure_choices()
    threads = torch.get_num_threads()
    names = {choice.name.removesuffix(f"-{threads}-threads") for choice in kept_choices()}
    assert {"product-of-one-row-float32", "product-with-a-changing-weight", "gradient-of-a-weight"} <= names
    for function in (packing._most_rows, packing._is_row_faster_packed, products._is_onednn_faster):
        function.cache_clear()
    products._is_native_faster.cache_clear()
