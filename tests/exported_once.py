"""Exports that tests share: of models that differ in the numbers of their tensors alone, a process makes one.

`torch.export` takes a third of the time of the tests, torch's functionalization of its result a tenth, and many tests
compile the same model in several ways. Only these are left out: what follows, and the checks of its result, run each
time, on the tensors of the model at hand.
"""

from __future__ import annotations

import copy
import io
import marshal
import pickle
from collections import OrderedDict
from types import FunctionType
from typing import Any

import torch
from torch.export import ExportedProgram

from distir_relax.frontends.torch import importer
from distir_relax.support.deferred_tensor import DeferredTensor

_MOST = 100
"""The number of programs that are kept, those used last."""

_EXPORT, _TORCH_EXPORT = importer._export, torch.export.export
_FUNCTIONALIZE = importer.functionalize
_programs: OrderedDict[bytes, ExportedProgram] = OrderedDict()
_functionalized: OrderedDict[bytes, ExportedProgram] = OrderedDict()


class _NoKeyError(Exception):
    """The program may depend on more than a key tells."""


class _Pickler(pickle.Pickler):
    """Pickles models and inputs; of tensors their types, and which are the same or share memory."""

    def __init__(self, file: io.BytesIO, model: torch.nn.Module, inputs: Any) -> None:
        super().__init__(file)
        leaves = torch.utils._pytree.tree_leaves(inputs)
        self._tensors = {id(t) for t in (*model.parameters(), *model.buffers(), *leaves)}
        self._numbers: dict[int, int] = {}

    def persistent_id(self, thing: Any) -> str | None:
        if not isinstance(thing, torch.Tensor):
            return None
        kinds = (torch.Tensor, torch.nn.Parameter, DeferredTensor)
        if id(thing) not in self._tensors or type(thing) not in kinds or thing.is_meta:
            raise _NoKeyError
        memory = 0 if isinstance(thing, DeferredTensor) else thing.data_ptr()
        numbers = [self._numbers.setdefault(n, len(self._numbers)) for n in (id(thing), memory)]
        kind = (type(thing), thing.dtype, thing.shape, thing.stride(), thing.device, thing.requires_grad)
        return repr((numbers, kind))

    def reducer_override(self, thing: Any) -> Any:
        """A function within another is its code and the values around it that it uses."""
        if not isinstance(thing, FunctionType) or "<locals>" not in thing.__qualname__:
            return NotImplemented
        around = [cell.cell_contents for cell in thing.__closure__ or ()]
        return tuple, ((marshal.dumps(thing.__code__), around, thing.__defaults__, thing.__kwdefaults__),)


def export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any, symbols: Any) -> Any:
    """`importer._export`, which is called for a model if none like it has been exported lately."""
    key = _key(model, args, kwargs, spec, symbols)
    if key is None or torch.export.export is not _TORCH_EXPORT:
        return _EXPORT(model, args, kwargs, spec, symbols)
    if key in _programs:
        _programs.move_to_end(key)
        return _with_tensors(_programs[key], model, args, kwargs)
    program = _EXPORT(model, args, kwargs, spec, symbols)
    if program.state_dict.keys() | program.constants.keys() <= _tensors(model).keys():
        program.key_of_export = key
        _keep(_programs, key, _without_tensors(program, model))
    return program


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """`importer.functionalize`, which is called for a shared export if it has not been functionalized lately."""
    key = getattr(program, "key_of_export", None)
    if key in _functionalized:
        _functionalized.move_to_end(key)
        found = _copy(_functionalized[key])
        found._state_dict = {name: program.state_dict[name] for name in found.state_dict}
        found._constants = {name: program.constants[name] for name in found.constants}
        found._example_inputs = program.example_inputs
        return found
    found = _FUNCTIONALIZE(program)
    before = {**program.state_dict, **program.constants}
    after = {**found.state_dict, **found.constants}
    if key is not None and found is not program and all(before.get(name) is x for name, x in after.items()):
        kept = _copy(found)
        kept._state_dict, kept._constants = dict.fromkeys(found.state_dict), dict.fromkeys(found.constants)
        kept._example_inputs = None
        _keep(_functionalized, key, kept)
    return found


def _keep(programs: OrderedDict[bytes, ExportedProgram], key: bytes, program: ExportedProgram) -> None:
    programs[key] = program
    if len(programs) > _MOST:
        programs.popitem(last=False)


def _key(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any, symbols: Any
) -> bytes | None:
    """All that the program of a model depends on; None for a model with functions or tensors of its own."""
    file = io.BytesIO()
    narrow = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    # In training, functions are traced with their backwards.
    is_trained = "apply" in vars(torch.autograd.function._SingleLevelFunction)
    modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *narrow, is_trained
    try:
        _Pickler(file, model, (args, kwargs)).dump((model, args, kwargs, repr(spec), symbols, modes))
    except (_NoKeyError, pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return file.getvalue()


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _without_tensors(program: ExportedProgram, model: torch.nn.Module) -> ExportedProgram:
    """A copy of the program, which keeps no model in memory."""
    found = _copy(program)
    deferred = {name for name, tensor in _tensors(model).items() if isinstance(tensor, DeferredTensor)}
    # In place of tensors in files, an export has others, which take no memory.
    found._state_dict = {name: tensor if name in deferred else None for name, tensor in program.state_dict.items()}
    found._constants = dict.fromkeys(program.constants)
    found._example_inputs = None
    return found


def _with_tensors(
    program: ExportedProgram, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ExportedProgram:
    """A copy of the program with the tensors of a model."""
    found, tensors = _copy(program), _tensors(model)
    found._state_dict = {
        name: tensors[name] if placeholder is None else placeholder for name, placeholder in program.state_dict.items()
    }
    found._constants = {name: tensors[name] for name in program.constants}
    found._example_inputs = args, kwargs
    return found


def _copy(program: ExportedProgram) -> ExportedProgram:
    """A copy whose graph may be changed."""
    found = copy.copy(program)
    found._graph_module = copy.deepcopy(program.graph_module)
    found._graph_signature = copy.deepcopy(program.graph_signature)
    return found
