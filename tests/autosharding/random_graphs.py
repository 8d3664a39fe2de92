"""Small random programs of the global stage: products, sums, norms and what goes between, on odd sizes."""

from __future__ import annotations

import random
from typing import Any

from distir_relax.ir import Function, Input, Module, Op, Output, TensorType, Value
from distir_relax.ops import infer

SIZES = (2, 3, 5, 7, 8, 12)


def random_module(draw: random.Random, ops: int) -> Module:
    """A program of so many ops; some values are used several times, some results by nobody."""
    rows, width = draw.choice(SIZES), draw.choice(SIZES)
    inputs = [Input(Value("x", TensorType((rows, width), "float32")), "input")]
    values = [inputs[0].value]
    made: list[Op] = []
    for number in range(ops):
        x = draw.choice(values)
        name = draw.choice(
            ("linear", "linear", "add", "nn.relu", "nn.softmax", "flip", "permute_dims", "sum", "multiply")
        )
        operands, attrs = [x], _attributes(name, x.tensor.shape, draw)
        if name == "linear":
            weight = Value(f"w{number}", TensorType((draw.choice(SIZES), x.tensor.shape[-1]), "float32"))
            inputs.append(Input(weight, "parameter"))
            operands.append(weight)
        if name in ("add", "multiply"):
            operands.append(draw.choice([v for v in values if v.type == x.type]))
        (kind,) = infer(name, tuple(v.tensor for v in operands), attrs)
        values.append(Value(f"v{number}", kind))
        made.append(Op(name, tuple(operands), (values[-1],), attrs))
    used = {v.name for op in made for v in op.operands}
    ends = [op.results[0] for op in made if op.results[0].name not in used]
    main = Function("main", tuple(inputs), tuple(made), tuple(Output(v.name, v) for v in ends))
    return Module("global", (main,))


def _attributes(name: str, shape: tuple[int, ...], draw: random.Random) -> dict[str, Any]:
    if name in ("nn.softmax", "flip"):
        return {"axis": draw.randrange(len(shape))}
    if name == "permute_dims":
        return {"axes": tuple(reversed(range(len(shape))))}
    if name == "sum":
        return {"axis": (draw.randrange(len(shape)),), "keepdims": True}
    return {}
