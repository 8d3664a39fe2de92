"""`PrimFunc`s that are split as their blocks say, on three ranks with sizes that three does not divide."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import distir_relax as dr
from distir_relax.kernels.prim_func_factors import block_rule
from distir_relax.ops.program.tvm_extern import ComputedWhole
from tests.frontends.relax_modules import HEAD, script

PLAIN = HEAD[: HEAD.index("    I.module_attrs")]
MESH = dr.DeviceMesh((3,), ("tp",))
N, M = 127, 7
X, W, B = f"({N}, {M})", f"({M}, 5)", f"({M},)"


def block(operands: str, result: str, grid: str, kinds: str, body: str, dtype: str = "float32") -> str:
    """A `PrimFunc` ``f`` of one block over variables `i`, `j`, `k`; a reduction when `body` has two lines."""
    params = [f'{n}: T.Buffer({s}, "{dtype}")' for n, s in zip("XW", operands.split(";"), strict=False)]
    names = "ijk"[: len(kinds)]
    variables = ", ".join(f"v{n}" for n in names)
    *init, update = body.split("\n")
    lines = ["with T.init():", f"    {init[0]}"] if init else []
    inner = "\n                ".join([*lines, update])
    return f"""
    @T.prim_func(s_tir=True, private=True)
    def f({", ".join(params)}, Y: T.Buffer({result}, "{dtype}")):
        for {", ".join(names)} in T.grid({grid}):
            with T.sblock("b"):
                {variables} = T.axis.remap("{kinds}", [{", ".join(names)}])
                {inner}
"""


def model(function: str, operands: str, result: str, dtype: str = "float32") -> Any:
    names = "xw"[: operands.count(";") + 1]
    params = ", ".join(f'{n}: R.Tensor({s}, "{dtype}")' for n, s in zip(names, operands.split(";"), strict=True))
    return script(
        f"""{function}
    @R.function
    def main({params}):
        cls = Module
        y = R.call_tir(cls.f, ({", ".join(names)},), out_ty=R.Tensor({result}, "{dtype}"))
        return y
""",
        PLAIN,
    )


MATMUL = "Y[vi, vj] = T.float32(0)\nY[vi, vj] = Y[vi, vj] + X[vi, vk] * W[vk, vj]"
CASES: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "elementwise": ((X, X, f"{N}, {M}", "SS", "Y[vi, vj] = T.exp(X[vi, vj]) + T.float32(1)"),
                    "d0 d1 -> d0 d1", lambda x: np.exp(x) + 1),
    "broadcasting": ((f"{X};{B}", X, f"{N}, {M}", "SS", "Y[vi, vj] = X[vi, vj] / (W[vj] * W[vj] + T.float32(1))"),
                     "d0 d1, d1 -> d0 d1", lambda x, w: x / (w * w + 1)),
    "matmul": ((f"{X};{W}", f"({N}, 5)", f"{N}, 5, {M}", "SSR", MATMUL),
               "d0 d1, d1 d2 -> d0 d2", lambda x, w: x @ w),
    "sum": ((X, B, f"{M}, {N}", "SR", "Y[vi] = T.float32(0)\nY[vi] = Y[vi] + X[vj, vi]"),
            "d0 d1 -> d1", lambda x: x.sum(0)),
    "max": ((X, B, f"{M}, {N}", "SR", 'Y[vi] = T.min_value("float32")\nY[vi] = T.max(Y[vi], X[vj, vi])'),
            "d0 d1 -> d1", lambda x: x.max(0)),
    "total": ((X, "()", f"{N}, {M}", "RR", "Y[()] = T.float32(0)\nY[()] = Y[()] + X[vi, vj]"),
              "d0 d1 -> ", lambda x: x.sum()),
    "exponentials": ((X, B, f"{M}, {N}", "SR", "Y[vi] = T.float32(0)\nY[vi] = Y[vi] + T.exp(X[vj, vi])"),
                     "[w0] d0 -> d0", lambda x: np.exp(x).sum(0)),
    "shifted": ((X, f"({N - 1}, {M})", f"{N - 1}, {M}", "SS", "Y[vi, vj] = X[vi + 1, vj] - X[vi, vj]"),
                "[w0] d0 -> [w1] d0", lambda x: np.diff(x, axis=0)),
}  # fmt: skip


@cache
def module(name: str) -> Any:
    function = CASES[name][0]
    return model(block(*function), function[0], function[1])


@pytest.mark.parametrize("name", CASES)
def test_the_rule_of_a_block(name: str) -> None:
    (function,) = (f for g, f in module(name).functions.items() if g.name_hint == "f")
    found = block_rule(function)
    assert found == (CASES[name][1], "max" if name == "max" else "sum")


SPLITS = [
    ("elementwise", {"x": "S[0]"}, "S[0"),
    ("elementwise", {"x": "S[0: 100|0|27]"}, "S[0"),
    ("elementwise", {"x": "S[1]"}, "S[1"),
    ("broadcasting", {"x": "S[1: 4|0|3]"}, "S[1"),
    ("broadcasting", {"w": "S[0]"}, "S[1"),
    ("matmul", {"x": "S[0]"}, "S[0"),
    ("matmul", {"x": "S[1]"}, "I[sum]"),
    ("matmul", {"x": "S[1: 5|0|2]"}, "I[sum]"),
    ("matmul", {"w": "S[1: 1|4|0]"}, "S[1"),
    ("sum", {"x": "S[0]"}, "I[sum]"),
    ("sum", {"x": "S[0: 0|64|63]"}, "I[sum]"),
    ("sum", {"x": "S[1]"}, "S[0"),
    ("max", {"x": "S[0]"}, "I[max]"),
    ("max", {"x": "S[0: 126|0|1]"}, "I[max]"),
    ("total", {"x": "S[0: 0|64|63]"}, "I[sum]"),
    ("exponentials", {"x": "S[1]"}, "S[0"),
    ("shifted", {"x": "S[1]"}, "S[1"),
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize(("name", "shardings", "expected"), SPLITS, ids=str)
def test_a_block_in_parts(name: str, shardings: dict[str, str], expected: str, tail: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ComputedWhole)
        plan = dr.compile(module(name), shardings=shardings, mesh=MESH, tail=tail)
    (call,) = (op for op in plan.modules["sharded"].main.ops if op.name == "call_tir")
    assert expected in str(call.results[0].type)
    generator = np.random.default_rng(3)
    # Below zero, so that a filling of zeros would show in a maximum.
    operands = [
        generator.standard_normal(i.value.tensor.shape, "float32") - 3 for i in plan.modules["global"].main.inputs
    ]
    wanted = CASES[name][2](*operands)
    for backend in ("torch", "tvm"):
        found = plan(*map(torch.from_numpy, operands), backend=backend)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-5, atol=2e-5, err_msg=backend)


OTHERS = {
    "shifted in its only dim": ((B, "(6,)", "6", "S", "Y[vi] = X[vi + 1] - X[vi]"), lambda x: np.diff(x)),
    "by position": ((B, B, f"{M}", "S", "Y[vi] = T.if_then_else(vi < 3, X[vi], T.float32(0))"),
                    lambda x: np.where(np.arange(M) < 3, x, 0)),
    "turned": ((B, B, f"{M}", "S", f"Y[vi] = X[{M - 1} - vi]"), lambda x: x[::-1]),
    "a sum that starts at one": ((B, "(1,)", f"1, {M}", "SR", "Y[vi] = T.float32(1)\nY[vi] = Y[vi] + X[vj]"),
                                 lambda x: x.sum(keepdims=True) + 1),
    "a product": ((B, "(1,)", f"1, {M}", "SR", "Y[vi] = T.float32(1)\nY[vi] = Y[vi] * X[vj]"),
                  lambda x: x.prod(keepdims=True)),
    "an outer sum": ((B, "(7, 7)", "7, 7", "SS", "Y[vi, vj] = X[vi] + X[vj]"), lambda x: x[:, None] + x),
    "a look-up": ((B, B, f"{M}", "S", 'Y[vi] = X[T.Cast("int32", T.abs(X[vi]))]'),
                  lambda x: x[np.abs(x).astype("int32")]),
    "diagonal": (("(7, 7)", B, "7", "S", "Y[vi] = X[vi, vi]"), lambda x: x.diagonal()),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_rule_is_whole(name: str) -> None:
    function, reference = OTHERS[name]
    with pytest.warns(ComputedWhole, match=r"every device computes all of f, .*\(@main, y\)"):
        plan = dr.compile(model(block(*function), function[0], function[1]), shardings={"x": "S[0]"}, mesh=MESH)
    x = np.random.default_rng(5).standard_normal(plan.modules["global"].main.inputs[0].value.tensor.shape, "float32")
    np.testing.assert_allclose(plan(torch.from_numpy(x)).numpy(), reference(x), rtol=2e-5)


def test_an_integer_is_not_divided_by_what_fills_a_shard() -> None:
    text = block("(7,);(7,)", "(7,)", "7", "S", "Y[vi] = X[vi] // W[vi]", "int32")
    with pytest.warns(ComputedWhole):
        plan = dr.compile(model(text, "(7,);(7,)", "(7,)", "int32"), shardings={"x": "S[0]"}, mesh=MESH, tail="pad")
    x, w = torch.arange(7, dtype=torch.int32) * 5, torch.arange(1, 8, dtype=torch.int32)
    assert torch.equal(plan(x, w), x // w)
