"""Where a pending sum may pass: the legality table of ``I``, checked against numbers and against the pass."""

from __future__ import annotations

import pytest
import torch

from distir_relax.interpret import execute, interpret
from distir_relax.ir import Module, TensorType, Value
from distir_relax.layout import DeviceMesh
from distir_relax.lowering import ToDistIR
from distir_relax.ops import Builder
from distir_relax.sharding import DelayReductions, Propagate

MESH = DeviceMesh((3,), ("tp",))
F64 = "float64"


def pending(g: Builder, name: str = "x") -> Value:
    """A (4, 6) value that is a pending sum on three ranks: a product over a split dim of 7."""
    x = g.emit("annotate_sharding", g.input(name, TensorType((4, 7), F64)), placements="S[1]")
    return g.emit("matmul", x, g.input("w", TensorType((7, 6), F64), "parameter"))


PASSES = {
    "multiply by R": lambda g, z: g.emit("multiply", z, g.input("c", TensorType((4, 1), F64))),
    "divide by R": lambda g, z: g.emit("divide", z, g.constant(3.0, F64)),
    "negative": lambda g, z: g.emit("negative", z),
    "reshape": lambda g, z: g.emit("reshape", z, shape=(2, 2, 6)),
    "permute": lambda g, z: g.emit("permute_dims", z, axes=(1, 0)),
    "sum": lambda g, z: g.emit("sum", z, axis=(1,), keepdims=False),
    "mean": lambda g, z: g.emit("mean", z, axis=(0,), keepdims=True),
    "matmul with R": lambda g, z: g.emit("matmul", z, g.input("v", TensorType((6, 3), F64))),
    "I + I": lambda g, z: g.emit("add", z, pending(g, "u")),
    "where over I and I": lambda g, z: g.emit("where", g.input("m", TensorType((4, 6), "bool")), z, pending(g, "u")),
}
STOPS = {
    "I + R": lambda g, z: g.emit("add", z, g.input("c", TensorType((4, 6), F64))),
    "R / I": lambda g, z: g.emit("divide", g.constant(2.0, F64), z),
    "relu": lambda g, z: g.emit("nn.relu", z),
    "gelu": lambda g, z: g.emit("nn.gelu", z),
    "max": lambda g, z: g.emit("max", z, axis=(1,), keepdims=False),
    "softmax": lambda g, z: g.emit("nn.softmax", z, axis=1),
    "maximum with I": lambda g, z: g.emit("maximum", z, pending(g, "u")),
    "a larger result": lambda g, z: g.emit("matmul", z, g.input("v", TensorType((6, 50), F64))),
}


def build(step: object) -> tuple[Module, Module]:
    """The global module, and the sharded one with its reductions delayed."""
    g = Builder()
    result = step(g, pending(g))  # type: ignore[operator]
    module = Module("global", (g.function("main", [("y", result)]),))
    return module, DelayReductions().run(Propagate(MESH).run(module))


def run(module: Module, sharded: Module) -> None:
    generator = torch.Generator().manual_seed(3)
    data = {}
    for item in module.main.inputs:
        values = torch.randn(item.value.tensor.shape, generator=generator, dtype=torch.float64)
        data[item.value.name] = values > 0.2 if item.value.tensor.dtype == "bool" else values
    expected = interpret(module.main, data)
    found = execute(sharded, ToDistIR().run(sharded), data)
    torch.testing.assert_close(found["y"], expected["y"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PASSES)
def test_a_pending_sum_passes(name: str) -> None:
    module, sharded = build(PASSES[name])
    ops = [op.name for op in sharded.main.ops]
    assert ops[-1] == "redistribute"
    assert ops.count("redistribute") == 1
    run(module, sharded)


@pytest.mark.parametrize("name", STOPS)
def test_a_pending_sum_is_reduced_first(name: str) -> None:
    module, sharded = build(STOPS[name])
    assert sharded.main.ops[-1].name != "redistribute"
    run(module, sharded)


def test_of_a_product_of_pending_sums_one_is_reduced_first() -> None:
    module, sharded = build(lambda g, z: g.emit("multiply", z, pending(g, "u")))
    assert [op.name for op in sharded.main.ops].count("redistribute") == 2
    run(module, sharded)


def test_a_value_used_twice_is_reduced_once() -> None:
    def twice(g: Builder, z: Value) -> Value:
        return g.emit("add", g.emit("negative", z), g.emit("nn.relu", z))

    module, sharded = build(twice)
    assert [op.name for op in sharded.main.ops].count("redistribute") == 1
    run(module, sharded)
