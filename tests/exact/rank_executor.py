"""Execution of all ranks' programs in one process, on tensors of any kind: each rank is a thread, one at a time runs.

The communication is written from its description in `distir_relax.runtime.communicator`, with torch's ops on tensors.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distir_relax.ir import Function, Module, Op, Value, inline
from distir_relax.layout import DeviceMesh
from distir_relax.ops import evaluate
from distir_relax.ops.table.dispatch import type_of


class Stuck(Exception):
    """All ranks wait for each other, or ranks of a group do different communications."""


def execute_ranks(ranked: Module, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run each rank's program on its inputs by value name; return the outputs of each by output name.

    Raises Stuck if ranks wait forever, and what a rank raises.
    """
    module = inline(ranked)
    functions = {function.name: function for function in module.functions}
    world = _World(len(module.ranks))
    results: list[dict[str, Any]] = [{} for _ in module.ranks]

    def run(rank: int) -> None:
        with world.turn, torch.no_grad():
            try:
                comm = Communicator(world, rank, module)
                results[rank] = run_function(functions[module.ranks[rank]], inputs[rank], comm)
            except BaseException as error:
                world.errors.append(error)
            world.running -= 1
            world.check_progress()
            world.turn.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(module.ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.errors:
        raise next((e for e in world.errors if not isinstance(e, Stuck)), world.errors[0])
    return results


def run_function(function: Function, inputs: Mapping[str, Any], comm: Any = None) -> dict[str, Any]:
    """Run a function op by op on its inputs by value name; return its outputs by output name."""
    values = {item.value.name: inputs[item.value.name] for item in function.inputs}
    for op in function.ops:
        held = [values[v.name] for v in op.operands]
        operands = tuple(Value(v.name, type_of(x)) for v, x in zip(op.operands, held, strict=True))
        found = evaluate(Op(op.name, operands, op.results, op.attrs, op.location), held, comm)
        for value, result in zip(op.results, found, strict=False):
            if result is not None and tuple(result.shape) != tuple(value.type.shape):
                raise ValueError(f"{op.name} gives {tuple(result.shape)} for %{value.name}: {value.type}")
            values[value.name] = result
    return {output.name: values[output.value.name] for output in function.outputs}


class _World:
    """The ranks' common state. A rank runs while it holds `turn`."""

    def __init__(self, ranks: int) -> None:
        self.turn = threading.Condition()
        self.running = ranks
        self.errors: list[BaseException] = []
        self.posts: dict[tuple[Any, ...], dict[int, Any]] = defaultdict(dict)
        self.sent: dict[tuple[Any, ...], Any] = {}
        self._waiting: dict[int, Callable[[], bool]] = {}

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Let other ranks run until a condition holds."""
        me = threading.get_ident()
        self._waiting[me] = is_ready
        self.check_progress()
        self.turn.wait_for(lambda: is_ready() or bool(self.errors))
        del self._waiting[me]
        if self.errors:
            raise Stuck("another rank failed")

    def check_progress(self) -> None:
        """Note an error if all ranks that run wait for messages that do not come."""
        if self._waiting and len(self._waiting) == self.running and not any(f() for f in self._waiting.values()):
            self.errors.append(Stuck("all ranks wait"))
            self.turn.notify_all()


class Communicator:
    """The communication of one rank, on tensors of any kind."""

    device = "cpu"

    def __init__(self, world: _World, rank: int, module: Module) -> None:
        self.world, self.rank, self.module = world, rank, module
        self._counts: dict[tuple[Any, ...], int] = defaultdict(int)
        self._started: dict[int, tuple[tuple[Any, ...], tuple[int, ...], Any]] = {}

    def _group(self, axis: str) -> tuple[DeviceMesh, int, tuple[int, ...]]:
        mesh = next(mesh for mesh in self.module.meshes if axis in mesh.axes)
        index = mesh.axes.index(axis)
        return mesh, index, tuple(mesh.group(self.rank, index))

    def index(self, axis: str) -> int:
        return self._group(axis)[2].index(self.rank)

    def _post(self, kind: tuple[Any, ...], axis: str, x: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        group = self._group(axis)[2]
        number = self._counts[axis, group]
        self._counts[axis, group] += 1
        key = (axis, group, number)
        posts = self.world.posts[key]
        if any(other != kind for other, _ in posts.values()):
            raise Stuck(f"ranks of {group} do different communications: {kind} and {posts}")
        # A clone: the program may change its operand while others wait.
        posts[self.rank] = (kind, x.clone() if isinstance(x, torch.Tensor) else tuple(y.clone() for y in x))
        self.world.turn.notify_all()
        return key, group

    def _all(self, key: tuple[Any, ...], group: tuple[int, ...]) -> list[Any]:
        posts = self.world.posts[key]
        self.world.wait(lambda: len(posts) == len(group))
        return [posts[rank][1] for rank in group]

    def _exchange(self, kind: tuple[Any, ...], axis: str, x: Any) -> list[Any]:
        return self._all(*self._post(kind, axis, x))

    def all_reduce(self, x: Any, axis: str, op: str, step: int) -> Any:
        return _combined(self._exchange(("all_reduce", op, step), axis, x), op)

    def all_gather(self, x: Any, axis: str, dim: int, sizes: Sequence[int], step: int) -> Any:
        parts = self._exchange(("all_gather", dim, tuple(sizes), step), axis, x)
        if [part.shape[dim] for part in parts] != list(sizes):
            raise ValueError(f"parts of {[part.shape[dim] for part in parts]}, not of {sizes}")
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Any, axis: str, dim: int, sizes: Sequence[int], op: str, step: int) -> Any:
        total = _combined(self._exchange(("reduce_scatter", dim, tuple(sizes), op, step), axis, x), op)
        return total.split(list(sizes), dim)[self.index(axis)].contiguous()

    def all_to_all(
        self, x: Any, axis: str, split_dim: int, split_sizes: Sequence[int], concat_dim: int,
        concat_sizes: Sequence[int], step: int,
    ) -> Any:  # fmt: skip
        kind = ("all_to_all", split_dim, tuple(split_sizes), concat_dim, tuple(concat_sizes), step)
        me = self.index(axis)
        return torch.cat([y.split(list(split_sizes), split_dim)[me] for y in self._exchange(kind, axis, x)], concat_dim)

    def resplit(self, x: Any, axis: str, dim: int, pieces: Sequence[Sequence[int]], step: int) -> Any:
        parts, me = self._exchange(("resplit", dim, tuple(map(tuple, pieces)), step), axis, x), self.index(axis)
        return torch.cat([y.split(list(row), dim)[me] for y, row in zip(parts, pieces, strict=True)], dim)

    def shard(self, x: Any, axis: str, dim: int, sizes: Sequence[int]) -> Any:
        return x.split(list(sizes), dim)[self.index(axis)].contiguous()

    def shard_start(self, axis: str, sizes: Sequence[int], dtype: str) -> Any:
        return torch.tensor(sum(sizes[: self.index(axis)]), dtype=getattr(torch, dtype))

    def start_all_reduce(self, x: Any, axis: str, op: str, step: int) -> Any:
        return self._start(("all_reduce", op, step), axis, x, lambda parts: _combined(parts, op))

    def start_all_gather(self, x: Any, axis: str, dim: int, sizes: Sequence[int], step: int) -> Any:
        return self._start(("all_gather", dim, tuple(sizes), step), axis, x, lambda parts: torch.cat(parts, dim))

    def start_reduce_scatter(self, x: Any, axis: str, dim: int, sizes: Sequence[int], op: str, step: int) -> Any:
        me = self.index(axis)
        kind = ("reduce_scatter", dim, tuple(sizes), op, step)
        return self._start(kind, axis, x, lambda parts: _combined(parts, op).split(list(sizes), dim)[me].contiguous())

    def start_resplit(self, x: Any, axis: str, dim: int, pieces: Sequence[Sequence[int]], step: int) -> Any:
        rows, me = tuple(map(tuple, pieces)), self.index(axis)

        def received(parts: list[Any]) -> Any:
            return torch.cat([y.split(list(row), dim)[me] for y, row in zip(parts, rows, strict=True)], dim)

        return self._start(("resplit", dim, rows, step), axis, x, received)

    def _start(self, kind: tuple[Any, ...], axis: str, x: Any, result: Callable[[list[Any]], Any]) -> Any:
        """Return a tensor of the result's shape, without its numbers, which are not there before it is finished."""
        key, group = self._post(kind, axis, x)
        name, *rest = kind
        shape = list(x.shape)
        if name == "all_gather":
            shape[rest[0]] = sum(rest[1])
        elif name == "reduce_scatter":
            shape[rest[0]] = rest[1][self.index(axis)]
        elif name == "resplit":
            shape[rest[0]] = sum(row[self.index(axis)] for row in rest[1])
        pending = x.new_zeros(shape)
        self._started[id(pending)] = (key, group, (pending, result))
        return pending

    def finish_collective(self, x: Any, step: int) -> Any:
        key, group, (_, result) = self._started.pop(id(x))
        return result(self._all(key, group))

    def send(self, x: Any, peer: int, step: int) -> Any:
        self.world.sent[self.rank, peer, step] = x.clone()
        self.world.turn.notify_all()
        return x.new_empty((0,))

    def start_send(self, x: Any, peer: int, copy: bool, step: int) -> Any:
        return self.send(x, peer, step)

    def recv(self, shape: Sequence[int], dtype: str, peer: int, step: int) -> Any:
        key = (peer, self.rank, step)
        self.world.wait(lambda: key in self.world.sent)
        x = self.world.sent.pop(key)
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"received {tuple(x.shape)} for {shape}")
        return x

    def start_recv(self, shape: Sequence[int], dtype: str, peer: int, step: int) -> Any:
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype))

    def finish_recv(self, x: Any, peer: int, step: int) -> Any:
        return self.recv(x.shape, "", peer, step)

    def rows_to_groups(
        self, x: Any, ids: Any, axis: str, sizes: Sequence[int], groups: Any, step: int, alone: bool = False
    ) -> Any:
        parts, (low, high) = self._exchange(("rows_to_groups", step), axis, x), groups[self.index(axis)]
        mine = (ids >= low) & (ids < high)
        rows = torch.cat(parts)
        return rows[mine] if alone else torch.where(mine.view(-1, *[1] * (rows.dim() - 1)), rows, 0.0)

    def rows_from_groups(self, x: Any, ids: Any, axis: str, sizes: Sequence[int], groups: Any, step: int) -> Any:
        low, high = groups[self.index(axis)]
        mine = (ids >= low) & (ids < high)
        whole = x.new_zeros((sum(sizes), *x.shape[1:]))
        whole[mine] = x if x.shape[0] != sum(sizes) else x[mine]
        parts = self._exchange(("rows_from_groups", step), axis, whole)
        return _combined(parts, "sum").split(list(sizes))[self.index(axis)].contiguous()


def _combined(parts: Sequence[Any], op: str) -> Any:
    if len({tuple(part.shape) for part in parts}) > 1:
        raise ValueError(f"parts of shapes {[tuple(part.shape) for part in parts]}")
    total = parts[0]
    for part in parts[1:]:
        total = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}[op](total, part)
    return total / len(parts) if op == "mean" else total.clone()
