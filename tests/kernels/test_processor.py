"""Instruction sets from the flags of processors, and the warning about profiles of others."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from distir_relax.calibration.machine_check import mismatch, warn_of_mismatch
from distir_relax.cost.profile import load_profile
from distir_relax.kernels.processor import instruction_sets

EPYC = frozenset({"sse", "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16"})
XEON = EPYC | {"avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (XEON, "AMX bf16 int8, AVX-512 bf16 fp16 VNNI"),
        (EPYC, "AVX-512 bf16 VNNI"),
        (frozenset({"avx2", "fma"}), "AVX2 FMA"),
        (frozenset({"asimd", "sve", "svebf16", "asimdhp"}), "SVE bf16"),
        (frozenset({"asimd", "asimdhp"}), "NEON fp16"),
        (frozenset({"sse2"}), ""),
    ],
)
def test_instruction_sets(flags: frozenset[str], expected: str) -> None:
    assert instruction_sets(flags) == expected


def test_a_profile_of_another_processor_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = replace(load_profile("cpu-local"), instructions="AVX-512 bf16 VNNI", processor="an EPYC")
    assert mismatch(profile, EPYC) is None
    assert mismatch(profile, frozenset()) is None, "an unknown machine may be the same"
    assert mismatch(replace(profile, instructions=""), XEON) is None
    assert mismatch(replace(profile, kind="gpu"), XEON) is None
    message = mismatch(profile, XEON)
    assert message is not None
    assert "calibrated on an EPYC with AVX-512 bf16 VNNI, this machine has AMX bf16 int8, AVX-512" in message
    monkeypatch.setattr("distir_relax.calibration.machine_check.processor_flags", lambda: XEON)
    with pytest.warns(UserWarning, match="calibrate here"):
        warn_of_mismatch(profile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_mismatch(replace(profile, instructions=instruction_sets(XEON)))
