"""Expansion of ONNX control flow: If, Loop and Scan are unrolled during import.

Branch conditions and trip counts must be constant: from constants, shapes and numbers computed from them. The
iterations of a loop are blocks with numbered names; equal ones become one function, as all repeated blocks do
(`frontends.outline_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distir_relax.frontends.onnx.input_types import declared_type
from distir_relax.frontends.onnx.tensors import as_array
from distir_relax.ir import Value
from distir_relax.layout import is_symbolic
from distir_relax.ops import Builder, SizeArray

MOST_STEPS = 10_000
"""Maximum number of iterations, including nested loops; loops with more are assumed to be infinite."""

GRAPH_OPS = ("If", "Loop", "Scan")
"""The ops with subgraphs that can be expanded."""


class Reader(Protocol):
    """Importer of the nodes of a graph."""

    builder: Builder

    def run(self, nodes: Sequence[Any], scope: dict[str, Any], opsets: Mapping[str, int]) -> None:
        """Import nodes; `scope` maps names to values and constants, and receives the results."""

    steps: int
    """Number of loop iterations so far."""

    def step(self, name: str, read: Callable[[], None]) -> None:
        """Import one iteration of a loop by `read`, as the block `name`."""

    def resolve(self, name: str, scope: Mapping[str, Any]) -> Any:
        """Return the value or constant of a name."""

    def place(self, item: Any, hint: str = "") -> Value:
        """Convert a constant to a value."""


@dataclass(frozen=True)
class GraphNode:
    """A node with subgraphs, its operands, and the outer names of its subgraphs. Raises NotImplementedError, with the
    reason, for control flow that depends on data.
    """

    reader: Reader
    node: Any
    operands: Sequence[Any]
    scope: Mapping[str, Any]
    opsets: Mapping[str, int]

    def results(self) -> Sequence[Any]:
        """Return the results of the node."""
        return {"If": self._branch, "Loop": self._loop, "Scan": self._scan}[self.node.op_type]()

    def _branch(self) -> Sequence[Any]:
        if isinstance(self.operands[0], Value):
            raise NotImplementedError("which branch runs depends on data: a program has no control flow")
        branch = "then_branch" if bool(self.operands[0].reshape(-1)[0]) else "else_branch"
        return self._body(self._attribute(branch).g, {})

    def _loop(self) -> Sequence[Any]:
        import numpy as np

        body = self._attribute("body").g
        trips, condition = map(_number, self.operands[:2])
        if isinstance(trips, Value) or isinstance(condition, Value):
            raise NotImplementedError("the number of iterations depends on data: a program has no control flow")
        if is_symbolic(trips):
            raise NotImplementedError(f"the number of iterations, {trips}, may differ from call to call")
        carried, rows = list(self.operands[2:]), []
        number = 0
        while (trips is None or number < trips) and (condition is None or condition):
            arguments = [np.array(number, np.int64), np.array(True), *carried]
            condition, *results = self._step(number, body, arguments)
            if isinstance(condition, Value):
                raise NotImplementedError("the exit condition depends on data: a program has no control flow")
            condition = bool(condition.reshape(-1)[0])
            carried, row = results[: len(carried)], results[len(carried) :]
            rows.append(row)
            number += 1
        infos = body.output[1 + len(carried) :]
        return [*carried, *(self._stack([row[i] for row in rows], 0, info) for i, info in enumerate(infos))]

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
            results = self._step(number, body, [*states, *slices])
            states, row = results[: len(states)], results[len(states) :]
            rows.append(row)
        infos = body.output[len(states) :]
        outputs = []
        for i, info in enumerate(infos):
            axis, backwards = (self._numbers(f"scan_output_{key}", len(infos))[i] for key in ("axes", "directions"))
            parts = [row[i] for row in rows]
            outputs.append(self._stack(parts[::-1] if backwards else parts, axis, info))
        return [*states, *outputs]

    def _step(self, number: int, body: Any, arguments: Sequence[Any]) -> list[Any]:
        if self.reader.steps >= MOST_STEPS:
            raise NotImplementedError(f"the model's loops run more than {MOST_STEPS:,} times")
        results: list[Any] = []
        bound = dict(zip((item.name for item in body.input), arguments, strict=True))
        name = self.node.name or next(filter(None, self.node.output), self.node.op_type)
        self.reader.step(f"{name}.{number}", lambda: results.extend(self._body(body, bound)))
        return results

    def _body(self, graph: Any, bound: Mapping[str, Any]) -> list[Any]:
        inner = {**self.scope, **bound}
        for tensor in graph.initializer:
            inner[tensor.name] = as_array(tensor, self.reader.builder.location)
        self.reader.run(graph.node, inner, self.opsets)
        return [self.reader.resolve(output.name, inner) for output in graph.output]

    def _slices(self, x: Any, axis: int, backwards: bool) -> list[Any]:
        """Return the elements of dim `axis` of a scan input, in iteration order."""
        g = self.reader.builder
        if not isinstance(x, Value):
            slices = [part.squeeze(axis) for part in _numpy().split(x, x.shape[axis], axis)]
        else:
            shape = x.tensor.shape
            axis %= len(shape)
            # One op outside the blocks: per-iteration differences would prevent merging them.
            parts = g.emit("split", x, sizes=(1,) * shape[axis], axis=axis) if shape[axis] > 1 else (x,)
            slices = [g.emit("reshape", part, shape=(*shape[:axis], *shape[axis + 1 :])) for part in parts]
        return slices[::-1] if backwards else slices

    def _stack(self, parts: Sequence[Any], axis: int, info: Any) -> Any:
        """Stack `parts` along a new dim `axis`."""
        np, g = _numpy(), self.reader.builder
        if not parts:
            kind = declared_type(info)
            if kind is None:
                raise NotImplementedError(f"it has no iterations, and the model leaves the type of {info.name!r} open")
            return np.zeros((0, *kind.shape), kind.dtype)
        if not any(isinstance(part, Value) for part in parts):
            return np.stack(parts, axis)
        values = [self.reader.place(part, info.name) for part in parts]
        if len({value.tensor for value in values}) > 1:
            raise NotImplementedError(f"the type of {info.name!r} differs between iterations")
        shape = values[0].tensor.shape
        at = axis % (len(shape) + 1)
        expanded = [g.emit("reshape", value, shape=(*shape[:at], 1, *shape[at:])) for value in values]
        return expanded[0] if len(expanded) == 1 else g.emit("concat", *expanded, axis=at)

    def _attribute(self, name: str) -> Any:
        attribute = next((a for a in self.node.attribute if a.name == name), None)
        if attribute is None:
            raise ValueError(f"it has no attribute {name!r}")
        return attribute

    def _numbers(self, name: str, count: int) -> list[int]:
        return next((list(a.ints) for a in self.node.attribute if a.name == name), [0] * count)


def _numpy() -> Any:
    import numpy

    return numpy


def _number(item: Any) -> Any:
    """Return the number of an operand that is known, else the operand."""
    if item is None or isinstance(item, Value):
        return item
    return (item.entries if isinstance(item, SizeArray) else item).reshape(-1)[0]
