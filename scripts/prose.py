"""Check prose for words and phrases that the project does not use: ``python scripts/prose.py [PATH ...]``.

Looks at docstrings, comments, help texts and error messages of Python files, and at Markdown. Exits 1 if it finds any.
Words of code in backticks are exempt. CONTRIBUTING.md says why: one term for each concept, and no private terms.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEFAULT = ("distir_relax", "docs", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")

PHRASES = {
    r"\b(dear|dearer|dearest)\b": "cost, slowest, most expensive",
    r"\b(?:let|lets|letting) go of\b": "freed, released",
    r"\b(?:is|are|was|were) (?:looked|asked) (?:for|of|at)\b": "searched, requested, inspected",
    r"\b(?:is|are|was|were|be) told\b": "printed, reported, passed",
    r"\btold apart\b": "distinguished",
    r"\bbefall(?:en|s)?\b": "happen",
    r"\bmend(?:ed|s|ing)?\b": "fix",
    r"\bwithout end\b|\bso many of them\b": "rephrase",
    r"\b(?:of|for) which (?:nothing|no one|nobody)\b": "rephrase",
    r"\b(?:lies|lie|lay) (?:on|so|otherwise|with|in parts|apart|alike|along)\b": "is placed, is sharded",
}
_PATTERNS = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in PHRASES.items()]
_PROSE = re.compile(r"^\s*(#|\"\"\"|[A-Z`].*[a-z]{3}.* |[a-z].* [a-z]+ .*[.:]$)|help=|hint=|Error\(|# ")


def main(arguments: list[str]) -> int:
    """Print each place with the words to use instead; returns 1 if there is any."""
    places = [place for path in files(arguments or list(DEFAULT)) for place in check(path)]
    print("\n".join(places), end="\n" if places else "")
    return int(bool(places))


def files(paths: list[str]) -> Iterator[Path]:
    """The Python and Markdown files below paths; the changelog keeps its history."""
    for name in paths:
        path = ROOT / name
        found = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        yield from (file for file in found if file.name != "CHANGELOG.md")


def check(path: Path) -> Iterator[str]:
    """The places of a file with words to avoid."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if path.suffix == ".py" and not _PROSE.search(line):
            continue
        text = re.sub(r"`[^`]*`", "``", line)
        for pattern, advice in _PATTERNS:
            if match := pattern.search(text):
                shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
                yield f"{shown}:{number}: {match[0]!r}: write {advice}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
