"""Random small programs over the op table, with random annotations: odd sizes, asymmetric data.

Every choice is drawn from one `random.Random`. Hypothesis gives one whose draws it controls, so that a program that
fails shrinks to the fewest ops and the smallest sizes; what is simplest stands first in each choice.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from distir_relax.ir import Module, TensorType, Value, print_module
from distir_relax.layout import DeviceMesh
from distir_relax.ops import Builder
from tests.drawn_placements import draw_placements

SIZES = (1, 2, 3, 5, 6, 7, 9)


@dataclass(repr=False)
class Program:
    """A global module with data for its inputs. Hypothesis shows one that fails as text."""

    module: Module
    tensors: dict[str, torch.Tensor]

    def __repr__(self) -> str:
        return f"\n{print_module(self.module)}"


@dataclass
class Generator:
    """Builds one program of `ops` steps. The same draws give the same program."""

    random: random.Random
    mesh: DeviceMesh
    ops: int = 9
    builder: Builder = field(default_factory=Builder)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    annotated: set[str] = field(default_factory=set)
    cuts: list[str] = field(init=False)
    """How the next annotations cut a dim; the last holds for all that follow."""

    def build(self) -> Program:
        # Two annotations that give one class unlike sizes are an error, so one gives sizes, or all cut in chunks.
        self.cuts = self.random.choice(([""], [""], [""], ["chunk"], ["sizes", ""]))
        values = [self.fresh((self.size(), self.size(), self.size())), self.fresh((self.size(), self.size()))]
        for number in range(self.ops):
            self.builder.location = f"program.py:{number + 1}"
            source = self.random.choice(values[-4:])
            step = self.random.choice(STEPS)
            values += [v for v in step(self, source) if v.tensor.elements <= 4000]
            if self.random.random() < 0.5:
                value = self.random.choice(values)
                # A stored tensor has one layout, so it is annotated once.
                if value.name not in self.annotated:
                    self.annotated.add(value.name)
                    values.append(self.annotate(value))
        used = {v.name for op in self.builder.ops for v in op.operands}
        outputs = [v for v in values if v.name not in used][:3] or values[-1:]
        function = self.builder.function("main", [(f"y{i}", v) for i, v in enumerate(outputs)])
        return Program(Module("global", (function,), (self.mesh,)), self.tensors)

    def size(self) -> int:
        return self.random.choice(SIZES)

    def fresh(self, shape: tuple[int, ...], dtype: str = "float64", low: int = 0, high: int = 0) -> Value:
        """A new input; an integer one has numbers in [low, high)."""
        role = self.random.choice(("input", "parameter"))
        value = self.builder.input("x", TensorType(shape, dtype), role)
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        if dtype == "int64":
            self.tensors[value.name] = torch.randint(low, high, shape, generator=generator)
        else:
            self.tensors[value.name] = torch.randn(shape, generator=generator, dtype=torch.float64) + 0.3
        return value

    def annotate(self, value: Value) -> Value:
        shape = value.tensor.shape
        dims = [d for d, n in enumerate(shape) if n > 1]
        self.random.shuffle(dims)
        cut = self.cuts[0]
        placements = draw_placements(self.random, shape, dims, self.mesh, lambda dim: cut)
        self.cuts = self.cuts[1:] or self.cuts
        along = ["I[sum]" if p == "R" and self.random.random() < 0.15 else p for p in placements.split(", ")]
        placements = ", ".join(along)
        return self.builder.emit("annotate_sharding", value, placements=placements)


def _pointwise(g: Generator, x: Value) -> list[Value]:
    name = g.random.choice(("nn.gelu", "nn.relu", "tanh", "sigmoid", "negative", "square", "exp"))
    if name == "exp":
        x = g.builder.emit("tanh", x)
    return [g.builder.emit(name, x)]


def _number(g: Generator, x: Value) -> list[Value]:
    name = g.random.choice(("add", "multiply", "subtract", "divide", "maximum"))
    return [g.builder.emit(name, x, g.builder.constant(g.random.choice((0.5, -1.25, 3.0)), "float64"))]


def _binary(g: Generator, x: Value) -> list[Value]:
    shape = tuple(1 if g.random.random() < 0.25 else n for n in x.tensor.shape)
    other = g.fresh(shape[g.random.randrange(len(shape)) :] if shape else ())
    if g.random.random() < 0.2:
        other = x
    name = g.random.choice(("add", "multiply", "subtract", "minimum"))
    pair = [x, other] if g.random.random() < 0.5 else [other, x]
    return [g.builder.emit(name, *pair)]


def _matmul(g: Generator, x: Value) -> list[Value]:
    if len(x.tensor.shape) < 2:
        return []
    return [g.builder.emit("matmul", x, g.fresh((x.tensor.shape[-1], g.size())))]


def _linear(g: Generator, x: Value) -> list[Value]:
    if not x.tensor.shape:
        return []
    y = g.builder.emit("linear", x, g.fresh((g.size(), x.tensor.shape[-1])))
    if g.random.random() < 0.5:
        return [g.builder.emit("add", y, g.fresh((y.tensor.shape[-1],)))]
    return [y]


def _reshape(g: Generator, x: Value) -> list[Value]:
    shape = list(x.tensor.shape)
    if len(shape) >= 2 and g.random.random() < 0.5:
        i = g.random.randrange(len(shape) - 1)
        shape[i : i + 2] = [shape[i] * shape[i + 1]]
    else:
        splittable = [(i, f) for i, n in enumerate(shape) for f in (2, 3) if n % f == 0 and n > f]
        if splittable:
            i, f = g.random.choice(splittable)
            shape[i : i + 1] = [f, shape[i] // f] if g.random.random() < 0.5 else [shape[i] // f, f]
        else:
            shape.insert(g.random.randrange(len(shape) + 1), 1)
    return [g.builder.emit("reshape", x, shape=tuple(shape))]


def _permute(g: Generator, x: Value) -> list[Value]:
    axes = list(range(len(x.tensor.shape)))
    g.random.shuffle(axes)
    return [g.builder.emit("permute_dims", x, axes=tuple(axes))]


def _split(g: Generator, x: Value) -> list[Value]:
    dims = [i for i, n in enumerate(x.tensor.shape) if n > 1]
    if not dims:
        return []
    axis = g.random.choice(dims)
    n = x.tensor.shape[axis]
    sizes = (n // 3,) * 3 if n % 3 == 0 else (n // 2, n - n // 2)
    return list(g.builder.emit("split", x, sizes=sizes, axis=axis))


def _concat(g: Generator, x: Value) -> list[Value]:
    if not x.tensor.shape:
        return []
    axis = g.random.randrange(len(x.tensor.shape))
    shape = list(x.tensor.shape)
    shape[axis] = g.size()
    return [g.builder.emit("concat", x, g.fresh(tuple(shape)), axis=axis)]


def _slice(g: Generator, x: Value) -> list[Value]:
    dims = [i for i, n in enumerate(x.tensor.shape) if n > 2]
    if not dims:
        return []
    axis = g.random.choice(dims)
    n = x.tensor.shape[axis]
    return [g.builder.emit("strided_slice", x, axes=(axis,), begin=(1,), end=(n,), strides=(g.random.choice((1, 2)),))]


def _reduce(g: Generator, x: Value) -> list[Value]:
    rank = len(x.tensor.shape)
    axes = tuple(sorted(g.random.sample(range(rank), g.random.randint(1, rank)))) if rank else ()
    if not axes:
        return []
    name = g.random.choice(("sum", "mean", "max", "min"))
    return [g.builder.emit(name, x, axis=axes, keepdims=g.random.random() < 0.5)]


def _softmax(g: Generator, x: Value) -> list[Value]:
    return [g.builder.emit("nn.softmax", x, axis=g.random.randrange(len(x.tensor.shape)))] if x.tensor.shape else []


def _norm(g: Generator, x: Value) -> list[Value]:
    if not x.tensor.shape:
        return []
    n = x.tensor.shape[-1]
    axes = (len(x.tensor.shape) - 1,)
    return [g.builder.emit("nn.layer_norm", x, g.fresh((n,)), g.fresh((n,)), axes=axes, epsilon=1e-5)]


def _take(g: Generator, x: Value) -> list[Value]:
    if not x.tensor.shape:
        return []
    axis = g.random.randrange(len(x.tensor.shape))
    ids = g.fresh(tuple(g.size() for _ in range(g.random.randint(0, 2))), "int64", 0, x.tensor.shape[axis])
    return [g.builder.emit("take", x, ids, axis=axis)]


def _broadcast(g: Generator, x: Value) -> list[Value]:
    shape = tuple(g.size() if n == 1 else n for n in x.tensor.shape)
    return [g.builder.emit("broadcast_to", x, shape=(2, *shape))]


def _attention(g: Generator, x: Value) -> list[Value]:
    shape = x.tensor.shape
    if len(shape) != 4:
        shape = (g.size(), g.size(), g.size(), g.size())
        x = g.fresh(shape)
    b, h, _, d = shape
    t = g.size()
    operands = [x, g.fresh((b, h, t, d)), g.fresh((b, h, t, g.size()))]
    masked = g.random.random() < 0.5
    if masked:
        operands.append(g.fresh(g.random.choice(((b, 1, 1, t), (1, 1, shape[2], t), (b, h, shape[2], t)))))
    attrs = {"scale": 0.3, "causal": False, "masked": masked, "boolean": False, "dtype": "float64"}
    return [g.builder.emit("nn.scaled_dot_product_attention", *operands, **attrs)]


def _head_split(g: Generator, x: Value) -> list[Value]:
    """A fused projection taken apart into heads, as GPT-2 does."""
    if not x.tensor.shape:
        return []
    heads, width = g.random.choice((2, 3, 5)), g.random.choice((2, 3))
    y = g.builder.emit("linear", x, g.fresh((3 * heads * width, x.tensor.shape[-1])))
    parts = g.builder.emit("split", y, sizes=(heads * width,) * 3, axis=len(x.tensor.shape) - 1)
    lead = x.tensor.shape[:-1]
    return [g.builder.emit("reshape", part, shape=(*lead, heads, width)) for part in parts]


def _window(g: Generator, x: Value) -> list[Value]:
    """A convolution or pooling over the last dims, with a bias or not."""
    shape = x.tensor.shape
    if len(shape) not in (3, 4) or min(shape) < 1:
        shape = (g.size(), g.size(), g.size(), g.size())
        x = g.fresh(shape)
    count = len(shape) - 2
    kernel = tuple(min(n, g.random.choice((1, 2, 3))) for n in shape[2:])
    low = tuple(g.random.randint(0, k // 2) for k in kernel)
    attrs = {"strides": tuple(g.random.choice((1, 1, 2)) for _ in kernel), "padding": (*low, *low)}
    kind = g.random.choice(("conv", "conv", "max", "avg", "transposed", "batch_norm"))
    if kind == "batch_norm":
        vectors = [g.fresh((shape[1],)) for _ in range(3)]
        spread = g.builder.emit("square", g.fresh((shape[1],)))
        shift = g.builder.emit("add", spread, g.builder.constant(0.5, "float64"))
        return [g.builder.emit("nn.batch_norm", x, *vectors, shift, epsilon=1e-5)]
    if kind in ("max", "avg"):
        more = {"dilation": (1,) * count} if kind == "max" else {"counted": (0,) * 2 * count}
        return [g.builder.emit(f"nn.{kind}_pool{count}d", x, pool_size=kernel, **attrs, **more)]
    groups = g.random.choice([n for n in (1, 1, 2, 3) if shape[1] % n == 0])
    inner, outer = shape[1] // groups, g.random.choice((1, 2, 3))
    weight = (groups * outer, inner) if kind == "conv" else (shape[1], outer)
    name = f"nn.conv{count}d{'_transpose' if kind == 'transposed' else ''}"
    w = g.fresh((*weight, *kernel))
    return [g.builder.emit(name, x, w, **attrs, dilation=(1,) * count, groups=groups)]


STEPS = (
    _pointwise, _number, _binary, _binary, _matmul, _linear, _linear, _reshape, _reshape, _permute, _split, _concat,
    _slice, _reduce, _softmax, _norm, _take, _broadcast, _attention, _head_split,
    _window, _window,
)  # fmt: skip
