"""Pairs of programs that should compute the same: the two sides of each statement of a proof, run on tensors.

============  =========================================  =========================================
statement     expected                                   found
============  =========================================  =========================================
projection    the schedule, all devices in one process   the ranks' programs, in turns
schedule      the sharded program, on whole tensors      the schedule, all devices in one process
model         the model, gradients, optimizer's step     the sharded program, on whole tensors
============  =========================================  =========================================

Ops run by their definition in the op table. `distir_relax.counterexample.model_comparison` has the last pair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from distir_relax.counterexample.result import Difference
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.interpret import interpret, run_devices, scatter
from distir_relax.interpret.distributed_executor import LocalTensors
from distir_relax.interpret.ranked_executor import run_ranks
from distir_relax.interpret.shard_tensors import reduce_pending, shard_indices
from distir_relax.ir import Attribute, DTensorType, Function, Module, Op, PlacedType, TensorType, Value, live_ops
from distir_relax.layout import Partial, Placement, Replicate
from distir_relax.ops import lookup
from distir_relax.ops.table.rank_checks import check_ranks

if TYPE_CHECKING:
    import torch

Inputs = Mapping[str, "torch.Tensor"]
"""Global tensors, by the name of an input."""

WHOLE = -1
"""The key of a tensor that is whole, in place of a rank."""

Outputs = Mapping[str, LocalTensors]
"""The tensors of each output, by name and rank."""


@dataclass(frozen=True)
class Part:
    """An output on a rank, or the whole of it, from both sides; `indices` are global ones, by dim."""

    output: str
    rank: int
    expected: torch.Tensor
    found: torch.Tensor
    indices: list[torch.Tensor] | None = None

    def at(self, position: tuple[int, ...]) -> tuple[int, ...]:
        """Return the global index of an element."""
        if self.indices is None:
            return position
        return tuple(int(index[i]) for index, i in zip(self.indices, position, strict=True))

    def position(self, index: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the position of the element with a global index; None if the rank does not have it."""
        if self.indices is None:
            return index
        places = [(own == i).nonzero().flatten().tolist() for own, i in zip(self.indices, index, strict=True)]
        return tuple(place[0] for place in places) if all(places) else None


class Comparison(ABC):
    """Two programs on the same inputs, which have fixed sizes."""

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, TensorType]:
        """The types of the global inputs that outputs depend on, by name."""

    @property
    @abstractmethod
    def programs(self) -> tuple[Module, ...]:
        """The programs that run."""

    @abstractmethod
    def expected(self, inputs: Inputs) -> Outputs:
        """Return the expected outputs. Raises `DistIRError` if the program cannot run on these inputs."""

    @abstractmethod
    def found(self, inputs: Inputs) -> Outputs:
        """Return the outputs of the other program, those that are expected. Raises as `expected` does."""

    @abstractmethod
    def only(self, output: str) -> Comparison:
        """Return the comparison of one output."""

    def indices(self, output: str, rank: int) -> list[torch.Tensor] | None:
        """Return the global indices of the elements of an output on a rank, by dim; None for local ones."""
        return None

    def difference(self, inputs: Inputs, tolerance: float) -> Difference | None:
        """Return the first element that differs by more than `tolerance` times the largest expected one, or 1.

        Elements are not compared where the expected one is not finite. It is a difference, too, if only the second
        program cannot run. Raises `DistIRError` if the first one cannot.
        """
        expected = self.expected(inputs)
        try:
            found = self.found(inputs)
        except DistIRError as error:
            return Difference(failure=f"{error.where}: {error.message}" if error.where else error.message)
        for output, locals_ in expected.items():
            parts = [
                Part(output, rank, x, found[output][rank], self.indices(output, rank)) for rank, x in locals_.items()
            ]
            for part in parts:
                wrong = _differs(part, tolerance)
                if bool(wrong.any()):
                    return _described(parts, part, tuple(wrong.nonzero()[0].tolist()))
        return None


class ScheduleComparison(Comparison):
    """A schedule against the sharded program."""

    def __init__(self, sharded: Module, distributed: Module) -> None:
        self._sharded, self._distributed = sharded, distributed
        self._whole = without_layouts(sharded)
        self._layouts = output_layouts(sharded, distributed)
        self._mesh = distributed.meshes[0]
        self._reduced = {
            name: replace(layout, placements=tuple(map(_reduced, layout.placements)))
            for name, layout in self._layouts.items()
        }
        self._ranks = {output.name: output.value.placed.devices for output in distributed.main.outputs}

    @property
    def inputs(self) -> Mapping[str, TensorType]:
        """See `Comparison`."""
        used = used_inputs(self._whole.main) | used_inputs(self._distributed.main)
        return {item.value.name: item.value.tensor for item in self._whole.main.inputs if item.value.name in used}

    @property
    def programs(self) -> tuple[Module, ...]:
        """See `Comparison`."""
        return self._whole, self._distributed

    def expected(self, inputs: Inputs) -> Outputs:
        """See `Comparison`."""
        results = run_whole(self._whole, inputs)
        parts = {name: scatter(x, self._reduced[name], self._mesh) for name, x in results.items()}
        return {name: {rank: parts[name][rank] for rank in self._ranks[name]} for name in parts}

    def found(self, inputs: Inputs) -> Outputs:
        """See `Comparison`."""
        results = run_devices(self._distributed, scattered(self._sharded, self._distributed, inputs))
        return {name: reduce_pending(x, self._layouts[name], self._mesh) for name, x in results.items()}

    def indices(self, output: str, rank: int) -> list[torch.Tensor]:
        """See `Comparison`."""
        return shard_indices(self._reduced[output], self._mesh, rank)

    def only(self, output: str) -> ScheduleComparison:
        """See `Comparison`."""
        return ScheduleComparison(only_output(self._sharded, output), only_output(self._distributed, output))


class ProjectionComparison(Comparison):
    """The ranks' programs against their schedule. Without a sharded program, every device has each input whole."""

    def __init__(self, sharded: Module | None, distributed: Module, ranked: Module) -> None:
        self._sharded, self._distributed, self._ranked = sharded, distributed, ranked
        self._layouts = {} if sharded is None else output_layouts(sharded, distributed)

    @property
    def inputs(self) -> Mapping[str, TensorType]:
        """See `Comparison`."""
        used = used_inputs(self._distributed.main).union(*map(used_inputs, self._ranked.functions))
        layouts = _input_layouts(self._sharded, self._distributed)
        return {name: _whole(layout) for name, layout in layouts.items() if name in used}

    @property
    def programs(self) -> tuple[Module, ...]:
        """See `Comparison`."""
        return self._distributed, self._ranked

    def expected(self, inputs: Inputs) -> Outputs:
        """See `Comparison`."""
        return run_devices(self._distributed, scattered(self._sharded, self._distributed, inputs))

    def found(self, inputs: Inputs) -> Outputs:
        """See `Comparison`."""
        return run_ranks(self._ranked, scattered(self._sharded, self._distributed, inputs))

    def indices(self, output: str, rank: int) -> list[torch.Tensor] | None:
        """See `Comparison`."""
        layout = self._layouts.get(output)
        return None if layout is None else shard_indices(layout, self._distributed.meshes[0], rank)

    def only(self, output: str) -> ProjectionComparison:
        """See `Comparison`."""
        sharded = None if self._sharded is None else only_output(self._sharded, output)
        ranked = _only_of_ranks(self._ranked, output)
        return ProjectionComparison(sharded, only_output(self._distributed, output), ranked)


def without_layouts(sharded: Module) -> Module:
    """Return a sharded program, inlined, as one on whole tensors, in which redistributions are left out."""
    main = sharded.main
    values: dict[str, Value] = {}
    ops: list[Op] = []
    for op in main.ops:
        operands = tuple(values.get(v.name, _plain(v)) for v in op.operands)
        if lookup(op.name, op.location).keeps_value:
            values[op.results[0].name] = operands[0]
            continue
        ops.append(replace(op, operands=operands, results=tuple(map(_plain, op.results))))
    inputs = tuple(replace(item, value=_plain(item.value)) for item in main.inputs)
    outputs = tuple(replace(o, value=values.get(o.value.name, _plain(o.value))) for o in main.outputs)
    return Module("global", (replace(main, inputs=inputs, ops=tuple(ops), outputs=outputs),))


def run_whole(program: Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Run a program on whole tensors; return its outputs by name. An input that is left out is zero."""
    given = {i.value.name: _zeros(i.value.tensor) for i in program.main.inputs if i.value.name not in inputs}
    return interpret(program, {**inputs, **given})


def scattered(sharded: Module | None, distributed: Module, inputs: Inputs) -> dict[str, LocalTensors]:
    """Return the local inputs of the devices of a schedule; one that is left out is zero."""
    locals_: dict[str, LocalTensors] = {}
    layouts = _input_layouts(sharded, distributed)
    for item in distributed.main.inputs:
        name, devices, layout = item.value.name, item.value.placed.devices, layouts[item.value.name]
        tensor = inputs[name] if name in inputs else _zeros(_whole(layout))
        if isinstance(layout, DTensorType):
            shards = scatter(tensor, layout, distributed.meshes[0])
            locals_[name] = {device: shards[device] for device in devices}
        else:
            locals_[name] = dict.fromkeys(devices, tensor)
    return locals_


def used_inputs(function: Function) -> set[str]:
    """Return the names of the inputs that outputs depend on."""
    used = {v.name for op in live_ops(function) for v in op.operands}
    used.update(output.value.name for output in function.outputs)
    return {item.value.name for item in function.inputs if item.value.name in used}


def only_output(module: Module, output: str) -> Module:
    """Return an inlined program with one output, and the ops that it depends on."""
    main = _only_function(module.main, output)
    return replace(module, functions=(replace(main, ops=live_ops(main)),))


def elements(modules: Iterable[Module]) -> int:
    """Return the number of elements of all values of programs, on all devices."""
    return sum(_elements(module, function) for module in modules for function in module.functions)


def output_layouts(sharded: Module, distributed: Module) -> dict[str, DTensorType]:
    """Return the layouts of the outputs of a schedule on its mesh, by name."""
    return {output.name: _on_mesh(output.value.dtensor, sharded, distributed) for output in sharded.main.outputs}


def _input_layouts(sharded: Module | None, distributed: Module) -> dict[str, DTensorType | PlacedType]:
    """Return the layouts of the inputs of a schedule on its mesh, by name."""
    declared = {} if sharded is None else {item.value.name: item.value.dtensor for item in sharded.main.inputs}
    found: dict[str, DTensorType | PlacedType] = {}
    for item in distributed.main.inputs:
        layout = declared.get(item.value.name)
        if sharded is not None and layout is not None:
            found[item.value.name] = _on_mesh(layout, sharded, distributed)
        else:
            found[item.value.name] = item.layout or item.value.placed
    return found


def _on_mesh(layout: DTensorType, sharded: Module, distributed: Module) -> DTensorType:
    """Return a layout on the mesh of the schedule, which may have an axis of pipeline stages besides."""
    placements = dict(zip(sharded.meshes[layout.mesh].axes, layout.placements, strict=True))
    axes = distributed.meshes[0].axes
    return replace(layout, placements=tuple(placements.get(axis, Replicate()) for axis in axes), mesh=0)


def _whole(layout: DTensorType | PlacedType) -> TensorType:
    return layout.tensor if isinstance(layout, DTensorType) else layout.local(0)


def _plain(value: Value) -> Value:
    return Value(value.name, value.dtensor.tensor)


def _reduced(placement: Placement) -> Placement:
    return Replicate() if isinstance(placement, Partial) else placement


def _zeros(kind: TensorType) -> torch.Tensor:
    import torch

    return torch.zeros(kind.shape, dtype=getattr(torch, kind.dtype))


def _only_of_ranks(ranked: Module, output: str) -> Module:
    """Return the ranks' programs with one output, and the ops that it depends on, on any rank.

    A communication is done by all ranks that take part in it: those have the same step. If the rest does not match,
    all communications are kept.
    """
    functions = tuple(_only_function(function, output) for function in ranked.functions)
    steps: set[Attribute] = set()
    while True:
        pruned = [replace(f, ops=live_ops(f, partial(_is_step, steps))) for f in functions]
        needed = {op.attrs["step"] for function in pruned for op in function.ops if "step" in op.attrs}
        if needed == steps:
            break
        steps = needed
    result = replace(ranked, functions=tuple(pruned))
    try:
        check_ranks(result)
    except VerificationError:
        return replace(ranked, functions=functions)
    return result


def _is_step(steps: Collection[Attribute], op: Op) -> bool:
    return op.attrs.get("step") in steps


def _only_function(function: Function, output: str) -> Function:
    return replace(function, outputs=tuple(o for o in function.outputs if o.name == output))


def _elements(module: Module, function: Function) -> int:
    counts: dict[int, int] = {}
    total = 0
    for value in [*(i.value for i in function.inputs), *(v for op in function.ops for v in op.results)]:
        kind = value.type
        if id(kind) not in counts:
            if isinstance(kind, PlacedType):
                counts[id(kind)] = sum(kind.local(i).elements for i in range(len(kind.devices)))
            else:
                counts[id(kind)] = kind.elements if isinstance(kind, TensorType) else value.dtensor.tensor.elements
        total += counts[id(kind)]
    return total * max(1, module.ranks.count(function.name))


def _differs(part: Part, tolerance: float) -> torch.Tensor:
    import torch

    a, b = part.found, part.expected
    if not b.is_floating_point():
        return a != b
    finite = b.isfinite()
    largest = float(b[finite].abs().max()) if bool(finite.any()) else 0.0
    return finite & (torch.where(a.isfinite(), (a - b).abs(), torch.inf) > tolerance * max(1.0, largest))


def _described(parts: Iterable[Part], part: Part, position: tuple[int, ...]) -> Difference:
    """Return the difference of an element, and the ranks that have the same wrong one."""
    index, found = part.at(position), part.found[position].item()
    ranks = [
        other.rank
        for other in parts
        if other.rank != WHOLE
        and (place := other.position(index)) is not None
        and other.expected[place].item() == part.expected[position].item()
        and repr(other.found[place].item()) == repr(found)
    ]
    return Difference(part.output, index, _real(found), _real(part.expected[position].item()), tuple(sorted(ranks)))


def _real(value: complex) -> float:
    return value.real if isinstance(value, complex) else float(value)
