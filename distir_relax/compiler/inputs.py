"""Classification of user inputs: a plan, a model to compile, a program, or a saved bundle.

=============================  =========================================================================
`Plan`                         compiled already
`Model`                        a model with its example call, or an ONNX file; to be compiled
`Training`                     a model with its loss and an optimizer, to be compiled to a training step
`Program`                      a program of the distributed stage, possibly with its tensors
`SavedBundle`                  the folder of a bundle
=============================  =========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, Unpack

from distir_relax.compiler.compile import Plan, compile, default_name, read_model
from distir_relax.compiler.given_shardings import complete_for
from distir_relax.compiler.options import CompileOptions, ImportOptions
from distir_relax.compiler.source import Source
from distir_relax.compiler.training import Training, TrainingStep
from distir_relax.errors import ImportModelError
from distir_relax.frontends.dynamic_shapes import DimSpec
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import Module, parse, verify
from distir_relax.ops import check
from distir_relax.support import read_text
from distir_relax.support.user_function import call_function, find_function


@dataclass(frozen=True)
class Model:
    """A model with its example call, as `compile` takes it."""

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: DimSpec | None = None
    dims: Mapping[str, Any] | None = None
    precision: str | None = None
    keep: Sequence[str] = ()

    def compile(self, **options: Any) -> Plan:
        """Compile with these options; raises what `compile` raises."""
        named = self._of_import
        return compile(self.model, self.args, self.kwargs or None, **{**named, **options})

    def read(self, options: CompileOptions, **of_import: Unpack[ImportOptions]) -> Source:
        """Import the model, to be compiled with these options; raises what `compile` raises."""
        of_import = {**self._of_import, **of_import}
        imported = read_model(self.model, self.args, self.kwargs or None, **of_import)
        return Source(imported, complete_for(options, default_name(self.model), self.model, imported))

    @property
    def _of_import(self) -> ImportOptions:
        return {
            "dynamic_shapes": self.dynamic_shapes, "dims": self.dims, "precision": self.precision, "keep": self.keep
        }  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A fully typed program of all devices: of the distributed stage, or as it is executed.

    `tensors` are its weights by name, None if not given.
    """

    module: Module
    tensors: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SavedBundle:
    """The folder of a bundle."""

    path: Path


_Target = TypeVar("_Target", bound=Model | Training)
Input = Plan | Model | Training | Program | SavedBundle


def with_dims(target: _Target, dims: Mapping[str, int]) -> _Target:
    """Return a model or a training with values of symbolic sizes."""
    return replace(target, dims={**(target.dims or {}), **dims}) if dims else target


def in_precision(target: _Target, precision: str | None, keep: Sequence[str], where: str = "") -> _Target:
    """Return a model in a precision. Raises `ImportModelError` for a training, which has its own."""
    if precision is None and not keep:
        return target
    if isinstance(target, Training):
        raise ImportModelError("a training has a precision of its own", where, 'dr.Training(..., precision="bf16")')
    return replace(target, precision=precision, keep=tuple(keep))


def is_onnx(target: object) -> bool:
    """Return whether a user's argument is an ONNX file."""
    return isinstance(target, (str, Path)) and str(target).endswith(".onnx")


def classify_input(value: Any, where: str = "") -> Input:
    """Classify a value that a user passed, or that a user's function returned.

    A tuple is ``(program, tensors)``, of the global or the distributed stage, ``(model, example_inputs)``, ``(model,
    example_inputs, example_kwargs)``, or that with `dynamic_shapes` as a fourth element. Raises `ImportModelError` for
    anything else, and what typing a program raises.
    """
    if isinstance(value, (Plan, Training)):
        return value
    if isinstance(value, TrainingStep):
        return value.plan
    if isinstance(value, Module):
        value = (value,)
    if isinstance(value, tuple) and value and isinstance(value[0], Module):
        if value[0].stage == "executable" and not value[0].ranks:
            return Program(value[0])
        if value[0].stage != "distributed":
            return Model(value)
        return Program(infer_types(value[0]), value[1] if len(value) == 2 else None)
    if isinstance(value, tuple) and len(value) in (2, 3, 4):
        inputs = value[1] if isinstance(value[1], (tuple, list)) else (value[1],)
        kwargs = dict(value[2] or {}) if len(value) > 2 else {}
        return Model(value[0], tuple(inputs), kwargs, value[3] if len(value) == 4 else None)
    raise ImportModelError(
        f"expected a Plan, a program, or a tuple (model, example_inputs), found {type(value).__name__}", where,
        "end the function with: return model, (x,)")  # fmt: skip


def call_target(
    target: str, arguments: Mapping[str, Any], required: Sequence[str] = ()
) -> tuple[Input, Callable[..., Any]]:
    """Call the function ``FILE.py:FUNCTION``; return its classified result, and the function; see `call_function`."""
    function = find_function(target)
    return classify_input(call_function(function, target, arguments, required), target), function


def read_target(target: str | Path) -> Input:
    """Read a path: an ONNX file, a bundle, or the text of a program, which is verified.

    Raises `ImportModelError` if there is no such file or it cannot be read, and what reading a program raises.
    """
    if is_onnx(target):
        return Model(str(target))
    path = Path(target)
    if path.is_dir():
        return SavedBundle(path)
    try:
        source = read_text(path, ImportModelError)
    except ImportModelError as error:
        hint = "give a bundle, a program's text, an .onnx file, or file.py:function"
        raise ImportModelError(error.message, error.where, hint) from None
    module = parse(source, str(target), places=True)
    module = module if module.stage == "executable" else infer_types(module)
    # The text may be hand-written.
    verify(module, check)
    return Program(module)
