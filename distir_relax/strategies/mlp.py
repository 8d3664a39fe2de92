"""The DistIR paper's synthetic MLP: one training step, over data, tensor and pipeline parallelism.

Every layer is a matmul and a ReLU; the loss is half the squared error, averaged over the batch; the optimizer is SGD.
As in the paper, tensor parallelism splits the columns of even layers' weights and the rows of odd ones', and the
gradient of the first layer's input is computed too. Microbatches run in 1F1B order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from distir_relax.errors import DistIRError
from distir_relax.ir import Module, PlacedType, Size, Value, fresh_name, per_rank
from distir_relax.layout import DeviceMesh
from distir_relax.layout.division import balanced
from distir_relax.schedules import Task, one_forward_one_backward
from distir_relax.strategies.builder import FunctionBuilder, ProgramBuilder
from distir_relax.strategies.strategy import Strategy


def mlp_training(
    layers: int, width: int, strategy: Strategy, global_batch: int, dtype: str = "float16", rate: float = 0.01
) -> Module:
    """One step of training `layers` layers of `width` x `width` on `global_batch` samples: a distributed program.

    The mesh is pipeline x data x tensor. Inputs are ``x`` and ``y`` (global_batch x width) and the weights ``w0``,
    ``w1``, …; outputs are the updated weights, under their names. Raises `DistIRError` for fewer layers than stages or
    fewer samples than there are microbatches on all data-parallel ranks together.
    """
    if layers < strategy.pipeline:
        raise DistIRError(f"{layers} layers cannot be {strategy.pipeline} pipeline stages")
    if global_batch < strategy.data * strategy.microbatches:
        raise DistIRError(
            f"a batch of {global_batch} has too few samples for {strategy.data} data-parallel ranks "
            f"with {strategy.microbatches} microbatches each"
        )
    return _Training(layers, width, strategy, global_batch, dtype, rate).build()


@dataclass
class _Training:
    layers: int
    width: int
    strategy: Strategy
    batch: int
    dtype: str
    rate: float
    program: ProgramBuilder = field(init=False)
    inside: tuple[int, ...] = field(init=False)
    functions: dict[object, FunctionBuilder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.strategy
        self.program = ProgramBuilder(DeviceMesh((s.pipeline, s.data, s.tensor), ("pipeline", "data", "tensor")))
        # A stage's devices, as its functions number them.
        self.inside = tuple(range(s.data * s.tensor))

    def build(self) -> Module:
        s, main = self.strategy, self.program.function("main")
        ends = list(accumulate(balanced(self.layers, s.pipeline)))
        stages = [range(end - size, end) for end, size in zip(ends, balanced(self.layers, s.pipeline), strict=True)]
        devices = [self.program.devices(pipeline=i) for i in range(s.pipeline)]
        last = s.pipeline - 1
        x = main.tensor("x", (self.batch, self.width), self.dtype, f"At[0], S[0], {self._split(0)}")
        y = main.tensor("y", (self.batch, self.width), self.dtype, f"At[{last}], S[0], {self._split(self.layers)}")
        weights = [
            main.tensor(f"w{i}", (self.width, self.width), self.dtype, self._weight(stage, i), "parameter")
            for stage, mine in enumerate(stages)
            for i in mine
        ]
        inputs, labels = self._microbatches(main, x), self._microbatches(main, y)
        kept: dict[tuple[int, int], list[Value]] = {}
        below: dict[tuple[int, int], Value] = {}
        gradients: list[list[Value]] = [[] for _ in stages]
        for step in one_forward_one_backward(s.pipeline, s.microbatches):
            # What a step's tasks need is sent before any of them begins, so that no stage waits for another's task.
            received = {task: self._receive(main, task, devices, kept, below) for task in step}
            for task in step:
                stage, m = task.stage, task.microbatch
                own = weights[stages[stage].start : stages[stage].stop]
                if task.kind == "F":
                    entering = received[task] or inputs[m]
                    body = self._forward(stages[stage], entering.placed)
                    found = main.call(body, entering, *own, devices=devices[stage], hint=f"f{stage}.{m}.")
                    kept[stage, m] = [entering, *found]
                    continue
                held = kept.pop((stage, m))
                body = self._backward(stages[stage], held[0].placed, stage == last, bool(gradients[stage]))
                given = (received[task] or labels[m], *held, *own, *gradients[stage])
                found = main.call(body, *given, devices=devices[stage], hint=f"b{stage}.{m}.")
                below[stage, m], gradients[stage] = found[0], list(found[1:])
        for stage, mine in enumerate(stages):
            own = weights[mine.start : mine.stop]
            found = main.call(self._update(mine), *own, *gradients[stage], devices=devices[stage], hint=f"u{stage}.")
            for i, value in zip(mine, found, strict=True):
                main.output(f"w{i}", value, (self.width, self.width), self._weight(stage, i))
        return self.program.build()

    def _receive(
        self,
        main: FunctionBuilder,
        task: Task,
        devices: Sequence[tuple[int, ...]],
        kept: dict[tuple[int, int], list[Value]],
        below: dict[tuple[int, int], Value],
    ) -> Value | None:
        """What a task gets from the stage before or after it; None at the ends of the pipeline."""
        stage, m = task.stage, task.microbatch
        if task.kind == "F" and stage:
            return main.send(kept[stage - 1, m][-1], devices[stage], hint=f"x{stage}.{m}")
        if task.kind != "F" and stage < self.strategy.pipeline - 1:
            return main.send(below.pop((stage + 1, m)), devices[stage], hint=f"dy{stage}.{m}")
        return None

    def _microbatches(self, main: FunctionBuilder, whole: Value) -> list[Value]:
        count = self.strategy.microbatches
        if count == 1:
            return [whole]
        kind = whole.placed
        held = kind.shape[0]
        if isinstance(held, int):
            sizes: tuple[Size, ...] = balanced(held, count)
        else:
            rows = [balanced(n, count) for n in held.values]
            sizes = tuple(per_rank(list(column)) for column in zip(*rows, strict=True))
        return list(main.emit("split", whole, axis=0, sizes=sizes, hint=whole.name))

    def _split(self, layer: int) -> str:
        """How the input of a layer lies along the tensor axis: odd layers take their columns split."""
        return "S[1]" if layer % 2 and self.strategy.tensor > 1 else "R"

    def _weight(self, stage: int, layer: int) -> str:
        tensor = "R" if self.strategy.tensor == 1 else "S[0]" if layer % 2 else "S[1]"
        return f"At[{stage}], R, {tensor}"

    def _kind(self, stage: int, layer: int) -> PlacedType:
        """A layer's weight, as the functions of its stage have it."""
        _, kind = self.program.layout((self.width, self.width), self.dtype, self._weight(stage, layer))
        key = ("inside", kind.shape, kind.dtype)
        return self.program.memo(key, lambda: PlacedType(kind.shape, kind.dtype, self.inside))

    def _inside(self, rows: PlacedType, layer: int) -> PlacedType:
        """The input of a layer in a function that works on microbatches of so many rows."""
        width = self._kind(0, 1).shape[0] if self._split(layer) != "R" else self.width
        key = ("inside", rows.shape[0], width)
        return self.program.memo(key, lambda: PlacedType((rows.shape[0], width), self.dtype, self.inside))

    def _function(self, key: tuple[object, ...], name: str) -> tuple[FunctionBuilder, bool]:
        """The function of a key, and whether it is new."""
        if key in self.functions:
            return self.functions[key], False
        taken = self.program.functions
        found = self.program.function(fresh_name(name, set(taken)))
        self.functions[key] = found
        return found, True

    def _forward(self, layers: range, rows: PlacedType) -> FunctionBuilder:
        """A stage forwards: from its input, the results of its layers."""
        f, new = self._function(("forward", layers.start % 2, len(layers), rows.shape[0]), "forward")
        if new:
            x = f.like("x", self._inside(rows, layers.start))
            weights = [f.like(f"w{i}", self._kind(0, i), "parameter") for i in layers]
            for i, w in zip(layers, weights, strict=True):
                (x,) = f.call(self._layer(i, rows), x, w, devices=self.inside, hint=f"{i - layers.start}.")
                f.output(f"a{i - layers.start}", x)
        return f

    def _layer(self, layer: int, rows: PlacedType) -> FunctionBuilder:
        f, new = self._function(("layer", layer % 2, rows.shape[0]), "layer")
        if new:
            x, w = f.like("x", self._inside(rows, layer)), f.like("w", self._kind(0, layer), "parameter")
            z = f.emit("matmul", x, w, hint="z")
            if layer % 2 and self.strategy.tensor > 1:
                z = f.emit("all_reduce", z, axis="tensor", op="sum", hint="z")
            f.output("a", f.emit("nn.relu", z, hint="a"))
        return f

    def _backward(self, layers: range, rows: PlacedType, last: bool, more: bool) -> FunctionBuilder:
        """A stage backwards: the gradient of its input, and those of its weights, added to what they were if `more`.

        The last stage takes the labels and makes the gradient of the loss itself.
        """
        f, new = self._function(("backward", layers.start % 2, len(layers), rows.shape[0], last, more), "backward")
        if new:
            dy = f.like("y" if last else "dy", self._inside(rows, layers.stop))
            values = [
                f.like(f"a{i - layers.start}", self._inside(rows, i)) for i in range(layers.start, layers.stop + 1)
            ]
            weights = [f.like(f"w{i - layers.start}", self._kind(0, i), "parameter") for i in layers]
            sums = [f.like(f"sum{i - layers.start}", self._kind(0, i)) for i in layers] if more else []
            if last:
                dy = f.emit("squared_error_grad", values[-1], dy, scale=1.0 / self.batch, hint="dy")
            found: list[Value] = []
            for n, i in reversed(list(enumerate(layers))):
                given = (values[n], values[n + 1], weights[n], dy, *sums[n : n + 1])
                dy, dw = f.call(self._layer_backward(i, rows, more), *given, devices=self.inside, hint=f"{n}.")
                found.append(dw)
            f.output("dx", dy)
            for n, dw in enumerate(reversed(found)):
                f.output(f"dw{n}", dw)
        return f

    def _layer_backward(self, layer: int, rows: PlacedType, more: bool) -> FunctionBuilder:
        f, new = self._function(("layer backward", layer % 2, rows.shape[0], more), "layer_backward")
        if new:
            x, a = f.like("x", self._inside(rows, layer)), f.like("a", self._inside(rows, layer + 1))
            w, da = f.like("w", self._kind(0, layer), "parameter"), f.like("da", self._inside(rows, layer + 1))
            before = f.like("sum", self._kind(0, layer)) if more else None
            dz = f.emit("relu_grad", a, da, hint="dz")
            dw = f.emit("matmul", f.emit("permute_dims", x, axes=(1, 0), hint="xt"), dz, hint="dw")
            if before is not None:
                dw = f.emit("add", before, dw, hint="dw")
            dx = f.emit("matmul", dz, f.emit("permute_dims", w, axes=(1, 0), hint="wt"), hint="dx")
            if not layer % 2 and self.strategy.tensor > 1:
                dx = f.emit("all_reduce", dx, axis="tensor", op="sum", hint="dx")
            f.output("dx", dx)
            f.output("dw", dw)
        return f

    def _update(self, layers: range) -> FunctionBuilder:
        """The gradients of a stage's weights summed over the data-parallel ranks, and the weights updated."""
        f, new = self._function(("update", layers.start % 2, len(layers)), "update")
        if new:
            weights = [f.like(f"w{i - layers.start}", self._kind(0, i), "parameter") for i in layers]
            sums = [f.like(f"dw{i - layers.start}", self._kind(0, i)) for i in layers]
            for n, (w, dw) in enumerate(zip(weights, sums, strict=True)):
                if self.strategy.data > 1:
                    dw = f.emit("all_reduce", dw, axis="data", op="sum", hint="dw")
                f.output(f"w{n}", f.emit("sgd", w, dw, rate=self.rate, hint="new"))
        return f
