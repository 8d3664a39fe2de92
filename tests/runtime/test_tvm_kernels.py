"""Kernels and functions of the tvm backend against numpy and torch, at sizes that divide by nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

tvm = pytest.importorskip("tvm")

MACHINES = {"wide": (64, 12, 1), "narrow": (32, 6, 1), "threads": (64, 12, 2)}


def _machine(name: str) -> Any:
    from distir_relax.runtime.backends.tvm.kernels import Machine

    return Machine(*MACHINES[name])


def _run(kernel: Any, *operands: np.ndarray[Any, Any], result: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Compile and run a kernel; its result's buffer holds NaN before."""
    from distir_relax.runtime.backends.tvm.compile import machine

    target, _ = machine(1)
    function = tvm.compile(tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")}), target)["main"]
    y = tvm.runtime.tensor(np.full(result, np.nan, operands[0].dtype))
    function(*[tvm.runtime.tensor(x) for x in operands], y)
    found: np.ndarray[Any, Any] = y.numpy()
    return found


def _random(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.drawn(11)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5, 7), (7, 3)),
        ((5, 3), (3, 31)),
        ((5, 4), (4, 1)),
        ((13, 9), (9, 17)),
        ((3, 5, 7), (3, 7, 9)),
        ((2, 1, 5, 7), (3, 7, 33)),
        ((1, 6, 1, 16), (1, 6, 16, 77)),
        ((5, 7), (2, 7, 65)),
        ((2, 3, 5, 7), (7, 15)),
        ((128, 16), (16, 33)),
        ((1, 64), (64, 257)),
    ],
    ids=str,
)
@pytest.mark.parametrize("host", MACHINES)
def test_batched_products_of_any_two_shapes(a: tuple[int, ...], b: tuple[int, ...], host: str) -> None:
    from distir_relax.runtime.backends.tvm import kernels

    x, y = _random(*a), _random(*b)
    expected = x @ y
    found = _run(kernels.product(a, b, "float32", _machine(host)), x, y, result=expected.shape)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 16), (4, 37), (2, 129)], ids=str)
def test_softmax_and_layer_norm(shape: tuple[int, int]) -> None:
    from distir_relax.runtime.backends.tvm import kernels

    x, scale, shift = _random(*shape) * 9, _random(shape[1]), _random(shape[1])
    machine = _machine("wide")
    expected = torch.softmax(torch.from_numpy(x), 1).numpy()
    found = _run(kernels.softmax(*shape, "float32", machine), x, result=shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    tensors = [torch.from_numpy(a) for a in (x, scale, shift)]
    expected = torch.nn.functional.layer_norm(tensors[0], (shape[1],), tensors[1], tensors[2], 1e-5).numpy()
    found = _run(kernels.layer_norm(*shape, "float32", 1e-5, machine), x, scale, shift, result=shape)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def test_rows_that_softmax_masks_in_part_are_exact() -> None:
    from distir_relax.runtime.backends.tvm import kernels

    x = np.array([[0.0, -np.inf, 0.0], [-1e30, 3.0, -1e30], [1e4, 1e4, -1e4]], dtype="float32")
    found = _run(kernels.softmax(3, 3, "float32", _machine("wide")), x, result=(3, 3))
    np.testing.assert_allclose(found, [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0.5, 0]], rtol=1e-6)


FUNCTIONS = {
    "exp": (torch.exp, 3e-7),
    "tanh": (torch.tanh, 6e-7),
    "erf": (torch.erf, 6e-7),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_good_as_float32(name: str) -> None:
    from tvm import te

    from distir_relax.runtime.backends.tvm import vector_functions

    function, tolerance = FUNCTIONS[name]
    edges = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-8, 88.5, 88.9, -87.2, -88.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan]
    )
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.linspace(-85, 88, 501), edges])
    placeholder = te.placeholder((len(x),), "float32")
    result = te.compute(placeholder.shape, lambda i: getattr(vector_functions, name)(placeholder(i)))
    found = torch.from_numpy(_run(te.create_prim_func([placeholder, result]), x.numpy(), result=(len(x),)))
    torch.testing.assert_close(
        found, function(x), rtol=tolerance, atol=2e-7 if name != "exp" else 2e-38, equal_nan=True
    )
