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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle
from distir_relax.errors import RunError
from distir_relax.kernels.indices import checked
from distir_relax.kernels.isolated_calls import IsolatedCallError
from distir_relax.kernels.native.machine_code import limit_threads
from distir_relax.kernels.packing import PackedLinear, pack_linear
from distir_relax.lowering.emit.relax_namespace import CALL_KERNEL, CHECK_INDICES, SIZE_KEY
from distir_relax.ops import Trait, entries
from distir_relax.runtime.backends.torch import TorchProgram
from distir_relax.runtime.backends.torch import load as load_by_torch
from distir_relax.runtime.backends.tvm.hoist_constants import CALL_PRODUCT, Product
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
    inputs = [i for i, name in enumerate(program.arguments) if name not in weights_by_name]
    try:
        from distir_relax.runtime.backends.tvm.compile import ProgramText, compile_program

        text = ProgramText(bundle.stage("ranked"), program.name, manifest.fast_math)
        compiled = compile_program(text, inputs, _threads(comm.local_size))
    except ImportError as missing:
        raise RunError(f"TVM cannot be imported: {missing}", hint="pip install apache-tvm") from None
    except IsolatedCallError as crash:
        warnings.warn(f"rank {rank} runs by torch: TVM's compiler failed, {crash}", RuntimeWarning, stacklevel=2)
        return load_by_torch(bundle, rank, comm, device)
    weights = [name for name in program.arguments if name in weights_by_name]
    remaining = [program.arguments[i] for i in inputs]
    sources = [name if name in state else names.index(name) for name in remaining]
    return TvmProgram(compiled, comm, lambda i: weights_by_name.pop(weights[i]), sources, state)


class TvmProgram:
    """A `RankProgram` with its own virtual machine; the executable may be shared with other ranks.

    `read` returns a weight of this rank by its place among those in the program's arguments, and is called once for
    each, before those of the next preparation. `sources` are the other arguments, in their order: the index of an
    input, or the name of a state.
    """

    def __init__(
        self, compiled: Compiled, comm: Communicator, read: Callable[[int], torch.Tensor],
        sources: Sequence[int | str], state: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        from torch.utils.dlpack import from_dlpack

        for name in compiled.calls:
            _register(name)
        _register_kernels()
        self.steps = compiled.steps
        self._comm = comm
        # TVM reuses the memory of dead values, so sends must be copied.
        comm.copies_sends = True
        self._compiled = compiled
        self._sources = sources
        # It loads TVM's library, in whose memory tensors are.
        self._machine = _start_machine(compiled.executable)
        self._state = {name: _to_tvm(tensor) for name, tensor in state.items()}
        self.state = {name: from_dlpack(tensor) for name, tensor in self._state.items()}
        self._weights, self._products = self._prepare(read)
        self._main = self._machine["main"]
        self.held = memory([*map(from_dlpack, self._weights), *(product.weight for product in self._products)])

    def _prepare(self, read: Callable[[int], torch.Tensor]) -> tuple[list[Any], tuple[PackedLinear, ...]]:
        """Return the tensors that `main` takes besides its inputs, and the packed products."""
        import torch

        compiled = self._compiled
        main: dict[int, Any] = {}
        prepared: dict[int, Any] = {}
        packed: dict[int, PackedLinear] = {}
        for group in compiled.preparations:
            # What is only packed needs no copy in TVM's memory.
            tensors = {i: read(i) for i in dict.fromkeys(group.weights)}
            main.update({i: _to_tvm(x) for i, x in tensors.items() if i in compiled.main_weights})
            if group.function:
                taken = [main[i] if i in main else _to_tvm(tensors.pop(i)) for i in group.weights]
                results = deque(_call(self._comm, (), self._machine[group.function], taken))
                del taken
            else:
                results = deque(tensors[i] for i in group.weights)
            del tensors
            prepared.update({i: results.popleft() for i in group.prepared})
            with torch.inference_mode():
                packed.update({i: _pack(results, compiled.products[i]) for i in group.products})
        weights = [main[i] if i in main else _to_tvm(read(i)) for i in compiled.main_weights]
        return [*weights, *map(prepared.get, sorted(prepared))], tuple(packed[i] for i in sorted(packed))

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int] = MappingProxyType({})) -> list[torch.Tensor]:
        """See `RankProgram`."""
        import torch
        import tvm_ffi
        from torch.utils.dlpack import from_dlpack

        arguments = [_to_tvm(inputs[i]) if isinstance(i, int) else self._state[i] for i in self._sources]
        names = self._compiled.sizes
        shape = [tvm_ffi.Shape([sizes[name] for name in names])] if names else []
        with torch.inference_mode():
            results = _call(self._comm, self._products, self._main, [*arguments, *self._weights, *shape])
        return [from_dlpack(results[i]) for i in range(self._compiled.outputs)]


def _start_machine(executable: Any) -> Any:
    """Return a virtual machine as `relax.VirtualMachine` starts it, without TVM's Python modules."""
    cpu, device, pooled_allocator = 1, 0, 2
    machine = executable["vm_load_executable"]()
    machine["vm_initialization"](cpu, device, pooled_allocator)
    return machine


def _pack(factors: deque[Any], product: Product) -> PackedLinear:
    """Pack the factors of a product, which are removed from the front."""
    from torch.utils.dlpack import from_dlpack

    weight = from_dlpack(factors.popleft())
    bias = from_dlpack(factors.popleft()) if product.biased else None
    return pack_linear(weight if product.transposed else weight.t(), bias, rows=product.rows)


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
"""Per thread: `comm` and `products`, those of the running program, and `error`, the exception of a packed function."""


def _call(comm: Communicator, products: Sequence[PackedLinear], function: Any, arguments: Sequence[Any]) -> Any:
    before = getattr(_current, "comm", None), getattr(_current, "products", ())
    _current.comm, _current.products, _current.error = comm, products, None
    try:
        return function(*arguments)
    except Exception as wrong:
        # TVM changes the type of an exception that passes through it: raise the original.
        raise (_current.error or wrong) from None
    finally:
        # An exception keeps the tensors of its frames alive.
        (_current.comm, _current.products), _current.error = before, None


def _register(name: str) -> None:
    import tvm_ffi

    if tvm_ffi.get_global_func(f"distir.{name}", allow_missing=True) is None:
        tvm_ffi.register_global_func(f"distir.{name}", _packed(name))


def _register_kernels() -> None:
    import tvm_ffi

    if tvm_ffi.get_global_func(CHECK_INDICES, allow_missing=True) is None:
        tvm_ffi.register_global_func(CHECK_INDICES, _check_indices)
        tvm_ffi.register_global_func(CALL_KERNEL, _call_kernel)
        tvm_ffi.register_global_func(CALL_PRODUCT, _call_product)


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


def _call_product(x: Any, index: int) -> Any:
    """See `distir_relax.runtime.backends.tvm.hoist_constants`."""
    import tvm_ffi
    from torch.utils.dlpack import from_dlpack

    try:
        result = _current.products[index](from_dlpack(x))
        return tvm_ffi.from_dlpack(result) if result.numel() else _to_tvm(result)
    except BaseException as error:
        _current.error = error
        raise


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
