"""2,000 mutated files: whatever is read gives a value, or an error with a place. ``make fuzz`` reads more of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from distir_relax.errors import DistIRError
from tests.mutations import mutated
from tests.readers import TARGETS, Target

EACH = 2_000 // len(TARGETS)
NAMES = [target.name for target in TARGETS]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_mutated_files_are_read_or_refused(target: Target, tmp_path: Path) -> None:
    problems = [problem for seed in range(EACH) if (problem := target.try_file(seed, tmp_path))]
    assert not problems, "\n".join(problems[:5])


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_valid_files_are_read_and_mutations_are_of_both_kinds(target: Target, tmp_path: Path) -> None:
    """A target whose files were all refused at their first byte would find nothing."""
    contents = target.valid()
    for number, content in enumerate(contents):
        file = tmp_path / f"valid{number}.{target.name}"
        file.write_bytes(content)
        target.read(file)
    read = messages = 0
    for seed in range(100):
        file = tmp_path / f"mutated{seed}.{target.name}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file.write_bytes(mutated(contents, target.mutations, seed))
            try:
                target.read(file)
                read += 1
            except DistIRError as error:
                messages += bool(error.message)
    assert read >= 2
    assert messages >= 20
    assert read + messages == 100
