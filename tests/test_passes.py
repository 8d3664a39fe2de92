"""One golden per pass, as text: the command line, the program before, and the program after, in one file.

A file of ``tests/passes/`` begins with ``# RUN: distir opt --passes '...'``, then has the program, a line ``# RESULT``
and the command's output, or ``# ERROR`` and the message. ``UPDATE_GOLDEN=1 pytest tests/test_passes.py`` writes them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distir_relax.cli.app import app
from distir_relax.compiler.pass_text import PASSES, parse_passes, pass_options, print_passes
from distir_relax.errors import DistIRError
from distir_relax.ir import pass_name

GOLDENS = sorted(Path(__file__).with_name("passes").glob("*.txt"))


def read(path: Path) -> tuple[str, str, str, str]:
    """Return the passes, the program, the expected kind (RESULT or ERROR), and the expected text."""
    text = path.read_text(encoding="utf-8")
    matched = re.fullmatch(r"# RUN: distir opt --passes '(.*?)'\n(.*?)# (RESULT|ERROR)\n(.*)", text, re.DOTALL)
    assert matched, f"{path.name} has no command line, or no result"
    return matched[1], matched[2], matched[3], matched[4]


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_a_pass_gives_what_its_file_says(path: Path, tmp_path: Path) -> None:
    passes, program, kind, expected = read(path)
    (tmp_path / "program.txt").write_text(program, encoding="utf-8")
    result = CliRunner().invoke(app, ["opt", str(tmp_path / "program.txt"), "--passes", passes, "--verify"])
    if isinstance(result.exception, DistIRError):
        found, text = "ERROR", str(result.exception).replace(f"{tmp_path}/", "") + "\n"
    else:
        assert result.exit_code == 0, result.exception
        found, text = "RESULT", result.stdout
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(f"# RUN: distir opt --passes '{passes}'\n{program}# {found}\n{text}", encoding="utf-8")
    assert (found, text) == (kind, expected)


def test_every_pass_has_a_golden() -> None:
    last = {pass_name(parse_passes(read(path)[0])[-1]) for path in GOLDENS}
    assert set(PASSES) - last == set()


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_passes_print_as_they_are_written(path: Path) -> None:
    passes = parse_passes(read(path)[0])
    assert parse_passes(print_passes(passes)) == passes


@pytest.mark.parametrize(("text", "message"), [
    ("propagat", "there is no pass 'propagat'\n  hint: did you mean propagate?"),
    ("nonsense", "there is no pass 'nonsense'\n  hint: distir opt --list shows all"),
    ("propagate{mash=2}", "the pass propagate has no option 'mash'\n  hint: it has the options mesh"),
    ("project{x=1}", "the pass project has no option 'x'\n  hint: it has no options"),
    ("microbatches", r"the pass microbatches needs count\n  hint: microbatches{count=...}"),
    ("microbatches{count=two}", "expected a value of type int, found 'two'"),
    ("to-distir{in_time=yes}", "expected a value of type bool, found 'yes'"),
    ("propagate{mesh=2", "expected matching brackets and quotes"),
    ("propagate{mesh}", "expected OPTION=VALUE, found 'mesh'"),
    ("optimize{optimizer=sophia}", "expected sgd, adam, adamw, "),
    ("apply-strategy{strategy=2}", "2"),
])  # fmt: skip
def test_malformed_passes_are_errors(text: str, message: str) -> None:
    with pytest.raises(DistIRError) as caught:
        parse_passes(text)
    assert message.replace(r"\n", "\n") in str(caught.value)


def test_the_list_documents_every_pass_and_option() -> None:
    result = CliRunner().invoke(app, ["opt", "--list"])
    for name, kind in PASSES.items():
        assert f"{name}: {' or '.join(kind.takes)} -> " in result.stdout
        for option in pass_options(kind):
            assert f"    {option.name}: {option.type} (" in result.stdout


def test_the_program_is_printed_after_each_pass(tmp_path: Path) -> None:
    passes, program, _, expected = read(next(path for path in GOLDENS if path.stem == "project"))
    (tmp_path / "program.txt").write_text(program, encoding="utf-8")
    result = CliRunner().invoke(app, ["opt", str(tmp_path / "program.txt"), "--passes", passes, "--print-after-all"])
    headers = [f"# after {print_passes([step])}\n" for step in parse_passes(passes)]
    assert [line for line in result.stdout.splitlines(True) if line.startswith("# after")] == headers
    assert result.stdout.endswith(expected)
