"""ONNX nodes that run graphs: If, Loop and Scan. A program has one course, so they are written out when it is read.

Which branch runs, and how often a loop does, must be known then: from constants, shapes and numbers computed from them.
The steps of a loop are blocks of a name that ends in their number. Where they are equal they become one function, as
any repeated blocks do (`frontends.outline`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distir_relax.frontends.onnx.tensors import as_array, declared_type
from distir_relax.ir import Value
from distir_relax.ops import Builder

MOST_STEPS = 10_000
"""Loops of more steps, those in them counted, are taken for some that never end."""

GRAPH_OPS = ("If", "Loop", "Scan")
"""The ops of this module."""


class Reader(Protocol):
    """What reads the nodes of a graph."""

    builder: Builder

    def run(self, nodes: Sequence[Any], scope: dict[str, Any], opsets: Mapping[str, int]) -> None:
        """Read nodes; `scope` leads from names to what they stand for, and takes the results."""

    steps: int
    """How many steps of loops were read."""

    def step(self, name: str, read: Callable[[], None]) -> None:
        """Call `read`, which reads the nodes of one step of a loop, as those of the block `name`."""

    def resolve(self, name: str, scope: Mapping[str, Any]) -> Any:
        """What a name stands for."""

    def place(self, item: Any, hint: str = "") -> Value:
        """What a name stands for, as a value."""


@dataclass(frozen=True)
class GraphNode:
    """A node that runs graphs, with its operands, and the names that its graphs may use. Raises NotImplementedError,
    with the reason, where its course is not known.
    """

    reader: Reader
    node: Any
    operands: Sequence[Any]
    scope: Mapping[str, Any]
    opsets: Mapping[str, int]

    def results(self) -> Sequence[Any]:
        """The results of the node."""
        return {"If": self._branch, "Loop": self._loop, "Scan": self._scan}[self.node.op_type]()

    def _branch(self) -> Sequence[Any]:
        if isinstance(self.operands[0], Value):
            raise NotImplementedError("which branch runs depends on data: a program has one course")
        taken = "then_branch" if bool(self.operands[0].reshape(-1)[0]) else "else_branch"
        return self._body(self._attribute(taken).g, {})

    def _loop(self) -> Sequence[Any]:
        import numpy as np

        body = self._attribute("body").g
        trips, condition = (x if x is None or isinstance(x, Value) else x.reshape(-1)[0] for x in self.operands[:2])
        if isinstance(trips, Value) or isinstance(condition, Value):
            raise NotImplementedError("how often it runs depends on data: a program has one course")
        carried, rows = list(self.operands[2:]), []
        number = 0
        while (trips is None or number < trips) and (condition is None or condition):
            given = [np.array(number, np.int64), np.array(True), *carried]
            condition, *found = self._step(number, body, given)
            if isinstance(condition, Value):
                raise NotImplementedError("whether it goes on depends on data: a program has one course")
            condition = bool(condition.reshape(-1)[0])
            carried, row = found[: len(carried)], found[len(carried) :]
            rows.append(row)
            number += 1
        infos = body.output[1 + len(carried) :]
        return [*carried, *(self._stacked([row[i] for row in rows], 0, info) for i, info in enumerate(infos))]

    def _scan(self) -> Sequence[Any]:
        if self.opsets.get("", 1) < 9:
            raise NotImplementedError("Scan of operator set 8, which has a batch dim")
        body, count = self._attribute("body").g, self._attribute("num_scan_inputs").i
        states, inputs = list(self.operands[:-count]), self.operands[-count:]
        axes = self._numbers("scan_input_axes", count)
        sequences = [
            self._slices(x, axis, bool(backwards))
            for x, axis, backwards in zip(inputs, axes, self._numbers("scan_input_directions", count), strict=True)
        ]
        rows = []
        for number, slices in enumerate(zip(*sequences, strict=True)):
            found = self._step(number, body, [*states, *slices])
            states, row = found[: len(states)], found[len(states) :]
            rows.append(row)
        infos = body.output[len(states) :]
        outputs = []
        for i, info in enumerate(infos):
            axis, backwards = (self._numbers(f"scan_output_{key}", len(infos))[i] for key in ("axes", "directions"))
            parts = [row[i] for row in rows]
            outputs.append(self._stacked(parts[::-1] if backwards else parts, axis, info))
        return [*states, *outputs]

    def _step(self, number: int, body: Any, given: Sequence[Any]) -> list[Any]:
        if self.reader.steps >= MOST_STEPS:
            raise NotImplementedError(f"the model's loops run more than {MOST_STEPS:,} times")
        found: list[Any] = []
        bound = dict(zip((item.name for item in body.input), given, strict=True))
        name = self.node.name or next(filter(None, self.node.output), self.node.op_type)
        self.reader.step(f"{name}.{number}", lambda: found.extend(self._body(body, bound)))
        return found

    def _body(self, graph: Any, bound: Mapping[str, Any]) -> list[Any]:
        inner = {**self.scope, **bound}
        for tensor in graph.initializer:
            inner[tensor.name] = as_array(tensor, self.reader.builder.location)
        self.reader.run(graph.node, inner, self.opsets)
        return [self.reader.resolve(output.name, inner) for output in graph.output]

    def _slices(self, x: Any, axis: int, backwards: bool) -> list[Any]:
        """The elements of dim `axis` of a scan input, in the order in which steps take them."""
        g = self.reader.builder
        if not isinstance(x, Value):
            found = [part.squeeze(axis) for part in _numpy().split(x, x.shape[axis], axis)]
        else:
            shape = x.tensor.shape
            axis %= len(shape)
            # One op outside the blocks: what differs from step to step would keep them apart.
            parts = g.emit("split", x, sizes=(1,) * shape[axis], axis=axis) if shape[axis] > 1 else (x,)
            found = [g.emit("reshape", part, shape=(*shape[:axis], *shape[axis + 1 :])) for part in parts]
        return found[::-1] if backwards else found

    def _stacked(self, parts: Sequence[Any], axis: int, info: Any) -> Any:
        """`parts` along a new dim `axis`."""
        np, g = _numpy(), self.reader.builder
        if not parts:
            kind = declared_type(info)
            if kind is None:
                raise NotImplementedError(f"it runs no step, and the model leaves the type of {info.name!r} open")
            return np.zeros((0, *kind.shape), kind.dtype)
        if not any(isinstance(part, Value) for part in parts):
            return np.stack(parts, axis)
        values = [self.reader.place(part, info.name) for part in parts]
        if len({value.tensor for value in values}) > 1:
            raise NotImplementedError(f"{info.name!r} has another type from step to step")
        shape = values[0].tensor.shape
        at = axis % (len(shape) + 1)
        opened = [g.emit("reshape", value, shape=(*shape[:at], 1, *shape[at:])) for value in values]
        return opened[0] if len(opened) == 1 else g.emit("concat", *opened, axis=at)

    def _attribute(self, name: str) -> Any:
        found = next((a for a in self.node.attribute if a.name == name), None)
        if found is None:
            raise ValueError(f"it has no attribute {name!r}")
        return found

    def _numbers(self, name: str, count: int) -> list[int]:
        return next((list(a.ints) for a in self.node.attribute if a.name == name), [0] * count)


def _numpy() -> Any:
    import numpy

    return numpy
