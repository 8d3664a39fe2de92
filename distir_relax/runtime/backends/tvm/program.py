"""The tvm backend: run a rank's program on TVM's virtual machine.

Communication is a packed function that reads and writes the VM's own buffers. Ranks may be threads of one
process and share a program, so a packed function gets its rank's communicator from thread-local storage, and a product
its packed weights.

A program that is found compiled on disk is loaded without TVM's Python modules.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle
from distir_relax.errors import RunError
from distir_relax.kernels.indices import checked
from distir_relax.kernels.isolated_calls import IsolatedCallError
from distir_relax.lowering.emit.relax import CALL_PACKED
from distir_relax.lowering.emit.relax_namespace import CALL_KERNEL, CHECK_INDICES, SIZE_KEY
from distir_relax.ops import Trait, entries
from distir_relax.runtime.backends.torch import TorchProgram, load_text, prepare_weights
from distir_relax.runtime.backends.torch import load as load_by_torch
from distir_relax.runtime.backends.tvm.machine_code import limit_threads
from distir_relax.runtime.backends.weights import RankWeights, memory

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.backends.tvm.compiled_program import Compiled
    from distir_relax.runtime.communicator import Communicator


def load(bundle: Bundle, rank: int, comm: Communicator, device: str = "cpu") -> TvmProgram | TorchProgram:
    """See `Backend.load`. The program is compiled for this host's CPU; only the device "cpu" is supported.

    If TVM's compiler crashes or hangs, that is a warning, and the program is the torch backend's.
    """
    if device != "cpu":
        raise RunError(f"the tvm backend runs on the CPU, found device {device!r}", hint="run with --device cpu")
    manifest = bundle.manifest
    program = manifest.program_of(rank)
    taken = (*manifest.inputs, *(state.tensor for state in manifest.states))
    names = [item.name for item in taken if item.is_on(rank)]
    weights_by_name = RankWeights(bundle, rank, device)
    # State changes between runs, so it is passed as an input.
    state = {name: weights_by_name.pop(name) for name in manifest.updates if name in weights_by_name}
    try:
        from distir_relax.runtime.backends.tvm.compile import ProgramText, compile_program

        text = ProgramText(bundle.stage("ranked"), program.name, manifest.fast_math)
        compiled = compile_program(text, _threads(comm.local_size))
    except ImportError as missing:
        raise RunError(f"TVM cannot be imported: {missing}", hint="pip install apache-tvm") from None
    except IsolatedCallError as crash:
        warnings.warn(f"rank {rank} runs by torch: TVM's compiler failed, {crash}", RuntimeWarning, stacklevel=2)
        return load_by_torch(bundle, rank, comm, device)
    return TvmProgram(compiled, comm, names, state, weights_by_name, f"{manifest.name}/{program.name}")


class TvmProgram:
    """A `RankProgram` with its own virtual machine; the executable may be shared with other ranks.

    Its arguments are the inputs, by their `names` in the order of a call, tensors of the `state`, and prepared
    `weights`. Tracebacks call it `program`.
    """

    def __init__(
        self, compiled: Compiled, comm: Communicator, names: Sequence[str], state: Mapping[str, torch.Tensor],
        weights: dict[str, Any], program: str,
    ) -> None:  # fmt: skip
        from torch.utils.dlpack import from_dlpack

        if compiled.preparation:
            module = load_text(compiled.preparation, program, f"<{program}.prepare.py>", defines="prepare")
            weights = prepare_weights(module, comm, weights)

        for name in compiled.calls:
            _register(name)
        _register_kernels()
        self.steps = compiled.steps
        self._comm = comm
        # TVM reuses the memory of dead values, so sends must be copied.
        comm.copies_sends = True
        self._compiled = compiled
        # It loads TVM's library, in whose memory tensors are.
        self._machine = _start_machine(compiled.executable)
        self._main = self._machine["main"]
        given = {name: number for number, name in enumerate(names)}
        held: dict[str, Any] = {name: _to_tvm(tensor) for name, tensor in state.items()}
        self.state = {name: from_dlpack(tensor) for name, tensor in held.items()}
        held |= {
            name: _to_tvm(weights.pop(name)) for name in compiled.arguments if name not in given and name not in state
        }
        self._packed = [weights.pop(name) for name in compiled.packed]
        self._arguments = [given.get(name, held.get(name)) for name in compiled.arguments]
        others = (held[name] for name in held.keys() - state.keys())
        self.held = memory([*map(from_dlpack, others), *self._packed])

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int] = MappingProxyType({})) -> list[torch.Tensor]:
        """See `RankProgram`."""
        import torch
        import tvm_ffi
        from torch.utils.dlpack import from_dlpack

        arguments = [_to_tvm(inputs[x]) if isinstance(x, int) else x for x in self._arguments]
        names = self._compiled.sizes
        shape = [tvm_ffi.Shape([sizes[name] for name in names])] if names else []
        with torch.inference_mode():
            results = _call(self._comm, self._packed, self._main, [*arguments, *shape])
        return [from_dlpack(results[i]) for i in range(self._compiled.outputs)]


def _start_machine(executable: Any) -> Any:
    """Return a virtual machine as `relax.VirtualMachine` starts it, without TVM's Python modules."""
    cpu, device, pooled_allocator = 1, 0, 2
    machine = executable["vm_load_executable"]()
    machine["vm_initialization"](cpu, device, pooled_allocator)
    return machine


def rank_function(executable: Any, name: str, comm: Communicator) -> Callable[..., Any]:
    """Return the function `name` of an executable that was built elsewhere, communicating through `comm`.

    It has its own virtual machine, and takes and returns TVM tensors.
    """
    import tvm
    from tvm import relax

    _register_kernels()
    for entry in entries():
        if Trait.ON_COMMUNICATOR in entry.traits:
            _register(entry.name)
    comm.copies_sends = True
    function = relax.VirtualMachine(executable, tvm.cpu())[name]
    return lambda *arguments: _call(comm, (), function, arguments)


_current = threading.local()
"""Per thread: `comm` and `packed`, those of the running program, and `error`, the exception of a packed function."""


def _call(comm: Communicator, packed: Sequence[Callable[..., Any]], function: Any, arguments: Sequence[Any]) -> Any:
    before = getattr(_current, "comm", None), getattr(_current, "packed", ())
    _current.comm, _current.packed, _current.error = comm, packed, None
    try:
        return function(*arguments)
    except Exception as wrong:
        # TVM changes the type of an exception that passes through it: raise the original.
        raise (_current.error or wrong) from None
    finally:
        # An exception keeps the tensors of its frames alive.
        (_current.comm, _current.packed), _current.error = before, None


def _register(name: str) -> None:
    import tvm_ffi

    if tvm_ffi.get_global_func(f"distir.{name}", allow_missing=True) is None:
        tvm_ffi.register_global_func(f"distir.{name}", _packed(name))


def _register_kernels() -> None:
    import tvm_ffi

    if tvm_ffi.get_global_func(CHECK_INDICES, allow_missing=True) is None:
        tvm_ffi.register_global_func(CHECK_INDICES, _check_indices)
        tvm_ffi.register_global_func(CALL_KERNEL, _call_kernel)
        tvm_ffi.register_global_func(CALL_PACKED, _call_packed)


def _check_indices(ids: Any, low: int, high: int, user: str, where: str, result: Any) -> None:
    """See `distir_relax.lowering.emit.relax_namespace`."""
    from torch.utils.dlpack import from_dlpack

    try:
        from_dlpack(result).copy_(checked(from_dlpack(ids), low, high, str(user), str(where)))
    except RunError as error:
        _current.error = error
        raise


def _call_kernel(module: str, function: str, options: str, count: int, *tensors: Any) -> None:
    """See `distir_relax.lowering.emit.relax_namespace`."""
    from torch.utils.dlpack import from_dlpack

    kernel = getattr(import_module(f"distir_relax.kernels.{module}"), str(function))
    operands, targets = ([from_dlpack(x) for x in part] for part in (tensors[:count], tensors[count:]))
    results = kernel(*operands, **json.loads(str(options)))
    for target, result in zip(targets, results if isinstance(results, tuple) else (results,), strict=True):
        target.copy_(result)


def _call_packed(*arguments: Any) -> Any:
    """See `distir_relax.lowering.emit.relax.CALL_PACKED`."""
    from torch.utils.dlpack import from_dlpack

    *operands, index = arguments
    try:
        results = _current.packed[index](*map(from_dlpack, operands))
        is_one = not isinstance(results, (tuple, list))
        return _shared(results) if is_one else [_shared(result) for result in results]
    except BaseException as error:
        _current.error = error
        raise


def _shared(x: torch.Tensor) -> Any:
    """Return the tensor of TVM in the memory of one of torch; TVM takes no views of others, such as columns."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(x.contiguous()) if x.numel() else _to_tvm(x)


def _packed(name: str) -> Callable[..., None]:
    """The packed function of a communicator's method: see `distir_relax.lowering.emit.relax`."""

    def call(*arguments: Any) -> None:
        from torch.utils.dlpack import from_dlpack

        *operands, _token, _step, attributes, sizes, result, _next = arguments
        try:
            method = getattr(_current.comm, name)
            names = _parameters(type(_current.comm), name)
            given = dict(_attributes(attributes, tuple(sizes)))
            if "distance" in given:
                given["peer"] = _current.comm.rank + given["distance"]
            options = {key: value for key, value in given.items() if key in names}
            target = from_dlpack(result)
            values = [from_dlpack(x) for x in operands]
            if "out" in names:
                method(*values, **options, out=target)
            else:
                received = method(*values, **options)
                if received is not None:
                    target.copy_(received)
        except BaseException as error:
            _current.error = error
            raise

    return call


def _parameters(kind: type[Any], name: str) -> frozenset[str]:
    if (kind, name) not in _parameter_names:
        _parameter_names[kind, name] = frozenset(inspect.signature(getattr(kind, name)).parameters)
    return _parameter_names[kind, name]


_parameter_names: dict[tuple[type[Any], str], frozenset[str]] = {}


@lru_cache(maxsize=4096)
def _attributes(text: str, sizes: tuple[int, ...]) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(text, object_hook=lambda item: _with_size(item, sizes))
    return loaded


def _with_size(item: dict[str, Any], sizes: tuple[int, ...]) -> Any:
    return sizes[item[SIZE_KEY]] if item.keys() == {SIZE_KEY} else item


def _to_tvm(x: torch.Tensor) -> Any:
    """Return a copy in memory aligned as TVM's code expects."""
    import tvm_ffi
    from torch.utils.dlpack import from_dlpack

    # Of an empty tensor torch has other strides than TVM.
    allocate = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")
    dtype = tvm_ffi.dtype(str(x.dtype).removeprefix("torch."))
    target = allocate(tvm_ffi.Shape(x.shape), dtype, tvm_ffi.device("cpu", 0), None)
    from_dlpack(target).copy_(x)
    return target


def _threads(ranks: int) -> int:
    """Return this rank's share of the node's cores, unless OMP_NUM_THREADS is set; TVM's pool gets as many."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    count = int(setting) if setting.isdigit() and int(setting) > 0 else max(1, len(os.sched_getaffinity(0)) // ranks)
    limit_threads(count)
    return count
