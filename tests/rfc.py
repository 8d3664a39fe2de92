"""The pipeline example of the TVM RFC, built by hand: ``gelu(x A) B * C`` with `A` split by columns."""

from __future__ import annotations

from distir_relax.ir import Module, TensorType
from distir_relax.ops import Builder


def rfc_module(columns: int = 127, placement: str = "S[1]") -> Module:
    """The global program; `columns` is the inner dim K, 127 in the RFC."""
    g = Builder()
    x = g.input("x", TensorType((128, 128), "float32"))
    a = g.input("A", TensorType((128, columns), "float32"), "parameter")
    b = g.input("B", TensorType((columns, 128), "float32"), "parameter")
    c = g.input("C", TensorType((128, 1), "float32"), "parameter")
    g.location = "rfc.py:12"
    a = g.emit("annotate_sharding", a, placements=placement)
    g.location = "rfc.py:14"
    g.hint = "lv0"
    lv0 = g.emit("matmul", x, a)
    g.hint = "Y"
    y = g.emit("nn.gelu", lv0)
    g.hint = "Z"
    z = g.emit("matmul", y, b)
    g.hint = "O"
    o = g.emit("multiply", z, c)
    return Module("global", (g.function("main", [("O", o)]),))
