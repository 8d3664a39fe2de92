"""How tests share a machine: one thread each, and launches one after the other; and fixtures of several folders."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.drawn_cases import draw

if TYPE_CHECKING:
    from distir_relax.ops import OpDef

# As for ranks: the thread pools of two test processes on two cores would hold each other up.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every compilation of a test, in other processes too, verifies the program after each pass.
os.environ["DISTIR_VERIFY"] = "1"
# Tests of proofs ask for them.
os.environ["DISTIR_CHECK"] = "0"
# Hundreds of processes are started that import this package: it is translated once, whatever the shell says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


LARGE = 60
"""Number of tests of a large file, all of which are short."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="run all cases of the tests whose cases are drawn")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out sweeps and cases that are not drawn, put tests that start launches into one group, and begin with it.

    One worker of pytest-xdist runs a group. A launch has several ranks: two at a time would be slow enough to run
    into their time limits. Others that share what is made once, for a file or by the name of the mark ``shares``, are
    a group too, or each worker would make it; so are all tests of a small file, which share exports. Tests of large
    files have no group and come last: they fill the time of a worker whose groups are done.
    """
    if not config.getoption("--every-case") and not _are_named(config):
        items[:], left_out = draw(items)
        config.hook.pytest_deselected(items=left_out)
    order, sizes = {}, Counter(item.path for item in items)
    for item in items:
        if item.get_closest_marker("mpirun"):
            item.add_marker(pytest.mark.xdist_group("mpirun"))
            order[item] = 0
        elif mark := item.get_closest_marker("shares"):
            item.add_marker(pytest.mark.xdist_group(mark.args[0]))
            order[item] = 1
        elif (is_needed := _shares_with_its_file(item)) or sizes[item.path] < LARGE:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
            order[item] = 1 if is_needed else 2
    items.sort(key=lambda item: order.get(item, 3))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Look for cycles of garbage among what tests make alone, and less often than Python does.

    Modules of torch, transformers and TVM are a million objects that all stay: to look at them again and again would
    take a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def exported_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal models are exported once in a process, but for the tests of the import itself."""
    if "frontends" not in request.path.parts:
        from tests import exported_once

        monkeypatch.setattr(exported_once.importer, "_export", exported_once.export)
        monkeypatch.setattr(exported_once.importer, "functionalize", exported_once.functionalize)


@pytest.fixture
def quick_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of launches that this process and its forks start are forks: `tests.runtime.processes.interpreter`."""
    from tests.runtime.processes import command

    python = str(command(tmp_path / "quick" / "python"))
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("FORKING_PYTHON", python)


@pytest.fixture(scope="session", autouse=True)
def compiler_stays() -> None:
    """One process compiles kernels for all tests of this one."""
    from distir_relax.kernels import isolated_calls

    isolated_calls.IDLE_SECONDS = 600.0


@pytest.fixture(scope="session", autouse=True)
def programs_compiled_here() -> None:
    """Programs of the tvm backend are compiled by the process of the tests, once; launched ranks have another do it."""
    from distir_relax.runtime.backends.tvm import compile

    def call(_: object, *arguments: Any, seconds: float) -> bytes:
        return compile._compile(*arguments).to_bytes()

    compile.call_isolated = call  # type: ignore[assignment]


@pytest.fixture
def native_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use native products for all rows, also where oneDNN's are faster or were when both were measured."""
    from distir_relax.kernels import packing

    monkeypatch.setattr(packing, "_most_rows", lambda *_: 1 << 20)
    monkeypatch.setattr(packing, "_is_row_faster_packed", lambda *_: True)


def _are_named(config: pytest.Config) -> bool:
    """Whether tests are given by name: then all of their cases are meant."""
    return any("::" in argument for argument in config.args) or bool(config.option.keyword)


def _shares_with_its_file(item: pytest.Item) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    return any(one.scope == "module" for several in definitions for one in several)


@pytest.fixture
def change() -> Iterator[Callable[..., OpDef]]:
    """Gives an op other fields of its facets, for one test."""
    from distir_relax.ops import TABLE, lookup

    def changed(name: str, **facets: dict[str, Any]) -> OpDef:
        entry = lookup(name)
        return TABLE.replace(
            replace(entry, **{key: replace(getattr(entry, key), **new) for key, new in facets.items()})
        )

    with TABLE.extended():
        yield changed
