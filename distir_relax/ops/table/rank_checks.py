"""Check that the programs of all ranks match: collectives agree, each send has its receive, and none deadlocks.

Communications are rendezvous: a collective of the ranks of a group along a mesh axis, or a transfer between two ranks.
Each rank reaches its rendezvous in program order, and one completes when all members have reached it::

    rank 0   all_reduce 4   all_reduce 7        valid: 4 meets 4, then 7 meets 7
    rank 1   all_reduce 4   all_reduce 7

    rank 0   all_reduce 4   all_reduce 7        rejected: 4 would meet 7
    rank 1   all_reduce 7   all_reduce 4

    rank 0   recv from 1    send to 1           rejected: deadlock
    rank 1   recv from 0    send to 0

A `send` blocks until its receiver is there, as it does for large tensors. An asynchronous send is posted: the receiver
matches it by step.

A rank executes the collectives that it starts on a lane of their own, in the order of the starts. They meet those of
other ranks' lanes only, and the rank waits for one where it finishes it::

    rank 0   start_all_reduce 4   all_reduce 5   finish 4        valid: lanes meet in 4, programs in 5
    rank 1   start_all_reduce 4   all_reduce 5   finish 4

    rank 0   start_all_reduce 4   start_all_reduce 7             rejected: on their lanes, 4 would meet 7
    rank 1   start_all_reduce 7   start_all_reduce 4

Along an axis of the mesh on which no program depends, and which no transfer leaves, ranks do the same at the same time:
the first along it stands for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from distir_relax.errors import VerificationError
from distir_relax.ir import Attribute, Function, Module, Op, TensorType, print_op
from distir_relax.ir.symbols import op_symbols, specialize_op
from distir_relax.layout import assuming, sample_values
from distir_relax.ops.table.entry import Trait
from distir_relax.ops.table.table import lookup

Members = tuple[int, ...]
"""The ranks of a rendezvous: a group along an axis in its order, or sender and receiver."""


def check_ranks(module: Module) -> None:
    """Raise `VerificationError` unless the programs of the ranks of a ranked module match.

    Along every group, all ranks have the same communications in the same order, with matching kinds, sizes and dtypes;
    every send has its receive, and every started collective is finished once, before its result is used; no rank
    deadlocks.
    """
    for function in module.functions:
        _check_started(function)
    sequences = {name: tuple(_communications(module, name)) for name in dict.fromkeys(module.ranks)}
    with assuming(module.guards):
        _Rendezvous(module, [sequences[name] for name in module.ranks]).run()


def _communications(module: Module, name: str) -> Iterator[Op]:
    """Iterate over the communication ops of a function in order, including those of functions it calls."""
    for op in module.function(name).ops:
        if op.callee:
            yield from _communications(module, op.callee)
        elif Trait.COMMUNICATES in lookup(op.name, op.location).traits:
            yield op


def _check_started(function: Function) -> None:
    """Raise `VerificationError` unless each collective that a function starts is finished once, before other uses."""
    started: dict[str, Op] = {}
    for op in function.ops:
        for value in op.operands:
            if (start := started.get(value.name)) is None:
                continue
            if op.callee or Trait.FINISHES not in lookup(op.name, op.location).traits:
                raise VerificationError(
                    f"{value} of @{function.name} is used before it is finished: {print_op(op)}",
                    op.location,
                    f"it is started by {_brief(start)}",
                )
            if op.attrs.get("step") != start.attrs.get("step"):
                raise VerificationError(
                    f"step {op.attrs.get('step')} finishes what step {start.attrs.get('step')} starts: {print_op(op)}",
                    op.location,
                )
            del started[value.name]
        if not op.callee and _starts_collective(op):
            started[op.results[0].name] = op
    if started:
        start = next(iter(started.values()))
        raise VerificationError(
            f"a collective that @{function.name} starts is never finished: {print_op(start)}", start.location
        )


@dataclass(slots=True)
class _Rendezvous:
    """Advances each rank from rendezvous to rendezvous until all have ended, or none can continue.

    Of n ranks, lane r is the program of rank r, and lane n + r has the collectives that it has started.
    """

    module: Module
    programs: Sequence[tuple[Op, ...]]
    folded: _Folded = field(init=False)
    sequences: list[Sequence[Op]] = field(init=False)
    """The ops of each lane."""
    heads: list[int] = field(init=False)
    arrived: dict[tuple[str, Members], dict[int, Op]] = field(default_factory=dict)
    """The lanes that have reached a pending rendezvous, and the op of each."""
    started: dict[tuple[int, Attribute], int] = field(default_factory=dict)
    """By rank and step, how many collectives its lane has executed when this one is complete."""
    finishing: dict[int, Op] = field(default_factory=dict)
    """The ranks that wait for their lane, and the op of each."""
    posted: dict[tuple[int, int, Attribute], deque[Op]] = field(default_factory=dict)
    """Messages in flight, by sender, receiver and step."""
    blocked: dict[tuple[int, int, Attribute], tuple[int, Op]] = field(default_factory=dict)
    """The messages that ranks are blocked on, with the rank and its op."""
    matched: set[tuple[int, ...]] = field(default_factory=set)
    """The ops, by identity, that were found to match."""

    def run(self) -> None:
        count = len(self.programs)
        self.folded = _fold(self.module, self.programs)
        self.sequences = [*self.programs, *([] for _ in self.programs)]
        self.heads = [0] * len(self.sequences)
        ready = deque(self.folded.ranks)
        while ready:
            lane = ready.popleft()
            if self.heads[lane] == len(self.sequences[lane]):
                continue
            op = self.sequences[lane][self.heads[lane]]
            if lane >= count or _is_blocking(op):
                ready.extend(self._meet(lane, op))
            elif "distance" in op.attrs:
                ready.extend(self._post(lane, op))
            elif _starts_collective(op):
                ready.extend(self._start(lane, op))
            else:
                ready.extend(self._finish(lane, op))
        if self.arrived or self.blocked or self.finishing:
            raise VerificationError(
                f"deadlock between ranks: {'; '.join(self._waiting())}",
                hint="all ranks must be projected from one schedule",
            )
        if self.posted:
            (sender, receiver, _), unmatched = next(iter(self.posted.items()))
            raise VerificationError(
                f"rank {sender} sends to rank {receiver} a message that it does not receive: {print_op(unmatched[0])}",
                unmatched[0].location,
            )

    def _meet(self, lane: int, op: Op) -> list[int]:
        """Let a lane reach a rendezvous; return the lanes that can continue."""
        count = len(self.programs)
        axis, ranks = self._rendezvous(lane % count, op)
        if axis in self.folded.axes:
            self._compare(ranks, [op] * len(ranks))
            ranks = (lane % count,)
        members = ranks if lane < count else tuple(rank + count for rank in ranks)
        ops_by_lane = self.arrived.setdefault((axis, members), {})
        ops_by_lane[lane] = op
        if len(ops_by_lane) < len(members):
            return []
        del self.arrived[axis, members]
        if axis not in self.folded.axes:
            self._compare(ranks, [ops_by_lane[member] for member in members])
        for member in members:
            self.heads[member] += 1
        finishing = [rank for rank in ranks if rank in self.finishing] if lane >= count else []
        return [*members, *finishing]

    def _start(self, rank: int, op: Op) -> list[int]:
        """Add a collective to the lane of a rank; return the lanes that can continue."""
        lane = rank + len(self.programs)
        collectives = self.sequences[lane]
        assert isinstance(collectives, list)
        collectives.append(op)
        self.started[rank, op.attrs.get("step")] = len(collectives)
        self.heads[rank] += 1
        # A lane that waits in a rendezvous has reached it already.
        return [rank, lane] if self.heads[lane] == len(collectives) - 1 else [rank]

    def _finish(self, rank: int, op: Op) -> list[int]:
        """Let a rank wait for a collective of its lane; return the lanes that can continue."""
        count = self.started.get((rank, op.attrs.get("step")))
        if count is None:
            raise VerificationError(f"nothing starts what this op finishes: {print_op(op)}", op.location)
        if self.heads[rank + len(self.programs)] < count:
            self.finishing[rank] = op
            return []
        self.finishing.pop(rank, None)
        self.heads[rank] += 1
        return [rank]

    def _post(self, rank: int, op: Op) -> Iterator[int]:
        """Post an asynchronous message; iterate over the ranks that can continue."""
        peer = self._peer(rank, op)
        starts = Trait.STARTS in lookup(op.name).traits
        sends = bool(op.operands) and starts
        # A program of somebody else may lack it.
        step = op.attrs.get("step")
        key = (rank, peer, step) if sends else (peer, rank, step)
        if not starts and not self.posted.get(key):
            self.blocked[key] = (rank, op)
            return
        self.heads[rank] += 1
        yield rank
        if sends:
            self.posted.setdefault(key, deque()).append(op)
            if key in self.blocked:
                yield self.blocked.pop(key)[0]
        elif not starts:
            sent = self.posted[key].popleft()
            if not self.posted[key]:
                del self.posted[key]
            if sent.operands[0].type != op.results[0].type:
                raise VerificationError(
                    f"rank {peer} sends {sent.operands[0].tensor} where rank {rank} receives {op.results[0].tensor}: "
                    f"{print_op(sent)}",
                    sent.location,
                )

    def _peer(self, rank: int, op: Op) -> int:
        distance = op.attrs["distance"]
        if not isinstance(distance, int) or not 0 <= rank + distance < len(self.programs) or distance == 0:
            raise VerificationError(
                f"rank {rank} cannot exchange with a rank at a distance of {distance}: {print_op(op)}", op.location
            )
        return rank + distance

    def _rendezvous(self, rank: int, op: Op) -> tuple[str, Members]:
        """Return the rendezvous of a rank for `op`: mesh axis and members."""
        if "distance" in op.attrs:
            peer = self._peer(rank, op)
            sends = Trait.TRANSFER in lookup(op.name).traits
            return "", (rank, peer) if sends else (peer, rank)
        if "axis" not in op.attrs:
            raise VerificationError(f"{op.name} names no mesh axis and no other rank: {print_op(op)}", op.location)
        axis = str(op.attrs["axis"])
        for mesh in self.module.meshes:
            if axis in mesh.axes and mesh.size == len(self.programs):
                return axis, mesh.group(rank, mesh.axes.index(axis))
        raise VerificationError(f"{op.name} is along {axis!r}, which no mesh has", op.location)

    def _compare(self, members: Members, ops: Sequence[Op]) -> None:
        key = tuple(map(id, ops))
        if key in self.matched:
            return
        first = ops[0]
        problem = _misfit_of_transfer(*ops) if "distance" in first.attrs else _misfit(ops)
        if problem:
            index, text = problem
            raise VerificationError(
                f"{text}: rank {members[0]} does {print_op(first)}, rank {members[index]} does {print_op(ops[index])}",
                first.location,
            )
        self.matched.add(key)

    def _waiting(self) -> Iterator[str]:
        """Describe a cycle or chain of waiting ranks, up to one that has ended or was named before."""
        count = len(self.programs)
        at: dict[int, tuple[Op, int]] = {receiver: (op, key[0]) for key, (receiver, op) in self.blocked.items()}
        for (_, members), ops_by_lane in self.arrived.items():
            missing = next(member for member in members if member not in ops_by_lane) % count
            # A rank whose lane waits goes on, unless it waits for its lane.
            for lane, op in ops_by_lane.items():
                if lane < count or lane - count in self.finishing:
                    at[lane % count] = self.finishing.get(lane - count, op), missing
        rank = min(at)
        visited: set[int] = set()
        while rank in at and rank not in visited:
            visited.add(rank)
            op, missing = at[rank]
            place = f" at {op.location}" if op.location else ""
            yield f"rank {rank} waits for rank {missing} in {_brief(op)}{place}"
            rank = missing
        if rank not in at:
            yield f"rank {rank} has ended"


@dataclass(frozen=True, slots=True)
class _Folded:
    """Axes along which all ranks do the same, and the first ranks along these."""

    axes: frozenset[str]
    ranks: tuple[int, ...]


def _fold(module: Module, programs: Sequence[tuple[Op, ...]]) -> _Folded:
    """Return the axes along which no program differs, and which no transfer leaves."""
    count = len(programs)
    folded = _Folded(frozenset(), tuple(range(count)))
    meshes = [mesh for mesh in module.meshes if mesh.size == count]
    if len(meshes) != 1:
        return folded
    (mesh,) = meshes
    distinct = {id(ops): ops for ops in programs}
    distances = {
        key: {d for op in ops if isinstance(d := op.attrs.get("distance"), int)} for key, ops in distinct.items()
    }
    for axis, name in enumerate(mesh.axes):
        firsts = tuple(rank for rank in folded.ranks if mesh.coordinates(rank)[axis] == 0)
        groups = (mesh.group(rank, axis) for rank in firsts)
        if not all(programs[rank] is programs[group[0]] for group in groups for rank in group):
            continue
        peers = {rank + distance for rank in firsts for distance in distances[id(programs[rank])]}
        if all(mesh.coordinates(peer)[axis] == 0 for peer in peers if 0 <= peer < count):
            folded = _Folded(folded.axes | {name}, firsts)
    return folded


def _is_blocking(op: Op) -> bool:
    """Return whether a rank executes a communication in program order, neither starting nor finishing another."""
    return lookup(op.name, op.location).traits.isdisjoint({Trait.STARTS, Trait.FINISHES})


def _starts_collective(op: Op) -> bool:
    return Trait.STARTS in lookup(op.name, op.location).traits and "distance" not in op.attrs


def _brief(op: Op) -> str:
    target = ", ".join(map(str, op.results))
    return f"{target} = {op.name}({', '.join(map(str, op.operands))})"


def _misfit_of_transfer(send: Op, receive: Op) -> tuple[int, str] | None:
    """Return an error in a matched pair of send and receive, if any, and which op has it."""
    if (Trait.TRANSFER in lookup(send.name).traits) == (Trait.TRANSFER in lookup(receive.name).traits):
        return 1, "a send meets a send"
    if send.attrs.get("step") != receive.attrs.get("step"):
        return 1, "two ranks are at different places of the schedule"
    sent, received = send.operands[0].tensor, receive.results[0].tensor
    return (1, f"{sent} is sent where {received} is received") if sent != received else None


def _misfit(ops: Sequence[Op]) -> tuple[int, str] | None:
    """Return an error in the ops of a group that meet in a collective, if any, and which op has it."""
    first = ops[0]
    semantics = lookup(first.name).semantics
    for index, op in enumerate(ops):
        if op.name != first.name:
            return index, "two collectives meet that are unlike"
        if op.attrs.get("step") != first.attrs.get("step"):
            return index, "two ranks are at different places of the schedule"
        keys = (op.attrs.keys() | first.attrs.keys()) - semantics.per_device_attrs
        if any(op.attrs.get(key) != first.attrs.get(key) for key in keys):
            return index, "a collective's attributes differ"
        if op.operands[0].tensor.dtype != first.operands[0].tensor.dtype:
            return index, "a collective's dtypes differ"
    for values in sample_values(frozenset().union(*map(op_symbols, ops))):
        numbered = [specialize_op(op, values) for op in ops] if values else ops
        types = _infer_collective(numbered)
        if types is None:
            return len(ops) - 1, "a collective's sizes do not fit each other"
        wrong = next((i for i, op in enumerate(numbered) if op.results[0].type != types[i]), None)
        if wrong is not None:
            given = f" for {', '.join(f'{name} = {n}' for name, n in values.items())}" if values else ""
            return wrong, f"a collective gives {types[wrong]}{given}"
    return None


def _infer_collective(ops: Sequence[Op]) -> list[TensorType] | None:
    """Return each rank's result of a collective, by its reference semantics; None if the operands do not match."""
    import torch

    run = lookup(ops[0].name).semantics.collective_semantics
    assert run is not None
    kinds = [op.operands[0].tensor for op in ops]
    columns = [
        [torch.empty(v.tensor.shape, dtype=getattr(torch, v.tensor.dtype), device="meta") for v in column]
        for column in zip(*(op.operands for op in ops), strict=True)
    ]
    parts = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    try:
        results = run(parts, ops[0].attrs)
    except Exception:  # any error of torch or Python for unchecked sizes and attributes
        return None
    if len(results) != len(ops):
        return None
    return [TensorType(tuple(result.shape), kind.dtype) for result, kind in zip(results, kinds, strict=True)]
