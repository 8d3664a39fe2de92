"""PyTorch models in: exported un-decomposed by `torch.export`, and written node by node in the op table's terms."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.frontends.imported_model import Flatten, Imported, live
from distir_relax.frontends.location import location_of_error
from distir_relax.frontends.moe_sort_elimination import unsorted
from distir_relax.frontends.torch.alias_check import check_distinct, distinct
from distir_relax.frontends.torch.custom_autograd import refusing_custom_autograd
from distir_relax.frontends.torch.export_check import check_import
from distir_relax.frontends.torch.functionalize import changed_buffers, functional
from distir_relax.frontends.torch.graph import GraphImporter, is_complex
from distir_relax.frontends.torch.inline_subgraphs import flatten
from distir_relax.frontends.torch.meta_params import exportable
from distir_relax.frontends.torch.module_state import AttributesReplaced, kept, refusing_replaced, state_buffers
from distir_relax.frontends.torch.object_state import adopt_written_constants
from distir_relax.frontends.torch.pytree_names import CallSignature, ResultStructure, leaf_names, result_names
from distir_relax.ir import Module, Value
from distir_relax.support.torch_compat import private

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


EXPORT_LOCK = threading.RLock()
"""Held while a torch model is read: `torch.export` patches global state, and reading patches the model."""


def import_torch(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    check: bool = False,
    training: bool = False,
) -> Imported:
    """Read in a model, as it runs on the example arguments: their shapes become the program's.

    What depends on constants and buffers alone (masks, positions) is computed now, and has no data where a buffer
    has none, on the meta device; what reaches no output is left out. Buffers that the model changes are inputs of role
    ``state``, each with an output that is its new value.

    With `training` the program is one that is trained: where dropout is active it has an input ``seed``, an int64
    scalar, that decides what is dropped. `Imported.flatten` leaves it to the caller, who gives another number in each
    step: ``inputs = {**imported.flatten(args, kwargs), "seed": torch.tensor(step)}``.

    Raises `ImportModelError` when `torch.export` cannot capture the model, when it is in training mode with active
    dropout and this is no import for training, when it changes its parameters, and as `refusing_custom_autograd` does;
    `UnsupportedOpError` for an op without an entry in the op table; `PlacementError` and `AnnotationError` for
    annotations that do not fit; with `check`, what `check_import` raises where the program does not compute what the
    model does.
    """
    with EXPORT_LOCK:
        return _import_torch(model, example_inputs, dict(example_kwargs or {}), check, training)


def _import_torch(
    model: torch.nn.Module, example_inputs: Sequence[Any], kwargs: dict[str, Any], check: bool, training: bool
) -> Imported:
    if not training:
        _refuse_active_dropout(model)
    try:
        return _read(model, example_inputs, kwargs, check, training)
    except AttributesReplaced as refused:
        if not refused.is_state:
            raise
        with state_buffers(model, refused, example_inputs, kwargs):
            return _read(model, example_inputs, kwargs, check, training)


def _read(
    model: torch.nn.Module, example_inputs: Sequence[Any], kwargs: dict[str, Any], check: bool, training: bool
) -> Imported:
    signature = _call_signature(model, example_inputs, kwargs)
    with refusing_custom_autograd(model, training):
        exported = _export(model, *distinct(model, tuple(example_inputs), kwargs))
    flatten(exported)
    adopt_written_constants(exported, model)
    program = functional(exported)
    _refuse_changed_parameters(program)
    importer = GraphImporter(training)
    names = _declare_inputs(importer, program, model, signature)
    results = importer.run(program.graph_module)
    # What cannot be read says so itself: a model that draws random numbers differs from its own program.
    if check:
        check_import(model, example_inputs, kwargs, program)
    return unsorted(_finish(model, importer, program, signature, names, results))


def _refuse_active_dropout(model: torch.nn.Module) -> None:
    if not model.training:
        return
    for name, module in model.named_modules():
        if module.training and (share := _dropped(module)):
            raise ImportModelError(
                f"{type(model).__name__} is in training mode: its dropout {name or 'layer'!r} "
                f"drops {share:.0%} at random",
                hint="call model.eval() first",
            )


def _dropped(module: torch.nn.Module) -> float:
    """The share of elements that a module drops when it is trained."""
    import torch

    if isinstance(module, private("torch.nn.modules.dropout._DropoutNd")):
        return float(module.p)
    # A recurrent layer has dropout of its own between its layers.
    return float(module.dropout) if isinstance(module, torch.nn.RNNBase) and module.num_layers > 1 else 0.0


def _refuse_changed_parameters(program: ExportedProgram) -> None:
    from torch.export.graph_signature import OutputKind

    written = (OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    for spec in program.graph_signature.output_specs:
        if spec.kind not in written:
            raise ImportModelError(
                f"the model changes {spec.target!r}, a parameter, while it runs", hint="compile model.eval()"
            )


def _call_signature(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallSignature:
    try:
        return CallSignature(model.forward, args, kwargs)
    except TypeError as error:
        raise ImportModelError(
            f"the example does not fit {type(model).__name__}.forward: {error}",
            hint="give example_inputs (by position) and example_kwargs (by name)",
        ) from None


def _export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    import torch

    try:
        with warnings.catch_warnings():
            # What becomes of attributes is looked at here.
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export")
            with kept(model), exportable(model, (args, kwargs)), refusing_replaced(model):
                return torch.export.export(model, args, kwargs, strict=False)
    except DistIRError:
        raise
    except Exception as error:  # torch.export raises whatever the model or the tracer raises
        cause = next((line for line in str(error).splitlines() if line.strip()), "no message")
        hint = "does the model run on these inputs? Control flow that depends on tensor values cannot be captured"
        if "Cache" in cause:
            hint = "a transformers model returns its cache unless example_kwargs say use_cache=False"
        raise ImportModelError(
            f"torch.export cannot capture {type(model).__name__}: {type(error).__name__}: {cause.split('. ')[0]}",
            location_of_error(error.__traceback__),
            hint,
        ) from error


def _declare_inputs(
    importer: GraphImporter, program: ExportedProgram, model: torch.nn.Module, signature: CallSignature
) -> dict[str, str]:
    """Give the importer every placeholder; the names that users may use, with their values' names."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    # What has no data was exported with a stand-in.
    hollow = {name: b for name, b in model.named_buffers(remove_duplicate=False) if b.is_meta}
    tensors = {**program.state_dict, **program.constants, **hollow}
    changed = changed_buffers(program)
    names: dict[str, str] = {}
    user = iter(_input_names(program, signature))
    # The user's inputs come first, so that they keep their names whatever the parameters are called.
    for node, spec in zip(nodes, specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            name = next(user)
            if isinstance(spec.arg, ConstantArgument):
                importer.bind(node, spec.arg.value)
            else:
                names[name] = importer.declare(node, name, "input").name
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = {name: first[id(p)] for name, p in parameters.items()}
    values: dict[str, Value] = {}
    for node, spec in zip(nodes, specs, strict=True):
        if spec.kind is InputKind.PARAMETER:
            name = tied.get(str(spec.target), str(spec.target))
            if name not in values:
                data = parameters.get(name, tensors[str(spec.target)])
                values[name] = importer.declare(node, name, "parameter", data.detach())
            importer.bind(node, values[name])
        elif spec.kind is InputKind.BUFFER and spec.target in changed:
            state = importer.declare(node, str(spec.target), "state", tensors[str(spec.target)].detach())
            names[str(spec.target)] = state.name
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            importer.bind(node, tensors[str(spec.target)].detach(), hint=str(spec.target))
        elif spec.kind is not InputKind.USER_INPUT:
            raise ImportModelError(
                f"the model takes {spec.target!r}, a {spec.kind.name.lower()}, which has no program form"
            )
    for name, canonical in tied.items():
        if canonical in values:
            value = values[canonical].name
            names[value if name in names else name] = value
    return names


def _input_names(program: ExportedProgram, signature: CallSignature) -> list[str]:
    arguments, keywords = program.call_spec.in_spec.children()
    names: list[str] = []
    for name, spec in zip(signature.positional(len(arguments.children())), arguments.children(), strict=True):
        names += leaf_names(spec, name)
    for name, spec in zip(keywords.context, keywords.children(), strict=True):
        names += leaf_names(spec, name)
    return names


def _finish(
    model: torch.nn.Module,
    importer: GraphImporter,
    program: ExportedProgram,
    signature: CallSignature,
    names: Mapping[str, str],
    results: Sequence[Any],
) -> Imported:
    from torch.export.graph_signature import OutputKind

    specs = program.graph_signature.output_specs
    user = [r for spec, r in zip(specs, results, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    fixed: dict[str, Any] = {}
    outputs: list[tuple[str, Value]] = []
    for label, result in zip(result_names(program.call_spec.out_spec), user, strict=True):
        if is_complex(result):
            raise ImportModelError(
                f"the model's result {label!r} is complex, which no program returns",
                hint="return torch.view_as_real(x)",
            )
        if importer.is_tensor(result):
            outputs.append((label, importer.value(result, label)))
        else:
            fixed[label] = result
    if not outputs:
        raise ImportModelError("expected a model that returns at least one tensor, found none")
    changed, written = _changes(importer, program, names, results)
    main = live(importer.builder.function("main", [*outputs, *changed]))
    kept = {item.value.name for item in main.inputs}
    used = {name for name, value in names.items() if value in kept}
    return Imported(
        module=Module("global", (main,), importer.meshes),
        tensors={name: tensor for name, tensor in importer.tensors.items() if name in kept},
        names={name: value for name, value in names.items() if name in used},
        flatten=_flatten(signature, written),
        rebuild=ResultStructure(program.call_spec.out_spec, fixed).rebuild,
        scopes=importer.scopes,
        written=written,
        unused=frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)) - used,
        arguments=signature.arguments,
        constants=signature.constants,
        results=tuple(label for label, _ in outputs),
    )


def _flatten(signature: CallSignature, written: Mapping[str, str]) -> Flatten:
    """What gives a call's tensors by input name, where the model writes to the inputs that `written` leads to."""

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        tensors = signature.flatten(args, kwargs)
        check_distinct(tensors, written.values())
        return tensors

    return flatten


def _changes(
    importer: GraphImporter, program: ExportedProgram, names: Mapping[str, str], results: Sequence[Any]
) -> tuple[list[tuple[str, Value]], dict[str, str]]:
    """The outputs that are new values of buffers and inputs; of inputs, from the output's name to the input's."""
    from torch.export.graph_signature import OutputKind

    specs = program.graph_signature.output_specs
    inputs = {item.value.name: item.value for item in importer.builder.inputs}
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    importer.builder.location = ""
    outputs: list[tuple[str, Value]] = []
    written: dict[str, str] = {}
    for spec, result in zip(specs, results, strict=True):
        target = str(spec.target)
        if spec.kind is OutputKind.BUFFER_MUTATION:
            new = importer.value(result, f"{target}.new")
            state = importer.builder.emit("assign", inputs[names[target]], new)
            outputs.append((f"{target}.new", state))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            name = importer.result(placeholders[target]).name
            outputs.append((f"{name}.new", importer.value(result, f"{name}.new")))
            written[f"{name}.new"] = name
    return outputs, written
