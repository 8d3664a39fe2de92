"""Import of PyTorch models: export without decomposition by `torch.export`, conversion node by node."""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from distir_relax.bundle import drawn_weights
from distir_relax.errors import DistIRError, ImportModelError, UnsupportedOpError
from distir_relax.frontends.dynamic_shapes import DimSpec, Symbols, find_symbols
from distir_relax.frontends.fixed_inputs import FixedInputs
from distir_relax.frontends.imported_model import Flatten, Imported, eliminate_dead_ops
from distir_relax.frontends.location import location_of_error
from distir_relax.frontends.moe_sort_elimination import eliminate_moe_sorts
from distir_relax.frontends.torch.alias_check import check_no_mutated_alias, copy_aliases
from distir_relax.frontends.torch.autocast import explicit_casts, under_autocast
from distir_relax.frontends.torch.custom_autograd import custom_autograd
from distir_relax.frontends.torch.drawn_numbers import reject_drawn_numbers
from distir_relax.frontends.torch.export_check import check_import
from distir_relax.frontends.torch.functionalize import functionalize, is_state_mutation, mutated_state
from distir_relax.frontends.torch.graph import TRANSFORM_HINT, GraphImporter, is_complex
from distir_relax.frontends.torch.hidden_writes import expose_writes
from distir_relax.frontends.torch.inline_subgraphs import inline_subgraphs
from distir_relax.frontends.torch.inner_gradients import captured_gradients, computes_gradients
from distir_relax.frontends.torch.meta_params import deferred_parameters, placeholder_data, with_placeholders
from distir_relax.frontends.torch.module_modes import reject_active_dropout, warn_of_evaluation_mode
from distir_relax.frontends.torch.module_state import (
    AttributesReplaced,
    preserve_attributes,
    reject_replaced_attributes,
    state_buffers,
)
from distir_relax.frontends.torch.object_state import promote_mutated_constants
from distir_relax.frontends.torch.packed_documents import documents_by_distance
from distir_relax.frontends.torch.packed_sequences import padded_sequences
from distir_relax.frontends.torch.pytree_names import CallSignature, ResultStructure, leaf_names, result_names
from distir_relax.frontends.torch.recurrent_shapes import open_recurrence_lengths
from distir_relax.frontends.torch.scans import captured_scans
from distir_relax.frontends.torch.special_sizes import check_special_sizes
from distir_relax.frontends.torch.symbolic_export import (
    Decisions,
    explicit_arguments,
    recorded_decisions,
    specialization_error,
    torch_specification,
    with_example_sizes,
)
from distir_relax.frontends.torch.traceable import traceable_functions
from distir_relax.frontends.torch.transformers_options import control_flow_hint, image_hint
from distir_relax.ir import NEXT_ROLE, Module, Output, Value
from distir_relax.layout import Guards, guarding
from distir_relax.ops.elementwise.seed import takes_seed
from distir_relax.support.torch_compat import levels_restored, unlogged_errors

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


_TRANSFORMS = ("vmap", "jacrev", "jacfwd", "jvp", "vjp", "hessian", "linearize")
EXPORT_LOCK = threading.RLock()
"""Held during import of a torch model: `torch.export` patches global state, and the import patches the model."""


def import_torch(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    check: bool = False,
    training: bool = False,
    dynamic_shapes: DimSpec | None = None,
    dims: Mapping[str, Any] | None = None,
    constants: Mapping[str, Any] | None = None,
    changing: Collection[str] = (),
    autocast: str = "",
) -> Imported:
    """Import a model as it runs on the example arguments, whose shapes become those of the program.

    `constants` are values of arguments that the program then does not take; the example may omit them. A number fills
    a tensor of the example.

    `dynamic_shapes` names the dims that may differ from call to call, `dims` replaces bounds of them; see
    `find_symbols`. The example's sizes of those must be at least 2.

    Values that depend only on constants and buffers (masks, positions) are computed during import, and have no data if
    a buffer is on the meta device, except those of many elements (`large_constants`); ops that reach no output are
    removed. Buffers and parameters that the model changes are inputs of role ``state``, each with an output for its new
    value. Buffers called `changing`, which others change, have that role, too.

    With `autocast`, ``bfloat16`` or ``float16``, the program computes as the model does under ``torch.autocast``.

    With `training` active dropout adds an input ``seed``, an int64 scalar that determines the dropped elements.
    `Imported.flatten` leaves it to the caller, who passes another number in each step:
    ``inputs = {**imported.flatten(args, kwargs), "seed": torch.tensor(step)}``.

    Raises `ImportModelError` if `torch.export` cannot capture the model, if it is in training mode with active dropout
    without `training`, if it changes parameters that require gradients, and as `custom_autograd` and
    `reject_drawn_numbers` do; `UnsupportedOpError` for an op without an entry in the op table; `PlacementError` and
    `AnnotationError` for invalid annotations; with `check`, as `check_import` does if the program computes other
    results than the model; with `check` or `training`, as `check_special_sizes` does for a program without random
    numbers.
    """
    with EXPORT_LOCK:
        if not training:
            reject_active_dropout(model)
        fixed = FixedInputs(constants or {}, type(model).__name__)
        args, kwargs = _with_constants(model, fixed, example_inputs, dict(example_kwargs or {}))
        call = _Call.of(model, args, kwargs, dynamic_shapes, dims or {}, fixed, autocast)
        try:
            return _read(model, call, check, training, changing)
        except UnsupportedOpError as error:
            if hint := image_hint(model, call.signature.leaves):
                raise UnsupportedOpError(error.message, error.where, hint) from error
            raise
        except AttributesReplaced as error:
            if not error.is_state:
                raise
            with state_buffers(model, error, call.args, call.kwargs):
                return _read(model, call, check, training, changing)


@dataclass(frozen=True, slots=True)
class _Call:
    """The example call, and the symbols of its inputs' dims."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    signature: CallSignature
    symbols: Symbols
    fixed: FixedInputs
    autocast: str

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        dynamic_shapes: DimSpec | None,
        dims: Mapping[str, Any],
        fixed: FixedInputs,
        autocast: str,
    ) -> _Call:
        import torch

        signature = _call_signature(model, args, kwargs, fixed)
        shapes = {n: x.shape for n, x in signature.leaves.items() if isinstance(x, torch.Tensor)}
        symbols = find_symbols(dynamic_shapes, dims, shapes)
        return cls(args, kwargs, signature, with_example_sizes(symbols, shapes), fixed, autocast)

    def export(self, model: torch.nn.Module) -> ExportedProgram:
        """Export the model. Raises `ImportModelError` if torch cannot."""
        args, kwargs = copy_aliases(model, tuple(self.args), self.kwargs)
        if self.autocast:
            # Of the meta device torch has no autocast.
            args, kwargs = with_placeholders((args, kwargs))
        arguments = self.signature.bound(args, kwargs)
        spec = torch_specification(arguments, self.signature.leaf_names(arguments), self.symbols)
        with under_autocast(self.autocast):
            return _export(model, args, kwargs, spec if self.symbols else None, self.symbols)


def _read(model: torch.nn.Module, call: _Call, check: bool, training: bool, changing: Collection[str]) -> Imported:
    example_inputs, kwargs, signature = call.args, call.kwargs, call.signature
    with custom_autograd(model, training):
        exported = call.export(model)
    if training:
        warn_of_evaluation_mode(model, exported)
    inline_subgraphs(exported)
    is_cast = explicit_casts(exported, call.autocast)
    expose_writes(exported)
    promote_mutated_constants(exported, model)
    program = functionalize(exported)
    _reject_changed_parameters(program, model)
    # They were exported with placeholder data.
    program.state_dict.update(deferred_parameters(model))
    importer = GraphImporter(training, is_cast)
    with guarding(Guards()) as guards:
        names = _declare_inputs(importer, program, model, signature, call, changing)
        with levels_restored():
            results = importer.run(program.graph_module)
    # Only after conversion, which rejects random models: those differ from their own programs.
    if check and not computes_gradients(exported):
        with under_autocast(call.autocast), drawn_weights():
            check_import(model, example_inputs, kwargs, program)
    imported = eliminate_moe_sorts(_finish(model, importer, program, signature, names, results))
    module = replace(imported.module, records=tuple(guards.found.values()))
    imported = replace(imported, module=module)
    # A program of random numbers differs from its model in them.
    if call.symbols and (check or training) and not takes_seed(module.main):
        with under_autocast(call.autocast), drawn_weights():
            check_special_sizes(model, example_inputs, kwargs, signature.leaves, call.symbols, imported)
    return imported


def _reject_changed_parameters(program: ExportedProgram, model: torch.nn.Module) -> None:
    """Raise `ImportModelError` for a parameter that requires gradients, and that the model changes while it runs."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for name in mutated_state(program) & trained:
        raise ImportModelError(
            f"the model changes {name!r}, a parameter that requires gradients, while it runs",
            hint="requires_grad_(False) makes it state of the model, such as the average of another parameter",
        )


def _with_constants(
    model: torch.nn.Module, fixed: FixedInputs, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the example with the values of fixed arguments, in the types of those that it has."""
    import torch

    if not fixed.values:
        return args, kwargs
    signature = inspect.signature(model.forward)
    fixed.check_names(list(signature.parameters))
    values = dict(fixed.values)
    try:
        for name, example in signature.bind_partial(*args, **kwargs).arguments.items():
            if name in values and isinstance(example, torch.Tensor):
                values[name] = fixed.tensor(name, str(example.dtype).removeprefix("torch."), tuple(example.shape))
        return fixed.bind(signature, args, kwargs, values)
    except TypeError:
        return args, kwargs  # `_call_signature` reports it.


def _call_signature(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], fixed: FixedInputs
) -> CallSignature:
    try:
        return CallSignature(model.forward, args, kwargs, fixed)
    except TypeError as error:
        raise ImportModelError(
            f"the example does not fit {type(model).__name__}.forward: {error}",
            hint="give example_inputs (by position) and example_kwargs (by name)",
        ) from None


def _export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any, symbols: Symbols
) -> ExportedProgram:
    import torch

    decisions = Decisions()
    recorder = recorded_decisions() if spec else nullcontext(decisions)
    try:
        with warnings.catch_warnings(), ExitStack() as leaving:
            leaving.enter_context(unlogged_errors())
            leaving.enter_context(redirect_stderr(_WithoutGraphs(sys.stderr)))
            # Attributes are checked by `reject_replaced_attributes`.
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export")
            with (
                explicit_arguments(model, kwargs, spec or {}),
                recorder as decisions,
                open_recurrence_lengths() if spec else nullcontext(),
                padded_sequences(),
                captured_scans(model),
                captured_gradients(),
                traceable_functions(),
                documents_by_distance(),
                preserve_attributes(model),
                placeholder_data(model, (args, kwargs)),
                reject_drawn_numbers(model, args, kwargs),
                reject_replaced_attributes(model),
            ):
                return torch.export.export(model, args, kwargs, dynamic_shapes=spec, strict=False)
    except DistIRError:
        raise
    except Exception as error:  # torch.export raises whatever the model or the tracer raises
        if rejected := specialization_error(error, decisions, symbols):
            raise rejected from error
        cause = next((line for line in str(error).splitlines() if line.strip()), "no message")
        hint = "does the model run on these inputs? Control flow that depends on tensor values cannot be captured"
        if type(error).__name__ == "GuardOnDataDependentSymNode":
            cause, hint = _dependence_on_values(cause)
            hint = control_flow_hint(model) or hint
        if function := _transform(error.__traceback__):
            cause, hint = f"{function} is not captured ({cause})", TRANSFORM_HINT
        if "Cache" in cause:
            hint = "a transformers model returns its cache unless example_kwargs say use_cache=False"
        raise ImportModelError(
            f"torch.export cannot capture {type(model).__name__}: {type(error).__name__}: {cause.split('. ')[0]}",
            location_of_error(error.__traceback__),
            hint,
        ) from error


def _transform(traceback: TracebackType | None) -> str:
    """Return the outermost function of `torch.func` in a traceback, other than gradients, which are ops of a graph."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        name = code.co_qualname.partition(".")[0].removesuffix("_impl").strip("_")
        if "_functorch" in Path(code.co_filename).parts and name in _TRANSFORMS:
            return f"torch.func.{name}"
        traceback = traceback.tb_next
    return ""


def _dependence_on_values(cause: str) -> tuple[str, str]:
    """Return the message and the hint for torch's message about a number that it needs from a tensor."""
    cause = cause.partition(" (")[0]
    if "specialized integer" in cause:
        return (
            f"a size or an index depends on the values of a tensor ({cause})",
            "index with tensors: x[i.reshape(1)], x.index_copy(0, i.reshape(1), rows)",
        )
    return (
        f"its control flow depends on the values of a tensor ({cause})",
        "compute both results, and choose: torch.where(condition, a, b)",
    )


class _WithoutGraphs:
    """A stream without the graph that torch prints with an error, as far as it was traced: often hundreds of lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # torch prints it while it handles the error that has it.
        if hasattr(sys.exc_info()[1], "partial_fx_graph"):
            return len(text)
        return self._stream.write(text)


def _declare_inputs(
    importer: GraphImporter,
    program: ExportedProgram,
    model: torch.nn.Module,
    signature: CallSignature,
    call: _Call,
    changing: Collection[str],
) -> dict[str, str]:
    """Declare or bind every placeholder; return the user-visible names with their values' names."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    # Meta buffers were exported with placeholder data.
    meta_buffers = {name: b for name, b in model.named_buffers(remove_duplicate=False) if b.is_meta}
    tensors = {**program.state_dict, **program.constants, **meta_buffers}
    mutated = mutated_state(program)
    names: dict[str, str] = {}
    user = iter(_input_names(program, signature))
    # The user's inputs come first, so that their names do not change by conflicts with parameters.
    for node, spec in zip(nodes, specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            name = next(user)
            if isinstance(spec.arg, ConstantArgument):
                importer.bind(node, spec.arg.value)
            elif name in call.fixed.values:
                importer.bind(node, signature.leaves[name], hint=name)
            else:
                names[name] = importer.declare(node, name, "input", symbols=call.symbols.get(name, {})).name
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
                role = "state" if spec.target in mutated else "parameter"
                values[name] = importer.declare(node, name, role, data.detach())
            importer.bind(node, values[name])
        elif spec.kind is InputKind.BUFFER and spec.target in (*mutated, *changing):
            buffer = importer.declare(node, str(spec.target), "state", tensors[str(spec.target)].detach())
            names[str(spec.target)] = buffer.name
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
    mutations, written = _mutations(importer, program, names, results)
    main = eliminate_dead_ops(importer.builder.function("main", [*outputs, *mutations]))
    value_names = {item.value.name for item in main.inputs}
    used = {name for name, value in names.items() if value in value_names}
    return Imported(
        module=Module("global", (main,), importer.meshes),
        tensors={name: tensor for name, tensor in importer.tensors.items() if name in value_names},
        names={name: value for name, value in names.items() if name in used},
        flatten=_flatten(signature, written),
        rebuild=ResultStructure(program.call_spec.out_spec, fixed).rebuild,
        scopes=importer.scopes,
        written=written,
        unused=frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)) - used,
        arguments=signature.arguments,
        constants=signature.constants,
        results=tuple(label for label, _ in outputs),
        shape_ops=dict(importer.shape_ops),
        fixed=_fixed_tensors(program, model, names),
    )


def _fixed_tensors(program: ExportedProgram, model: torch.nn.Module, names: Mapping[str, str]) -> frozenset[str]:
    """Return the names of buffers and tensor attributes of the model that are read and not changed."""
    import torch
    from torch.export.graph_signature import InputKind

    def is_of_model(name: str) -> bool:
        # Tensors that are written in code have names that count them.
        with suppress(AttributeError):
            tensor = attrgetter(name)(model)
            return isinstance(tensor, torch.Tensor) and not tensor.is_meta
        return False

    live = set(program.graph.output_node().all_input_nodes)
    for node in reversed(program.graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    kinds = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    inputs = zip(nodes, program.graph_signature.input_specs, strict=True)
    found = [str(spec.target) for node, spec in inputs if spec.kind in kinds and node in live]
    return frozenset(name for name in found if name not in names and is_of_model(name))


def _flatten(signature: CallSignature, mutated: Mapping[str, str]) -> Flatten:
    """Return the function from a call to its tensors by input name; `mutated` maps outputs to mutated inputs."""

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        tensors = signature.flatten(args, kwargs)
        check_no_mutated_alias(tensors, mutated.values())
        return tensors

    return flatten


def _mutations(
    importer: GraphImporter, program: ExportedProgram, names: Mapping[str, str], results: Sequence[Any]
) -> tuple[list[Output], dict[str, str]]:
    """Return the outputs that are new values of state and inputs, and a map from outputs to mutated inputs."""
    from torch.export.graph_signature import OutputKind

    specs = program.graph_signature.output_specs
    inputs = {item.value.name: item.value for item in importer.builder.inputs}
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    importer.builder.location = ""
    outputs = list[Output]()
    mutated: dict[str, str] = {}
    for spec, result in zip(specs, results, strict=True):
        target = str(spec.target)
        if is_state_mutation(spec):
            new = importer.value(result, f"{target}.new")
            state = importer.builder.emit("assign", inputs[names[target]], new)
            outputs.append(Output(f"{target}.new", state, role=NEXT_ROLE, of=names[target]))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            name = importer.result(placeholders[target]).name
            outputs.append(Output(f"{name}.new", importer.value(result, f"{name}.new"), role=NEXT_ROLE, of=name))
            mutated[f"{name}.new"] = name
    return outputs, mutated
