"""Functions of TVM's: those that nothing is known of are computed whole by every device, which is told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import tvm_ffi
from tvm import relax

import distir_relax as dr
from distir_relax.errors import RunError
from distir_relax.ir import parse, print_module
from distir_relax.ops.program.tvm_extern import ComputedWhole
from tests.frontends.relax_modules import HEAD, script

PLAIN = HEAD[: HEAD.index("    I.module_attrs")]
MESH = dr.DeviceMesh((3,), ("tp",))

MODEL = """
    @R.function
    def main(x: R.Tensor((7, 5), "float32"), w: R.Tensor((5, 4), "float32")):
        with R.dataflow():
            h = R.matmul(x, w)
            y = R.nn.gelu(h)
            z = R.multiply(y, R.const(2.0, "float32"))
            R.output(z)
        return z
"""

PACKED = """
    @R.function
    def main(x: R.Tensor((7, 5), "float32")):
        h = R.negative(x)
        t = R.call_dps_packed("tests.halves", (h,), out_ty=[R.Tensor((7, 2), "float32"), R.Tensor((7, 3), "float32")])
        y = R.exp(t[1])
        return (t[0], y)
"""


def halves(x: Any, left: Any, right: Any) -> None:
    """The first two columns, and the others."""
    x, left, right = (torch.from_dlpack(t) for t in (x, left, right))
    left.copy_(x[:, :2])
    right.copy_(x[:, 2:])


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    if tvm_ffi.get_global_func("tests.halves", allow_missing=True) is None:
        tvm_ffi.register_global_func("tests.halves", halves)


@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("names", [["relax.matmul"], ["relax.nn.gelu"], []], ids=str)
def test_a_lowered_module_runs(names: list[str], backend: str) -> None:
    """Split by what their blocks say, `PrimFunc`s are split as the ops were, and nothing is warned of."""
    kept = {"relax.matmul", "relax.nn.gelu", "relax.multiply"} - set(names) if names else set()
    lowered = relax.transform.LegalizeOps(skip_ops=sorted(kept))(script(MODEL, PLAIN))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ComputedWhole)
        plan = dr.compile(lowered, shardings={"x": "S[0]"}, mesh=MESH)
    x, w = torch.randn(7, 5), torch.randn(5, 4)
    expected = torch.nn.functional.gelu(x @ w) * 2
    torch.testing.assert_close(plan(x, w, backend=backend), expected, atol=1e-5, rtol=1e-5)
    for stage in ("global", "sharded", "distributed", "ranked"):
        assert print_module(parse(plan.text(stage))) == print_module(plan.modules[stage])
    for op in plan.modules["sharded"].main.ops:
        assert all("S[0" in str(v.type) for v in op.results if v.dtensor.shape), op


@pytest.mark.parametrize("backend", ["torch", "tvm"])
def test_a_registered_function_is_called(backend: str) -> None:
    with pytest.warns(ComputedWhole, match="all of tests.halves"):
        plan = dr.compile(script(PACKED, PLAIN), shardings={"x": "S[1]"}, mesh=MESH)
    x = torch.randn(7, 5)
    left, right = plan(x, backend=backend)
    torch.testing.assert_close(left, -x[:, :2])
    torch.testing.assert_close(right, torch.exp(-x[:, 2:]))


def test_a_function_that_is_not_registered_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = dr.compile(
            script(PACKED.replace("tests.halves", "tests.missing"), PLAIN), shardings={"x": "R"}, mesh=MESH
        )
    with pytest.raises(RunError, match=r"no function 'tests.missing' is registered with TVM"):
        plan(torch.randn(7, 5))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["fused", "prepare", "main_0"])
def test_names_that_others_want_may_be_taken(name: str) -> None:
    """Of a kernel, whose sizes TVMScript writes in 32 bits, of an input, and of a value."""
    text = f"""
    @T.prim_func(s_tir=True)
    def {name}(X: T.Buffer((5, 7), "float32"), Y: T.Buffer((5, 7), "float32")):
        for i, j in T.grid(5, 7):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] + T.float32(1)

    @R.function
    def main({name}: R.Tensor((5, 6), "float32"), w: R.Tensor((6, 7), "float32")):
        cls = Module
        h = R.matmul({name}, w)
        {name}_1 = R.call_tir(cls.{name}, (h,), out_ty=R.Tensor((5, 7), "float32"))
        z = R.exp(R.tanh(R.add({name}_1, {name}_1)))
        return z
"""
    plan = dr.compile(script(text, PLAIN), shardings={name: "S[0]"}, mesh=MESH)
    x, w = torch.randn(5, 6), torch.randn(6, 7)
    expected = torch.exp(torch.tanh(2 * (x @ w + 1)))
    torch.testing.assert_close(plan(x, w, backend="tvm"), expected, atol=1e-5, rtol=1e-5)
