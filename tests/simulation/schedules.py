"""Random distributed programs: calls within calls, streams, several device sets, views, uneven and empty shapes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from distir_relax.cost.profile import Profile
from distir_relax.executable.hoist import PREPARE
from distir_relax.ir import Module, PerRank, Value, inline
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.program_builder import FunctionBuilder, ProgramBuilder
from distir_relax.simulation.kept_values import as_executed

MESH = DeviceMesh((2, 3), ("a", "b"))
WIDTH = 5
ROWS = {6: PerRank((7, 2, 0, 7, 3, 3)), 3: PerRank((4, 0, 3)), 2: PerRank((2, 9))}
"""Rows of what each device of a set of so many holds."""
AXES = {6: ("a", "b"), 3: ("b",), 2: ("a",)}
"""The mesh axes along which a set of so many devices is whole."""


@dataclass
class Writer:
    """Writes ops into a function on devices of which there are `count`, and keeps what nothing has used yet."""

    random: random.Random
    f: FunctionBuilder
    devices: tuple[int, ...]
    tall: list[Value]
    square: list[Value]
    used: set[str] = field(default_factory=set)

    def write(self, steps: int, callees: dict[int, list[FunctionBuilder]]) -> None:
        """Some steps; the first uses both inputs."""
        self.product()
        for _ in range(steps):
            chosen = callees.get(len(self.devices), [])
            step = self.random.choice((self.product, self.pointwise, self.views, self.reduce, self.gram, self.call))
            if step == self.call:
                if chosen:
                    self.call(self.random.choice(chosen))
            else:
                step()

    def leaves(self) -> list[Value]:
        """What nothing uses."""
        return [v for v in (*self.tall, *self.square) if v.name not in self.used]

    def product(self) -> None:
        self.tall.append(self.emit("matmul", self.take(self.tall), self.take(self.square)))

    def pointwise(self) -> None:
        for values in (self.tall, self.square):
            if self.random.random() < 0.5:
                values.append(self.emit("nn.relu", self.take(values)))
            else:
                values.append(self.emit("add", self.take(values), self.take(values)))

    def views(self) -> None:
        turned = self.emit("permute_dims", self.take(self.tall), axes=(1, 0))
        self.tall.append(self.emit("permute_dims", turned, axes=(1, 0)))

    def gram(self) -> None:
        x = self.take(self.tall)
        self.square.append(self.emit("matmul", self.emit("permute_dims", x, axes=(1, 0)), x))

    def reduce(self) -> None:
        axis = self.random.choice(AXES[len(self.devices)])
        attrs = {"axis": axis, "op": "sum"}
        stream = self.random.choice((None, "one", "two"))
        if stream is None:
            self.square.append(self.emit("all_reduce", self.take(self.square), **attrs))
            return
        pending = self.emit("all_reduce", self.take(self.square), **attrs, stream=stream)
        self.product()
        self.square.append(self.emit("wait", pending))

    def call(self, callee: FunctionBuilder) -> None:
        found = self.f.call(callee, self.take(self.tall), self.take(self.square), devices=self.devices)
        for value, output in zip(found, callee.outputs, strict=True):
            (self.square if output.name.startswith("square") else self.tall).append(value)

    def emit(self, name: str, *operands: Value, **attrs: object) -> Value:
        self.used.update(v.name for v in operands)
        found: Value = self.f.emit(name, *operands, **attrs)
        return found

    def take(self, values: list[Value]) -> Value:
        chosen = self.random.choice(values[-3:])
        self.used.add(chosen.name)
        return chosen


def schedule(seed: int, even: bool = False) -> Module:
    """A program on six devices: a few functions for 2, 3 and 6 devices, called again and again, and sends between.

    If `even`, all devices have as many rows, so that the three devices of a row do the same.
    """
    draw = random.Random(seed)
    rows = dict.fromkeys(ROWS, 4) if even else ROWS
    program = ProgramBuilder(MESH)
    callees: dict[int, list[FunctionBuilder]] = {}
    for number in range(5):
        count = draw.choice((3, 6) if even else (2, 3, 6))
        f = program.function(f"f{number}")
        inside = tuple(range(count))
        x = f.input("x", (rows[count], WIDTH), "float64", inside)
        w = f.input("w", (WIDTH, WIDTH), "float64", inside)
        writer = Writer(draw, f, inside, [x], [w])
        writer.write(draw.randint(0, 4), callees)
        for i, value in enumerate(writer.leaves()):
            f.output(f"{'square' if value in writer.square else 'tall'}{i}", value)
        callees.setdefault(count, []).append(f)
    main = program.function("main")
    sets = [program.devices(), *(program.devices(a=i) for i in range(2))]
    if not even:
        sets += [program.devices(b=i) for i in range(3)]
    writers = []
    for i, devices in enumerate(sets):
        x = main.input(f"x{i}", (rows[len(devices)], WIDTH), "float64", devices)
        w = main.input(f"w{i}", (WIDTH, WIDTH), "float64", devices, "parameter")
        writers.append(Writer(draw, main, devices, [x], [w]))
        writers[-1].product()
    for count, functions in callees.items():
        for f in functions:
            next(w for w in writers if len(w.devices) == count).call(f)
    for _ in range(24):
        writer = draw.choice(writers)
        writer.write(1, callees)
        alike = [w for w in writers if len(w.devices) == len(writer.devices) and w is not writer]
        if alike and draw.random() < 0.5:
            other = draw.choice(alike)
            other.square.append(main.send(writer.take(writer.square), other.devices))
    for writer in writers:
        for value in writer.leaves():
            main.output(value.name, value)
    return program.build()


def with_calls_and_without(module: Module, profile: Profile) -> tuple[Module, Module]:
    """A program as it is executed, and with the calls of its entry inlined; what is prepared is the same."""
    called = as_executed(module, profile)
    prepared = (function for function in called.functions if function.name.endswith(PREPARE))
    return called, replace(called, functions=(inline(called).main, *prepared))
