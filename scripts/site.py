"""Build the documentation site: pages of docs/ and the root, with references generated from the code.

``python scripts/site.py`` writes the pages to build/pages and the site to build/site (mkdocs, mkdocstrings).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

import distir_relax
from distir_relax.cli import app
from distir_relax.cli.options import flag_of
from distir_relax.compiler.options import CompileOptions, ImportOptions, declared

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
ROOT_PAGES = ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")


def main() -> int:
    """Write the pages, and build the site; returns the exit code of mkdocs."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for page in PAGES.glob("*.md"):
        page.write_text(rewrite(page.read_text(encoding="utf-8"), in_docs=True), encoding="utf-8")
    for name in ROOT_PAGES:
        text = rewrite((ROOT / f"{name}.md").read_text(encoding="utf-8"), in_docs=False)
        (PAGES / f"{name.lower()}.md").write_text(text, encoding="utf-8")
    for name, text in {"api": api_page(), "cli": cli_page(), "options": options_page()}.items():
        (PAGES / f"{name}.md").write_text(text, encoding="utf-8")
    return subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet"], cwd=ROOT, check=False).returncode


def rewrite(text: str, in_docs: bool) -> str:
    """Lead the links of a page to the site's pages; links to files of the repository become plain text."""

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match["label"], match["target"], match["anchor"] or ""
        target = target.removeprefix("../") if in_docs and target.startswith("../") else target
        name = target.removeprefix("docs/")
        if target.removesuffix(".md") in ROOT_PAGES:
            return f"[{label}]({target.lower()}{anchor})"
        if (ROOT / "docs" / name).exists() and "/" not in name.removeprefix("schedules/"):
            return f"[{label}]({name}{anchor})"
        return label if label.startswith("`") else f"`{label}`"

    # Links in code stay as they are.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    pattern = re.compile(r"\[(?P<label>[^\]]+)\]\((?P<target>(?!https?:|#|mailto:)[^)#\s]+)(?P<anchor>#[^)]*)?\)")
    return "".join(part if part.startswith("```") else pattern.sub(link, part) for part in parts)


def api_page() -> str:
    """The public names, each documented from its docstring; those of a module, such as `dr.callbacks`, too."""
    objects = [getattr(distir_relax, name) for name in distir_relax.__all__]
    modules = [value for value in objects if isinstance(value, ModuleType)]
    objects = [value for value in objects if value not in modules]
    objects += [getattr(module, name) for module in modules for name in module.__all__]
    names = [f"::: {value.__module__}.{value.__qualname__}" for value in dict.fromkeys(objects)]
    return "# Python reference\n\n`import distir_relax as dr` has these names.\n\n" + "\n\n".join(names) + "\n"


def options_page() -> str:
    """The compilation options, from their declarations."""
    lines = ["# Compilation options", "", "Keyword arguments of `compile`, `compile_training` and `simulate`.", ""]
    for title, group in (("Compilation", CompileOptions), ("Import", ImportOptions)):
        lines += [f"## {title}", "", "| option | command line | default | meaning |", "|---|---|---|---|"]
        for name, option in declared(group).items():
            flag = f"`{flag_of(name)}`" if option.cli else ""
            lines.append(f"| `{name}` | {flag} | `{option.default!r}` | {option.help} |")
        lines.append("")
    return "\n".join(lines)


def cli_page() -> str:
    """The commands with their arguments and options."""
    group: Any = typer.main.get_command(app)
    lines = ["# Commands", ""]
    for name, command in group.commands.items():
        lines += [f"## distir {name}", "", *(line.strip() for line in (command.help or "").splitlines()), ""]
        lines += ["| option | meaning | default |", "|---|---|---|"]
        for parameter in command.params:
            flags = ", ".join(f"`{flag}`" for flag in [*parameter.opts, *parameter.secondary_opts])
            shown = flags if parameter.opts[0].startswith("-") else f"`{parameter.metavar or parameter.name.upper()}`"
            value = f" {parameter.metavar}" if parameter.opts[0].startswith("-") and parameter.metavar else ""
            default = "required" if parameter.required else _shown(parameter.default)
            lines.append(f"| {shown}{value} | {getattr(parameter, 'help', '') or ''} | {default} |".replace("\n", " "))
        lines.append("")
    return "\n".join(lines)


def _shown(default: Any) -> str:
    return "" if default in (None, False, [], ()) or callable(default) else f"`{getattr(default, 'value', default)}`"


if __name__ == "__main__":
    sys.exit(main())
