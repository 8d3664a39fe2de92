"""The documentation site: its pages, their links, and the references generated from the code."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from distir_relax.cli import app
from scripts import prose, site

ROOT = Path(__file__).parent.parent


def test_each_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {name.lower() for name in site.ROOT_PAGES}
    assert named == pages | {"api", "cli", "options"}


def test_links_lead_to_pages_of_the_site() -> None:
    pages = {f"{path.stem}.md" for path in (ROOT / "docs").glob("*.md")} | {f"{n.lower()}.md" for n in site.ROOT_PAGES}
    text = site.rewrite("[a](../README.md#x) [b](placements.md) [c](../benchmarks/gpt2.py)\n```\n[d](e.md)\n```", True)
    assert text == "[a](readme.md#x) [b](placements.md) `c`\n```\n[d](e.md)\n```"
    for name in site.ROOT_PAGES:
        text = site.rewrite((ROOT / f"{name}.md").read_text(encoding="utf-8"), False)
        assert set(re.findall(r"\]\(([\w-]+\.md)", text)) <= pages


def test_the_command_reference_has_every_command_and_option() -> None:
    text = site.cli_page()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert f"## distir {name}" in text
        for parameter in command.params:
            assert parameter.opts[0] in text or not parameter.opts[0].startswith("-")


def test_prose_names_the_place_and_the_words_to_use(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Find the dearest op, in `dear` order."""\nx = 1  # it is told\ndear = 2\n', encoding="utf-8")
    assert list(prose.check(file)) == [
        f"{file}:1: 'dearest': write cost, slowest, most expensive",
        f"{file}:2: 'is told': write printed, reported, passed",
    ]
