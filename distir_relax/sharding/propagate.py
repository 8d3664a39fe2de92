"""From annotations to a layout of every value: the global stage in, the sharded stage out.

Two steps. `spread` carries the annotations over the factors of ops, forwards and backwards. Then, op by op in program
order and mesh axis by mesh axis, each op gets the strategy that moves the fewest bytes: it is split along one of its
factors, or computed in whole by every device. Where an operand lies otherwise a `redistribute` is put before the op; a
pending reduction is made explicit as an ``I`` value with its `redistribute` behind (the RFC's legalisation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from distir_relax.errors import AnnotationError
from distir_relax.ir import (
    Cut,
    DeviceMesh,
    DTensorType,
    Function,
    Input,
    Module,
    Op,
    Output,
    Partial,
    Placement,
    R,
    Shard,
    Value,
    block_bounds,
    fresh_name,
    print_placements,
)
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, lookup, tensor_type
from distir_relax.sharding.cuts import balanced, cut_of, nested
from distir_relax.sharding.factors import Atom, Factoring, Slot, factorize
from distir_relax.sharding.redistribute import cost
from distir_relax.sharding.spread import Split, Wanted, is_annotation, spread


@dataclass(frozen=True, slots=True)
class Propagation:
    """What `propagate` found: the sharded module, why each value lies as it does, and gathers nobody asked for."""

    module: Module
    reasons: dict[str, str]
    gathers: tuple[Gather, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """A split tensor that is gathered unasked: the value gathered, its size in bytes, and the message for the user."""

    value: str
    bytes: int
    message: str


@dataclass(frozen=True, slots=True)
class Propagate:
    """The pass: global stage in, sharded stage out. `mesh` is used when the module names none."""

    mesh: DeviceMesh | None = None

    def run(self, module: Module, factoring: Factoring | None = None) -> Propagation:
        """Lay out every value of the module's entry function.

        `factoring` is that of the entry function, for a caller who has it: it does not depend on what annotations ask
        for, so one does for many annotations of the same program. Raises `AnnotationError` when there is no mesh or when annotations contradict each other, `PlacementError` when
        one does not fit its tensor.
        """
        mesh = self.mesh or (module.meshes[0] if module.meshes else None)
        if mesh is None:
            raise AnnotationError(
                "the model has no annotation and no mesh was given",
                hint="mark a tensor with annotate_sharding(tensor, mesh, placement), or pass mesh= and shardings=",
            )
        factoring = factoring or factorize(module.main)
        wanted = spread(module.main, factoring, mesh)
        layout = _Layout(module.main, factoring, wanted, mesh)
        function = layout.run()
        reasons = {name: "; ".join(_reasons(wanted, name, len(mesh.shape))) for name in wanted.splits}
        sharded = Module("sharded", (function,), (mesh,))
        return Propagation(sharded, {k: v for k, v in reasons.items() if v}, tuple(layout.gathers))


def _reasons(wanted: Wanted, name: str, axes: int) -> list[str]:
    return [wanted.reasons[name, axis] for axis in range(axes) if (name, axis) in wanted.reasons]


Placed = tuple[Placement, ...]

# How many operations a device does in the time it takes to send a byte: about 20 for two processes of a CPU, 300 and
# more for GPUs on fast links. Only the order of magnitude matters: it decides between computing again and sending.
_FLOPS_PER_BYTE = 100.0


@dataclass(slots=True)
class _Layout:
    function: Function
    factoring: Factoring
    wanted: Wanted
    mesh: DeviceMesh
    values: dict[str, Value] = field(default_factory=dict)
    """The sharded value that stands for each global value."""
    converted: dict[tuple[str, Placed], Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    shards: dict[tuple[str, int, Split], Shard] = field(default_factory=dict)
    """What was found by `_shard`: a class is cut once."""

    def run(self) -> Function:
        self.names = {i.value.name for i in self.function.inputs}
        self.names |= {v.name for op in self.function.ops for v in op.results}
        inputs = []
        for item in self.function.inputs:
            value = self._value(item.value, self._wish(item.value))
            self.values[item.value.name] = value
            inputs.append(Input(value, item.role, item.location))
        for number, op in enumerate(self.function.ops):
            if is_annotation(op):
                self._annotation(op)
            else:
                self._place(number, op)
        outputs = tuple(Output(o.name, self.values[o.value.name]) for o in self.function.outputs)
        return Function(self.function.name, tuple(inputs), tuple(self.ops), outputs)

    def _annotation(self, op: Op) -> None:
        source, target = self.values[op.operands[0].name], self._wish(op.results[0])
        self.values[op.results[0].name] = self._convert(source, target, op.results[0].name, op.location)

    def _wish(self, value: Value) -> Placed:
        splits = self.wanted.splits[value.name]
        return tuple(R if s is None else self._shard(value, axis, s) for axis, s in enumerate(splits))

    def _shard(self, value: Value, axis: int, split: Split) -> Shard:
        key = (value.name, axis, split)
        if key not in self.shards:
            slot = (value.name, *split)
            outer, inner = self.factoring.around(slot)
            self.shards[key] = Shard(split[0], cut_of(self._units(axis, slot), outer, inner))
        return self.shards[key]

    def _units(self, axis: int, slot: Slot) -> Cut:
        owner = self.factoring.classes[slot]
        units = self.wanted.units[axis]
        if owner not in units:
            units[owner] = Cut.of(*balanced(self.factoring.size(slot), self.mesh.shape[axis]))
        return units[owner]

    def _place(self, number: int, op: Op) -> None:
        """Choose the op's strategy along each mesh axis, then write the op with what must come before and after."""
        operands = [self.values[v.name] for v in op.operands]
        needs: list[list[Placement]] = [[] for _ in operands]
        gives: list[list[Placement]] = [[] for _ in op.results]
        wishes = [self._wish(v) for v in op.results]
        work = self._work(op)
        for axis in range(len(self.mesh.shape)):
            need, give = self._strategy(number, op, axis, work, operands, wishes, needs, gives)
            for have, placement in zip((*needs, *gives), (*need, *give), strict=True):
                have.append(placement)
        moved = tuple(
            self._convert(value, tuple(need), f"{value.name}.{op.name.rsplit('.', 1)[-1]}", op.location, unasked=True)
            for value, need in zip(operands, needs, strict=True)
        )
        results, after = [], []
        for value, give, wish in zip(op.results, gives, wishes, strict=True):
            pending = [isinstance(p, Partial) for p in give]
            if not any(pending):
                results.append(self._value(value, tuple(give)))
                self.values[value.name] = results[-1]
                continue
            partial = replace(self._value(value, tuple(give)), name=fresh_name(f"{value.name}.partial", self.names))
            results.append(partial)
            target = tuple(
                g if not p else w if _divides(w, give) else R for g, w, p in zip(give, wish, pending, strict=True)
            )
            after.append((partial, value, target))
        self.ops.append(Op(op.name, moved, tuple(results), op.attrs, op.location))
        for partial, value, target in after:
            self.values[value.name] = self._convert(partial, target, value.name, op.location)

    def _strategy(
        self,
        number: int,
        op: Op,
        axis: int,
        work: float,
        operands: list[Value],
        wishes: list[Placed],
        needs: list[list[Placement]],
        gives: list[list[Placement]],
    ) -> tuple[list[Placement], list[Placement]]:
        """The placements that the op needs and gives along one axis; `work` is what it computes.

        Where all operands lie split along one factor already, the op is split along it: gathering would undo what the
        annotations asked for. Otherwise the least time wins, bytes moved and operations done; ties favour a split.
        """
        tensors = (*op.operands, *op.results)
        count = len(operands)
        have = [_placements(v)[axis] for v in operands]
        positional = lookup(op.name, op.location).positional
        best: tuple[tuple[bool, float], list[Placement], list[Placement]] | None = None
        candidates: list[Atom | None] = [a for a in self.factoring.atoms[number] if a.kind != BLOCKED]
        wished = [*have, *(wish[axis] for wish in wishes)]
        for atom in [*candidates, None]:
            if atom and not self._is_useful(atom, axis, tensors, wished):
                continue
            placed: list[Placement] = []
            for t, value in enumerate(tensors):
                place = atom.places[t] if atom else None
                if place is not None:
                    placed.append(self._shard(value, axis, place))
                elif atom and atom.kind not in (PARALLEL, WINDOW) and t >= count:
                    placed.append(Partial(atom.kind))
                else:
                    placed.append(R)
            settled = (*needs, *gives)
            if not all(_divides(p, before) for p, before in zip(placed, settled, strict=True)):
                continue
            if atom and (atom.name in positional or atom.kind == WINDOW) and not self._is_blocks(
                tensors, placed, settled
            ):
                continue
            moves = sum(self._cost(v, p, n, axis) for v, p, n in zip(operands, have, placed[:count], strict=True))
            if atom and atom.kind == WINDOW:
                moves += sum(
                    atom.reach * tensor_type(v).bytes / atom.size
                    for v, place in zip(op.operands, atom.places, strict=False)
                    if place is not None
                )
            apart = not (atom and have == placed[:count] and any(isinstance(p, Shard) for p in have))
            for value, give, wish in zip(op.results, placed[count:], wishes, strict=True):
                moves += self._cost(value, give, wish[axis], axis)
            rank = (apart, moves + work / (self.mesh.shape[axis] if atom else 1))
            if best is None or rank < best[0]:
                best = (rank, placed[:count], placed[count:])
        assert best is not None
        return best[1], best[2]

    @staticmethod
    def _work(op: Op) -> float:
        """The op's computation, as the bytes that could be sent in the time."""
        operands, results = [tensor_type(v) for v in op.operands], [tensor_type(v) for v in op.results]
        flops = lookup(op.name, op.location).flops
        done = flops(operands, op.attrs, results) if flops else float(sum(t.elements for t in results))
        return done / _FLOPS_PER_BYTE

    def _is_useful(self, atom: Atom, axis: int, tensors: Sequence[Value], wished: Sequence[Placement]) -> bool:
        """Whether some operand lies split along the atom already, or some result is to."""
        return any(
            place is not None and isinstance(p, Shard) and p.dim == place[0] and p == self._shard(value, axis, place)
            for place, p, value in zip(atom.places, wished, tensors, strict=True)
        )

    def _is_blocks(
        self, tensors: Sequence[Value], placed: Sequence[Placement], settled: Sequence[Sequence[Placement]]
    ) -> bool:
        """Whether each device holds one block of every split dim, in order, after the axes that are `settled`."""
        return all(
            block_bounds([*before, p], p.dim, tensor_type(v).shape[p.dim], self.mesh.shape) is not None
            for v, p, before in zip(tensors, placed, settled, strict=True)
            if isinstance(p, Shard)
        )

    def _cost(self, value: Value, source: Placement, target: Placement, axis: int) -> float:
        if source == target:
            return 0.0
        kind = value.type
        size = kind.tensor.bytes if isinstance(kind, DTensorType) else tensor_type(value).bytes
        return cost(source, target, self.mesh.shape[axis], size)

    def _convert(self, value: Value, target: Placed, name: str, where: str, unasked: bool = False) -> Value:
        """`value` laid out as `target`; a conversion nobody asked for gets a name of its own, else it is `name`."""
        have = _placements(value)
        if have == target:
            return value
        key = (value.name, target)
        if key not in self.converted:
            kind = value.type
            assert isinstance(kind, DTensorType)
            result = Value(fresh_name(name, self.names) if unasked else name, replace(kind, placements=target))
            if unasked and any(isinstance(h, Shard) and t == R for h, t in zip(have, target, strict=True)):
                message = (
                    f"{where or 'the program'}: %{value.name} ({print_placements(have)}) is gathered, "
                    f"{kind.tensor.bytes:,} bytes, because {name.rsplit('.', 1)[-1]} needs the whole of a split dim"
                )
                self.gathers.append(Gather(result.name, kind.tensor.bytes, message))
            self.ops.append(Op("redistribute", (value,), (result,), {"placements": print_placements(target)}, where))
            self.converted[key] = result
        return self.converted[key]

    def _value(self, value: Value, placements: Placed) -> Value:
        kind = tensor_type(value)
        return Value(value.name, DTensorType(kind.shape, kind.dtype, placements))


def _divides(placement: Placement, others: Sequence[Placement]) -> bool:
    """Whether a split divides each part that `others` leave of its dim by itself; anything else does no harm."""
    if not isinstance(placement, Shard) or placement.cut is None:
        return True
    cuts = (p.cut for p in others if isinstance(p, Shard) and p.dim == placement.dim)
    return all(cut is not None and nested(cut, placement.cut) for cut in cuts)


def _placements(value: Value) -> Placed:
    assert isinstance(value.type, DTensorType)
    return value.type.placements
