"""Compilation options: declared once, checked by name, documented, and on the command line."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.cli.app import app
from distir_relax.cli.options import with_options
from distir_relax.compiler.options import CompileOptions, ImportOptions, LayoutOptions, complete, declared
from distir_relax.layout import DeviceMesh


def test_an_unknown_option_names_those_that_exist() -> None:
    with pytest.raises(TypeError, match=r"no option 'stratgy', did you mean 'strategy'\? Expected one of shardings"):
        dr.compile(nn.Linear(3, 2), (torch.ones(1, 3),), stratgy="1/1/1/1")  # type: ignore[call-arg]


def test_defaults_are_those_declared() -> None:
    options = complete({"tail": "pad"}, "linear")
    assert options == {name: o.default for name, o in declared(CompileOptions).items()} | {
        "tail": "pad", "name": "linear",
    }  # fmt: skip
    assert complete({"name": "mine"}, "linear")["name"] == "mine"


@pytest.mark.parametrize(("function", "groups"), [
    (dr.compile, (ImportOptions, CompileOptions)), (dr.compile_training, (CompileOptions,)),
])  # fmt: skip
def test_each_option_is_in_the_docstring(function: object, groups: tuple[type, ...]) -> None:
    text = inspect.getdoc(function) or ""
    for group in groups:
        for name, option in declared(group).items():
            assert f"{name}: {option.help}" in text


@pytest.mark.parametrize(("command", "groups"), [
    ("compile", (CompileOptions, ImportOptions)), ("simulate", (LayoutOptions,)),
])  # fmt: skip
def test_a_command_has_the_options_that_are_declared(command: str, groups: tuple[type, ...]) -> None:
    registered = next(c for c in app.registered_commands if command in (c.name, getattr(c.callback, "__name__", "")))
    parameters = inspect.signature(registered.callback).parameters  # type: ignore[arg-type]
    names = {name for group in groups for name, option in declared(group).items() if option.cli}
    assert names <= set(parameters)
    assert "options" not in parameters


def test_options_that_are_not_given_are_left_out() -> None:
    received = {}

    @with_options(CompileOptions)
    def command(target: str, options: dict[str, object]) -> None:
        received.update(options, target=target)

    values: dict[str, object] = dict.fromkeys(inspect.signature(command).parameters)
    values |= {"outline": True, "fast_math": False, "shardings": []}
    command(**{**values, "target": "m.py:f"})
    assert received == {"target": "m.py:f"}
    command(**{**values, "target": "m.py:f", "outline": False, "shardings": ["w=S[0]"], "mesh": "2x3", "axes": "a,b"})
    assert received["shardings"] == {"w": "S[0]"}
    assert received["outline"] is False
    command(**{**values, "target": "m.py:f", "check": False})
    assert received["check"] is False
    assert received["mesh"] == DeviceMesh((2, 3), ("a", "b"))
