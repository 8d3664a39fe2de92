"""Repeated blocks of a model become one function, called with the weights of each.

Which ops are a block is told by the modules of the model (torch), by the names of nodes (ONNX), or by the ops alone
(see `repeats`). Blocks are one function when they are equal: the same ops in the same order with the same attributes
and types, on operands that are the same to them. Sizes, dtypes and annotations are part of that, so a layer that is cut
otherwise than its neighbours stays apart. A block is never left and entered again: what it computes depends on nothing
outside that depends on it.

The places of its ops are told from its own: ``mlp, model.py:7`` in the block ``layers.1``. Where blocks have no names,
they are the places of the first.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.frontends.imported import Frame
from distir_relax.frontends.repeats import attributes, repeats
from distir_relax.ir import CALL, Function, Input, Module, Op, Output, Value, fresh_name, inside

LEAST_OPS = 4
"""Blocks of fewer ops stay where they are."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The pass: global stage in and out, repeated blocks as functions. `scopes` are those of the imported model."""

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    scopes: Mapping[str, tuple[Frame, ...]] = field(default_factory=dict, repr=False)

    def run(self, module: Module) -> Module:
        """The module with its repeated blocks as functions; itself where it has none, or has functions already."""
        main = module.main
        if len(module.functions) > 1:
            return module
        found = _named(main, self.scopes) if self.scopes else _unnamed(main)
        users = _users(main)
        functions, calls = _functions(main, [_taken_out(main, users, group) for group in found])
        ordered = _ordered(main, calls)
        if not calls or ordered is None:
            return module
        return replace(module, functions=(replace(main, ops=ordered), *functions))


@dataclass(frozen=True, slots=True)
class _Block:
    """The ops of one block, by number; `path` is that of its module, `kind` what it is called after."""

    numbers: tuple[int, ...]
    path: str
    kind: str


def _named(main: Function, scopes: Mapping[str, tuple[Frame, ...]]) -> list[list[_Block]]:
    """The groups of equal blocks among the modules whose paths differ in numbers, outermost first."""
    frames = [scopes.get(op.results[0].name, ()) for op in main.ops]
    users = _users(main)
    free = set(range(len(main.ops)))
    groups: list[list[_Block]] = []
    for depth in range(max(map(len, frames), default=0)):
        families: dict[tuple[str, str], dict[Frame, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number in sorted(free):
            if depth < len(frames[number]):
                frame = frames[number][depth]
                families[_NUMBER.sub("*", frame.path), frame.kind][frame].append(number)
        for instances in families.values():
            blocks = [_Block(tuple(ns), frame.path, frame.kind) for frame, ns in instances.items()]
            for group in _equal(main, users, blocks):
                groups.append(group)
                free.difference_update(n for block in group for n in block.numbers)
    return groups


_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")


def _unnamed(main: Function) -> list[list[_Block]]:
    users = _users(main)
    runs = [[_Block(tuple(numbers), "", "block") for numbers in run] for run in repeats(main, LEAST_OPS)]
    return [group for run in runs for group in _equal(main, users, run)]


def _equal(main: Function, users: Mapping[str, list[int]], blocks: Sequence[_Block]) -> list[list[_Block]]:
    """The groups of at least two blocks that are equal."""
    if len(blocks) < 2:
        return []
    groups: dict[object, list[_Block]] = defaultdict(list)
    for block in blocks:
        if len(block.numbers) >= LEAST_OPS and _is_whole(main, users, block):
            groups[_form(main, block)].append(block)
    return [group for group in groups.values() if len(group) > 1]


def _users(main: Function) -> dict[str, list[int]]:
    users: dict[str, list[int]] = defaultdict(list)
    for number, op in enumerate(main.ops):
        for value in op.operands:
            users[value.name].append(number)
    return users


def _is_whole(main: Function, users: Mapping[str, list[int]], block: _Block) -> bool:
    """Whether nothing between the block's ops both depends on them and is used by them."""
    mine = set(block.numbers)
    behind: set[int] = set()
    for number in range(block.numbers[0], block.numbers[-1] + 1):
        if number in mine and number in behind:
            return False
        if number in mine or number in behind:
            after = {u for v in main.ops[number].results for u in users.get(v.name, ())}
            behind |= after if number in behind else after - mine
    return True


def _form(main: Function, block: _Block) -> object:
    """Equal for equal blocks: ops with attributes and types, operands as numbers in the order of their first use."""
    places: dict[str, int] = {}
    rows = []
    for number in block.numbers:
        op = main.ops[number]
        operands = tuple((places.setdefault(v.name, len(places)), v.type) for v in op.operands)
        results = tuple((places.setdefault(v.name, len(places)), v.type) for v in op.results)
        rows.append((op.name, operands, results, attributes(op)))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class _Group:
    """Equal blocks with what each takes and gives: values in the order of their first use, and of their ops."""

    blocks: Sequence[_Block]
    operands: Sequence[Sequence[Value]]
    results: Sequence[Sequence[Value]]


def _taken_out(main: Function, users: Mapping[str, list[int]], blocks: Sequence[_Block]) -> _Group:
    outputs = {o.value.name for o in main.outputs}
    operands, made, left = [], [], set()
    for block in blocks:
        ops, mine = [main.ops[n] for n in block.numbers], set(block.numbers)
        results = [v for op in ops for v in op.results]
        own = {v.name for v in results}
        operands.append(list(dict.fromkeys(v for op in ops for v in op.operands if v.name not in own)))
        made.append(results)
        # What one of the blocks gives to others, all do: so they are one function.
        left |= {
            i for i, v in enumerate(results) if v.name in outputs or any(u not in mine for u in users.get(v.name, ()))
        }
    return _Group(blocks, operands, [[results[i] for i in sorted(left)] for results in made])


def _functions(main: Function, groups: Sequence[_Group]) -> tuple[list[Function], dict[int, tuple[_Block, Op]]]:
    """The function of each group, and the call that stands for each block, by the number of its first op."""
    roles = {item.value.name: item.role for item in main.inputs}
    names = {main.name}
    functions = []
    calls: dict[int, tuple[_Block, Op]] = {}
    for group in groups:
        first = group.blocks[0]
        name = fresh_name(_function_name(first), names)
        kinds = [{roles.get(v.name, "input") for v in column} for column in zip(*group.operands, strict=True)]
        taken = [kind.pop() if len(kind) == 1 else "input" for kind in kinds]
        # What is computed first, then weights.
        order = sorted(range(len(taken)), key=lambda i: taken[i] != "input")
        arguments = [[operands[i] for i in order] for operands in group.operands]
        functions.append(_function(main, name, replace(group, operands=arguments), [taken[i] for i in order]))
        for block, operands, results in zip(group.blocks, arguments, group.results, strict=True):
            place = _place(main.ops[block.numbers[0]].location, block.path)
            call = Op(CALL, tuple(operands), tuple(results), {"callee": name}, place)
            calls[block.numbers[0]] = (block, call)
    return functions, calls


def _function(main: Function, name: str, group: _Group, roles: Sequence[str]) -> Function:
    """The function of a group, as its first block has it, with names and places of its own."""
    block = group.blocks[0]
    taken: set[str] = set()
    values: dict[str, Value] = {}

    def own(value: Value, name: str = "") -> Value:
        values[value.name] = Value(fresh_name(name or _local_name(value.name, block.path), taken), value.type)
        return values[value.name]

    stored = {item.value.name for item in main.inputs if item.role != "input"}
    inputs = tuple(
        Input(own(v, "" if v.name in stored else "x"), role) for v, role in zip(group.operands[0], roles, strict=True)
    )
    ops = []
    for number in block.numbers:
        op = main.ops[number]
        operands = tuple(values[v.name] for v in op.operands)
        results = tuple(map(own, op.results))
        ops.append(Op(op.name, operands, results, op.attrs, inside(block.path, op.location)))
    given = [values[v.name] for v in group.results[0]]
    return Function(name, inputs, tuple(ops), tuple(Output(v.name, v) for v in given))


def _local_name(name: str, path: str) -> str:
    """A value's name without the path of its block, and without the number that told it from those of other blocks."""
    prefix = re.sub(r"[^\w.]+", ".", path).strip(".") + "."
    if path and name.startswith(prefix):
        return name.removeprefix(prefix)
    return re.sub(r"(?<=[^\W\d])_\d+$", "", name)


def _function_name(block: _Block) -> str:
    """``LlamaDecoderLayer`` is ``llama_decoder_layer``; without a class, ``/model/layers.0`` is ``layer``."""
    words = block.kind or next((w for w in reversed(re.split(r"[./]", block.path)) if w.isidentifier()), "block")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()
    name = re.sub(r"\W", "_", name)
    return name if block.kind or not name.endswith("s") else name[:-1] or "block"


def _place(location: str, path: str) -> str:
    """The place of a block, from that of one of its ops."""
    file, found, _ = location.partition(f":{path}/")
    return f"{file}:{path}" if path and found else path or location


def _ordered(main: Function, calls: Mapping[int, tuple[_Block, Op]]) -> tuple[Op, ...] | None:
    """The ops of `main` with calls for blocks, each after what it needs; None where blocks need each other."""
    owner = {n: first for first, (block, _) in calls.items() for n in block.numbers}
    nodes = {n: op for n, op in enumerate(main.ops) if n not in owner}
    nodes |= {first: call for first, (_, call) in calls.items()}
    made = {v.name: n for n, op in nodes.items() for v in op.results}
    waits = {n: {made[v.name] for v in op.operands if v.name in made} for n, op in nodes.items()}
    after: dict[int, list[int]] = defaultdict(list)
    for number, needs in waits.items():
        for need in needs:
            after[need].append(number)
    ready = [n for n, needs in waits.items() if not needs]
    heapq.heapify(ready)
    ordered: list[Op] = []
    for number in _drain(ready, waits, after):
        ordered.append(nodes[number])
    return tuple(ordered) if len(ordered) == len(nodes) else None


def _drain(ready: list[int], waits: dict[int, set[int]], after: Mapping[int, list[int]]) -> Iterator[int]:
    """The numbers that are ready, lowest first, and those that become so."""
    while ready:
        number = heapq.heappop(ready)
        yield number
        for other in after.get(number, ()):
            waits[other].discard(number)
            if not waits[other]:
                heapq.heappush(ready, other)
