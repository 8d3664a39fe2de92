"""What C code prints while HiGHS solves is not heard; what comes before and behind is."""

from __future__ import annotations

import ctypes

import pytest

from distir_relax.autosharding.silence_stdout import silence_stdout


def test_only_what_is_printed_inside_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(None)
    library.printf(b"before, in C\n")
    print("before")
    for _ in range(3):
        with silence_stdout():
            library.printf(b"HighsMipSolverData::something\n")
    library.printf(b"behind, in C\n")
    library.fflush(None)
    print("behind")
    assert capfd.readouterr().out == "before, in C\nbefore\nbehind, in C\nbehind\n"


def test_what_goes_wrong_inside_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no solution"), silence_stdout():
        raise ValueError("no solution")
    print("behind")
    assert capfd.readouterr().out == "behind\n"
