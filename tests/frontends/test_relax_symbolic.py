"""Relax modules with symbolic dims: one program for all sizes, equal to the module itself run by TVM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import tvm
from tvm import relax

import distir_relax as dr
from distir_relax.errors import DistIRError, ImportModelError, RunError, UnsupportedOpError
from distir_relax.frontends.relax import import_relax
from distir_relax.layout import Symbol
from tests.frontends.relax_modules import HEAD, script

PLAIN = HEAD[: HEAD.index("    I.module_attrs")]

SHAPES = """
    @R.function
    def main(x: R.Tensor(("n", "m", 6), "float32"), w: R.Tensor((6, 8), "float32"), b: R.Tensor(("n",), "float32")):
        R.func_attr({"tir_var_upper_bound": {"n": 64}})
        n = T.int64()
        m = T.int64()
        k = T.int64()
        h = R.matmul(x, w)
        f = R.reshape(h, R.shape([n * m, 2, 4]))
        g = R.match_cast(f, R.Tensor((k, 2, 4), "float32"))
        s = R.strided_slice(g, (0,), (k // 2,), (k,))
        p = R.reshape(R.permute_dims(g, (1, 0, 2)), R.shape([2, k * 4]))
        q = R.add(b, R.arange(T.int64(0), n, T.int64(1), "float32"))
        z = R.zeros(R.shape([m, 3]), "float32")
        return s, p, q, z
"""

CALLS = """
    @R.function
    def main(x: R.Tensor(("n", 6), "float32"), w: R.Tensor((6, 6), "float32")):
        n = T.int64()
        a = Module.half(x, w)
        b = Module.half(R.concat((x, a), axis=0), w)
        return R.add(R.strided_slice(b, (0,), (0,), (n,)), a)

    @R.function(private=True)
    def half(y: R.Tensor(("m", 6), "float32"), w: R.Tensor((6, 6), "float32")) -> R.Tensor(("m", 6), "float32"):
        m = T.int64()
        z = R.reshape(R.matmul(y, w), R.shape([m * 2, 3]))
        return R.reshape(R.nn.relu(z), R.shape([m, 6]))
"""


@cache
def machine(module: Any) -> Any:
    """The module, compiled by TVM alone."""
    return relax.VirtualMachine(relax.build(module, "llvm"), tvm.cpu())


def check(module: Any, plan: dr.Plan, inputs: Sequence[torch.Tensor]) -> None:
    """Fail unless the plan gives what TVM does with the module, on both backends."""
    results = machine(module)["main"](*(tvm.runtime.tensor(x.numpy()) for x in inputs))
    expected = [torch.from_numpy(y.numpy()) for y in (results if isinstance(results, tvm.ir.Array) else [results])]
    for backend in ("torch", "tvm"):
        found = plan(*inputs, backend=backend)
        for got, value in zip(found if isinstance(found, tuple) else [found], expected, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
def test_computed_shapes(ranks: int) -> None:
    module = script(SHAPES, PLAIN)
    plan = dr.compile(module, mesh=ranks, shardings={"x": "S[0]"} if ranks > 1 else {})
    for n, m in ((1, 1), (2, 9), (3, 7), (5, 4)):
        check(module, plan, [torch.randn(n, m, 6), torch.randn(6, 8), torch.randn(n)])


def test_functions_with_sizes_of_their_own() -> None:
    module = script(CALLS, PLAIN)
    plan = dr.compile(module, mesh=3, shardings={"x": "S[0]"})
    for n in (1, 2, 9):
        check(module, plan, [torch.randn(n, 6), torch.randn(6, 6)])


def test_kernels_of_symbolic_sizes() -> None:
    text = SHAPES.split("        f = ")[0] + "        return R.sum(R.nn.relu(h), axis=[1])\n"
    module = relax.transform.LegalizeOps()(script(text.replace("        k = T.int64()\n", ""), PLAIN))
    with pytest.warns(UserWarning, match="every device computes all of matmul"):
        plan = dr.compile(module, mesh=2, shardings={"x": "S[0]"})
    for n, m in ((1, 1), (3, 7)):
        check(module, plan, [torch.randn(n, m, 6), torch.randn(6, 8), torch.randn(n)])


def test_symbols_have_the_bounds_of_the_function_or_of_the_user() -> None:
    module = script(SHAPES, PLAIN)
    assert dr.compile(module, mesh=1).bundle().manifest.symbols == (Symbol("m", 1), Symbol("n", 1, 64))
    assert dr.compile(module, mesh=1, dims={"m": (2, 9), "n": 3}).bundle().manifest.symbols == (Symbol("m", 2, 9),)
    assert dr.compile(module, mesh=1, input_shapes={"b": (3,)}).bundle().manifest.symbols == (Symbol("m", 1),)
    plan = dr.compile(module, mesh=1, dims={"m": (2, 9)})
    with pytest.raises(RunError, match="expected m of at least 2 and at most 9, found 1"):
        plan(torch.randn(3, 1, 6), torch.randn(6, 8), torch.randn(3))


def test_sizes_that_a_match_cast_asserts_are_checked_by_each_call() -> None:
    text = """
    @R.function
    def main(x: R.Tensor(("n", "m"), "float32")):
        n = T.int64()
        m = T.int64()
        y = R.match_cast(x, R.Tensor((m, m), "float32"))
        return R.multiply(y, y)
"""
    plan = dr.compile(script(text, PLAIN), mesh=1, check=True)
    x = torch.randn(5, 5)
    torch.testing.assert_close(plan(x), x * x)
    with pytest.raises(RunError, match="expected m == n"):
        plan(torch.randn(5, 4))


def test_weights_take_their_sizes_from_their_data() -> None:
    text = """
    @R.function
    def main(x: R.Tensor(("n", "k"), "float32"), w: R.Tensor(("k", "m"), "float32")):
        R.func_attr({"num_input": 1})
        return R.matmul(x, w)
"""
    w = torch.randn(6, 7)
    plan = dr.compile(script(text, PLAIN), mesh=1, params=[w])
    assert plan.bundle().manifest.inputs[0].shape[1] == 6
    x = torch.randn(3, 6)
    torch.testing.assert_close(plan(x), x @ w)
    with pytest.raises(ImportModelError, match=r"the dims m of w are left open"):
        import_relax(script(text, PLAIN))


def test_symbols_that_no_input_has_as_a_size() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tvm.tirx.Var("n", "int64") * 2, 6), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.nn.relu(x)))
    with pytest.raises(ImportModelError, match=r"the dims n of x are left open[\s\S]*input_shapes"):
        import_relax(builder.get())


def test_shapes_that_do_not_fit_for_every_size() -> None:
    with pytest.raises(DistIRError, match=r"@main, \w+: reshape cannot take"):
        import_relax(script(SHAPES.replace("k * 4", "k * 5"), PLAIN))


def test_an_unknown_dim_and_dynamic_shapes() -> None:
    module = script(CALLS, PLAIN)
    with pytest.raises(ImportModelError, match=r"the model has no dim 'batch'[\s\S]*its dims are n"):
        dr.compile(module, mesh=1, dims={"batch": 3})
    with pytest.raises(ImportModelError, match="a TVM module has its own symbolic dims"):
        dr.compile(module, dynamic_shapes={"x": {0: "batch"}})


def test_kernels_that_take_sizes_as_arguments() -> None:
    text = """
    @R.function
    def main(x: R.Tensor(("n", 6), "float32")):
        n = T.int64()
        return R.nn.relu(x), R.zeros(R.shape([(n + 1) // 2, 3]), "float32")
"""
    module = relax.transform.LegalizeOps()(script(text, PLAIN))
    with pytest.raises(UnsupportedOpError, match="a call with sizes as arguments"):
        import_relax(module)
