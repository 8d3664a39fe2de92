"""200 mutated bundles, loaded under an audit hook; ``make fuzz`` loads more of them, of more kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.bundle_kinds import QUICK
from tests.fuzz_bundles import Fuzz
from tests.generated_code import problem_of

COUNT = 200


@pytest.fixture(scope="module")
def fuzz() -> Fuzz:
    return Fuzz(QUICK)


@pytest.mark.timeout(120)
def test_mutated_bundles_are_loaded_or_refused(fuzz: Fuzz, tmp_path: Path) -> None:
    problems = [problem for seed in range(COUNT) if (problem := fuzz.try_seed(seed, tmp_path))]
    assert not problems, "\n".join(problems[:5])
    # Bundles that were all refused at their first byte would show nothing.
    assert fuzz.counts["loaded"] >= COUNT // 10
    assert fuzz.counts["refused"] >= COUNT // 3


@pytest.mark.parametrize(
    ("act", "event"),
    [
        (lambda: open("/etc/passwd").close(), "open /etc/passwd"),
        (lambda: Path("m.dist/../written").write_text("x"), "open "),
        (lambda: Path("m.dist/ranked.txt").open("a").close(), "open "),
        (lambda: exec("1"), "compile of"),
        (lambda: exec(CODE), "exec of"),
        (lambda: __import__("antigravity"), "import"),
        (lambda: subprocess.run(["true"], check=True), "subprocess.Popen"),
        (lambda: os.system("true"), "os.system"),
    ],
)
def test_the_hook_sees_what_it_forbids(
    fuzz: Fuzz, act: Callable[[], object], event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.dist").mkdir()
    (tmp_path / "m.dist/ranked.txt").touch()
    monkeypatch.chdir(tmp_path)
    # The import, which opens a browser, ends before that.
    monkeypatch.setattr(sys, "path", [])
    with fuzz.audit.watching(tmp_path / "m.dist", ()), suppress(ImportError):
        act()
    assert any(problem.startswith(event) for problem in fuzz.audit.problems), fuzz.audit.problems


CODE = compile("1", "<test>", "exec")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import os", "import os"),
        ("from os import system", "from os import system"),
        ("print(1)", "print(1)"),
        ("STEPS = {f(): 1}", "STEPS is not a literal"),
        ("OTHER = 1", "OTHER = 1"),
        ("def main(comm, x=f()):\n    return x", "def main"),
        ("@f\ndef main(comm):\n    return comm", "def main"),
        ("def main(comm):\n    import os", "import os"),
        ("def main(comm):\n    return eval(comm)", "eval"),
        ("def main(comm):\n    return comm.__class__", "comm.__class__"),
        ("def main(comm):\n    return torch.load(comm)", "torch.load"),
        ("def main(comm):\n    return (lambda: comm)()()", "lambda"),
        ("def main(comm):\n    try:\n        pass\n    except Exception:\n        pass", "try"),
    ],
)
def test_the_grammar_of_generated_modules_allows_no_more(text: str, problem: str) -> None:
    assert problem in problem_of(text)
    assert not problem_of("import torch\nSTEPS = {0: 'x'}\ndef main(comm, x):\n    return (torch.add(x, 1), )")
