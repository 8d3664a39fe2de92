"""Other processes that compute during a measurement are noticed; this one and its children are not other ones."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest

from distir_relax.calibration import other_work
from distir_relax.calibration.other_work import busy_seconds, own_seconds, warn_of_other_work


class Counter:
    """A number of seconds that grows by `step` from one call to the next."""

    def __init__(self, step: float) -> None:
        self.step, self.value = step, 100.0

    def __call__(self) -> float:
        self.value += self.step
        return self.value


@pytest.fixture
def ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_work, "time", SimpleNamespace(monotonic=Counter(10.0)))


@pytest.mark.usefixtures("ten_seconds")
@pytest.mark.parametrize(("busy", "own", "share"), [(20.0, 17.0, "15%"), (12.0, 9.0, "15%"), (9.0, 0.0, "45%")])
def test_other_work_is_reported(busy: float, own: float, share: str) -> None:
    found = pytest.warns(UserWarning, match=f"other processes used {share} of 2 processors")
    with found, warn_of_other_work(2, Counter(busy), Counter(own)):
        pass


@pytest.mark.usefixtures("ten_seconds")
@pytest.mark.parametrize(("busy", "own"), [(20.0, 19.5), (0.0, 0.0), (0.0, 30.0)])
def test_own_work_is_not_reported(busy: float, own: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with warn_of_other_work(2, Counter(busy), Counter(own)):
            pass


def test_seconds_of_a_child_are_own_seconds() -> None:
    """A child that computes for half a second is in both figures; Linux counts in hundredths."""
    busy, own = busy_seconds(), own_seconds()
    code = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    time.sleep(0.05)
    grown = own_seconds() - own
    assert 0.5 <= grown < 5
    assert busy_seconds() - busy >= grown - 0.1
