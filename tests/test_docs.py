"""The documents: links lead somewhere, paths and programs in them are real, code in them works."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import distir_relax
from distir_relax.bundle import FORMAT, Manifest, local_shape
from distir_relax.cli import app
from distir_relax.cost.profile import read_profile
from distir_relax.ir import STAGES, parse, print_module
from distir_relax.ir.program import ROLES
from distir_relax.layout import DTYPES
from distir_relax.lowering.emit.torch import to_executable
from distir_relax.ops import OF_PROGRAMS, Trait, entries
from distir_relax.runtime.session import Session
from tests.runtime.processes import interpreter

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
TREES = ("distir_relax/", "tests/", "examples/", "benchmarks/", "docs/", "scripts/")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_blocks(name: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text_of(name), re.DOTALL | re.MULTILINE)


def prose(name: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(name), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that a Markdown viewer makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_documents_are_all_there() -> None:
    expected = {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert expected | {
        f"docs/{page}.md"
        for page in (
            *(
                "benchmarks",
                "bundle",
                "coverage",
                "getting-started",
                "glossary",
                "index",
                "ir",
                "limitations",
                "models",
            ),
            *("passes", "placements", "runtime", "simulator", "transformers", "troubleshooting", "tvm"),
        )
    } <= set(NAMES)


def test_the_manifest_in_the_document_is_one() -> None:
    (example,) = code_blocks("docs/bundle.md", "json")
    manifest = Manifest.from_json(json.loads(example))
    assert json.loads(example)["format"] == FORMAT
    written = manifest.to_json()
    assert list(json.loads(example)) == list(written), "the document has the fields of a manifest, in their order"
    assert [local_shape(manifest.outputs[0], manifest.mesh, rank) for rank in (0, 1)] == [(4, 64), (4, 63)]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(name)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{name} links to {target}, which has no such heading"


@pytest.mark.parametrize("name", NAMES)
def test_paths_exist(name: str) -> None:
    for code in re.findall(r"`([^`\n]+)`", prose(name)):
        for word in code.split():
            path = word.split(":")[0].rstrip(",;")
            if path.startswith(TREES) and not (set(path) & set("*<>{}")):
                assert (ROOT / path).exists(), f"{name} names {path}"


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_package_exist(name: str) -> None:
    for dotted in re.findall(r"`(distir_relax(?:\.\w+)+)", prose(name)):
        parts = dotted.split(".")[1:]
        found: object = distir_relax
        for i, part in enumerate(parts):
            module = ".".join(["distir_relax", *parts[: i + 1]])
            if not hasattr(found, part):
                __import__(module)
            found = getattr(found, part)


@pytest.mark.parametrize("name", NAMES)
def test_programs_parse_and_print_as_they_stand(name: str) -> None:
    for block in code_blocks(name, "distir"):
        module = parse(block, name)
        printed = print_module(module)
        assert parse(printed) == module
        without_reasons = re.sub(r"  # ; .*$| ; .*$", "", block, flags=re.MULTILINE)
        assert printed == without_reasons, name


@pytest.mark.parametrize("name", NAMES)
def test_python_is_python(name: str) -> None:
    for block in code_blocks(name, "python"):
        ast.parse(block)


def test_the_worked_examples_are_parts_of_files_that_run() -> None:
    """Each block stands as it is in a file of `examples/extend/`, which `tests/test_worked_examples.py` runs."""
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples" / "extend").glob("*.py")}
    blocks = [*code_blocks("CONTRIBUTING.md", "python"), *code_blocks("docs/tvm.md", "python")]
    blocks += code_blocks("docs/strategies.md", "python")[1:]
    blocks += [block for block in code_blocks("docs/pipelines.md", "python") if "@schedule(" in block]
    blocks += [block for block in code_blocks("docs/training.md", "python") if "(dr.optim.Optimizer)" in block]
    shown = [[name for name, text in files.items() if block in text] for block in blocks]
    assert {name for (name,) in shown} == set(files)


def test_the_code_on_the_search_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = code_blocks("docs/search.md", "python")
    exec(block, {})
    strategy, throughput, too_large = capsys.readouterr().out.split()
    assert len(strategy.split("/")) == 4
    assert float(throughput) > 0
    assert too_large == "0"


@pytest.mark.parametrize("number", range(len(code_blocks("docs/simulator.md", "python"))))
def test_the_code_on_the_simulator_runs(number: int, tmp_path: Path) -> None:
    block = code_blocks("docs/simulator.md", "python")[number]
    program = tmp_path / block.splitlines()[0].removeprefix("# ")
    program.write_text(block, encoding="utf-8")
    done = subprocess.run(
        [*interpreter(), str(program)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


class _Blocks(nn.Module):
    """A model with the names that the pages' code uses: ``blocks.0.up``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(5, 7), "down": nn.Linear(7, 5)}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["down"](nn.functional.gelu(block["up"](x)))
        return x


class _WithLoss(_Blocks):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return nn.functional.mse_loss(super().forward(x), target)


def _context(name: str) -> dict[str, object]:
    """The names that a page's code takes from its reader."""
    inputs, targets = torch.randn(9, 5), torch.randn(9, 5)
    context: dict[str, object] = {"inputs": inputs, "targets": targets, "loss": nn.functional.mse_loss}
    context["model"] = _WithLoss() if name == "gradients" else _Blocks()
    if name == "runtime":
        step = distir_relax.compile_training(
            _WithLoss(), optimizer=distir_relax.optim.SGD(lr=0.1), example_batch=(inputs, targets), strategy="3/1/1/1"
        )
        context |= {"plan": step.plan, "Session": Session}
        context["inputs"] = step.numbers(step.plan.imported.flatten((inputs, targets), {}))
    return context


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("gradients", 0), ("pipelines", 0), ("pipelines", 1), ("pipelines", 2), ("placements", 0), ("runtime", 0),
        ("strategies", 0), *(("training", number) for number in (3, 4, 5, 7)),
    ],
)  # fmt: skip
def test_the_code_on_other_pages_runs(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(code_blocks(f"docs/{name}.md", "python")[number], _context(name))


def test_the_recipe_by_hand_is_the_file_that_runs() -> None:
    (_, block) = code_blocks("docs/finetune.md", "python")
    assert (ROOT / "examples" / "finetune_by_hand.py").read_text().endswith(block)


def test_the_life_of_a_rank_program_is_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = code_blocks("docs/rank-program.md", "python")
    scope: dict[str, Any] = {"__name__": "page"}
    exec(code, scope)
    plan = scope["plan"]
    modules = [*plan.modules.values(), to_executable(plan.modules["ranked"])]
    texts = [*map(print_module, modules), (tmp_path / "block.dist" / "programs" / "main_0.py").read_text()]
    made = [line.partition("  #")[0].strip() for text in texts for line in text.splitlines()]
    shown = [line for block in code_blocks("docs/rank-program.md", "text") for line in block.splitlines()]
    assert len(shown) > 10
    assert [line for line in shown if line not in made] == []


@pytest.mark.parametrize("name", NAMES)
def test_commands_on_the_pages_have_these_options(name: str) -> None:
    """Each `distir` command line is parsed as the command does, without running it."""
    text = "".join(block for kind in ("sh", "bash", "console") for block in code_blocks(name, kind))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    root = typer.main.get_command(app)
    for line in lines:
        words = shlex.split(line, comments=True)
        if "distir" not in words:
            continue
        command, *arguments = words[words.index("distir") + 1 :]
        arguments = arguments[: next((i for i, word in enumerate(arguments) if word in ("|", ">", "&&")), None)]
        commands = root.commands  # type: ignore[attr-defined]
        assert command in commands, f"{name}: there is no command distir {command}"
        commands[command].make_context(command, arguments)


def test_the_profile_on_the_simulators_page_can_be_read() -> None:
    (text,) = code_blocks("docs/simulator.md", "toml")
    assert read_profile(text).devices == 16


def test_the_grammar_names_every_stage_role_and_dtype() -> None:
    (grammar,) = code_blocks("docs/ir.md", "ebnf")
    shown = {
        rule: set(re.findall(r'"(\w+)"', re.search(rf"^{rule} +=(.*?);", grammar, re.DOTALL | re.MULTILINE)[1]))  # type: ignore[index]
        for rule in ("stage", "role", "dtype")
    }
    assert shown == {"stage": set(STAGES), "role": set(ROLES), "dtype": {short for short, _ in DTYPES.values()}}


def test_the_table_of_collectives_is_that_of_the_op_table() -> None:
    (table,) = re.findall(r"\| op \| attribute \| what it says \|\n\|.*?\n(.*?)\n\n", text_of("docs/ir.md"), re.DOTALL)
    shown: list[tuple[str, str, str]] = []
    for row in table.splitlines():
        op, attribute, meaning = (cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", row)[1:-1])
        shown.append((op or shown[-1][0], attribute, meaning.replace("\\|", "|")))
    written = [entry for entry in entries() if entry.semantics.attributes and Trait.ON_COMMUNICATOR in entry.traits]
    attributes = [(e.name, key, what) for e in written for key, what in e.semantics.attributes.items()]
    assert sorted(shown) == sorted(attributes)


def test_the_table_of_pending_sums_is_that_of_the_op_table() -> None:
    """Every op that is linear in an operand is in the table of what lets a pending sum pass, and no other is."""
    (table,) = re.findall(r"\| op \| `I\[sum\]` passes \|\n(.*?)\n\n", text_of("docs/placements.md"), re.DOTALL)
    passes = " ".join(row for row in table.splitlines() if "| yes" in row)
    passes = passes.replace("| attention |", "scaled_dot_product_attention")
    passes = passes.replace("`I + I`", "add").replace("`I - I`", "subtract")
    layouts = {"annotate_sharding", "redistribute"}
    for entry in entries():
        if (
            entry.code.patterns
            or Trait.ON_COMMUNICATOR in entry.traits
            or entry.name in layouts
            or not entry.traits.isdisjoint(OF_PROGRAMS)
        ):
            continue
        name = entry.name.removeprefix("nn.")
        shown = re.search(rf"\b{name}\b", passes) is not None
        assert shown == bool(entry.semantics.linear), f"docs/placements.md and the op table differ on {entry.name}"


def test_messages_of_troubleshooting_are_those_of_the_package() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "distir_relax").rglob("*.py"))
    messages = re.findall(r"^\| `([^`]+)`", text_of("docs/troubleshooting.md"), re.MULTILINE)
    assert len(messages) > 15
    assert [message for message in messages if message not in sources] == []


def test_the_index_links_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)", text_of("docs/index.md")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - linked == {"index.md"}


def test_the_readme_has_two_pages() -> None:
    assert len(text_of("README.md")) < 10_000
