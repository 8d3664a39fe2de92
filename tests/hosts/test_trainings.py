"""Trainings on several hosts: the losses of one machine, and an end after which they resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.laboratory import in_namespaces, why_not
from tests.hosts.trainings import EVERY, STEPS, losses_on_one_machine
from tests.training import perceptron

pytestmark = [pytest.mark.mpirun, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainings")
    return perceptron.saved("3/1/1/1", folder, STEPS)


@pytest.fixture(scope="module")
def found(bundle: Path) -> dict[str, Any]:
    if reason := why_not():
        pytest.skip(reason)
    done = in_namespaces("tests.hosts.trainings", str(bundle))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_killed_rank_ends_a_training_by_name(found: dict[str, Any]) -> None:
    end = found["ends"]["killed"]
    assert end["code"] == 75, end
    assert any(line.startswith("error: rank 2 on n1 was killed by SIGKILL") for line in end["text"]), end


def test_a_terminated_training_writes_a_checkpoint(found: dict[str, Any]) -> None:
    end = found["ends"]["terminated"]
    assert end["code"] == 143, end
    (hint,) = [line for line in end["text"] if "terminated after step" in line]
    steps = re.fullmatch(r"\[0\] terminated after step (\d+): resume from step (\d+) with .* --resume", hint)
    assert steps is not None, hint
    assert steps[1] == steps[2]
    assert int(steps[1]) > EVERY
    assert not any("error" in line or "interrupted" in line for line in end["text"]), end
    assert end["ended"] < 8.0


def test_a_training_that_is_terminated_while_ranks_start_ends(found: dict[str, Any]) -> None:
    end = found["ends"]["terminated early"]
    assert end["code"] == 143, end
    assert not any(line.startswith(("error: ", "interrupted")) for line in end["text"]), end
    assert end["ended"] < 8.0


def test_a_resumed_training_on_hosts_has_the_losses_of_one_machine(found: dict[str, Any], bundle: Path) -> None:
    assert found["ends"]["finished"]["code"] == 0, found["ends"]["finished"]
    expected = losses_on_one_machine(bundle, STEPS)
    assert [step for step, _ in found["losses"]] == list(range(1, STEPS + 1))
    assert [tuple(row) for row in found["losses"]] == pytest.approx(expected, rel=1e-6)
    assert found["left"] == {"n0": 0, "n1": 0}


def test_hosts_without_a_common_disk_are_an_error_before_the_first_step(found: dict[str, Any]) -> None:
    end = found["ends"]["no common disk"]
    assert end["code"] == 2, end
    text = "\n".join(end["text"])
    place = r"\[0\] error: /tmp/ck: expected the folder of checkpoints in which the first rank writes, found another"
    assert re.search(place + r" or none \(on rank 2 of 3\)", text), end
    assert "put it on a file system that all hosts share" in text
    assert "step 1" not in text
