"""What TVM refuses, or computes otherwise than torch, is written so that it does not: under TVM's own pipeline."""

from __future__ import annotations

import math

import pytest
import torch
from op_samples import Sample, check_against_reference, of, sample_module

from distir_relax.ir import TensorType
from distir_relax.lowering.emit.relax import to_relax

tvm = pytest.importorskip("tvm")

NUMBERS = [1.0, -1.0, 0.3, 6.0, -7.5, 0.0, 5.25, 1e30, -0.1]
DIVISORS = [0.1, -0.1, 2.0, 0.7, -3.0, math.inf, 0.0]
INTEGERS = [0, 1, -1, 2, -2, 3, -3, 7, -11]
EXPONENTS = [0, 1, 2, 5, 63, 64, -1, -2]


def pairs(a: list[float], b: list[float], dtype: str) -> list[torch.Tensor]:
    """Each of `a` with each of `b`."""
    kind = getattr(torch, dtype)
    return [torch.tensor(a, dtype=kind)[:, None], torch.tensor(b, dtype=kind)]


def normal(*shapes: tuple[int, ...], dtype: str) -> list[torch.Tensor]:
    """Numbers around 1, so that sums are far from their terms."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) + 1).to(getattr(torch, dtype)) for shape in shapes]


def run(name: str, operands: list[torch.Tensor], attrs: dict[str, object], tolerance: float) -> None:
    """Fail unless TVM gives what torch does."""
    from tvm import relax

    kinds = [of(str(x.dtype).removeprefix("torch."), *x.shape) for x in operands]
    sample: Sample = (name, kinds, attrs)  # type: ignore[assignment]
    module, ops = sample_module([sample])
    machine = relax.VirtualMachine(relax.build(to_relax(module), tvm.target.Target("llvm")), tvm.cpu())
    results = machine["main_0"](*(tvm.runtime.from_dlpack(x) for x in operands))
    check_against_reference(ops, [operands], [torch.from_dlpack(y) for y in results], tolerance)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("floor_divide", "float32"), *((name, "float64") for name in ("floor_divide", "mod", "divide", "not_equal"))],
)
def test_quotients_of_floats(name: str, dtype: str) -> None:
    run(name, pairs([*NUMBERS, math.nan], [*DIVISORS, math.nan], dtype), {}, 1e-15)


def test_powers_of_integers_wrap_around() -> None:
    run("power", pairs(INTEGERS, EXPONENTS, "int32"), {}, 0.0)


@pytest.mark.parametrize("name", ["floor_divide", "mod"])
def test_quotients_of_integers(name: str) -> None:
    run(name, pairs(INTEGERS, [2, -2, 3, -7, 1], "int64"), {}, 0.0)


@pytest.mark.parametrize("name", ["equal", "not_equal"])
def test_truth_values_are_compared(name: str) -> None:
    run(name, [torch.tensor([[True], [False]]), torch.tensor([True, False])], {}, 0.0)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-14), ("float32", 1e-5), ("bfloat16", 0), ("float16", 0)]
)
@pytest.mark.parametrize("axes", [(2,), (1, 2)], ids=str)
def test_norms_of_every_float(axes: tuple[int, ...], dtype: str, tolerance: float) -> None:
    inner = (5, 7)[2 - len(axes) :]
    attrs = {"axes": axes, "epsilon": 1e-5}
    run("nn.layer_norm", normal((3, 5, 7), inner, inner, dtype=dtype), attrs, tolerance or 4e-3)
    run("nn.rms_norm", normal((3, 5, 7), inner, dtype=dtype), attrs, tolerance or 4e-3)
    run("rms_norm_rounded", normal((3, 5, 7), inner, dtype=dtype), attrs, tolerance or 8e-3)
    for norm in ("layer_norm", "rms_norm"):
        run(f"{norm}_grad", normal((3, 5, 7), inner, (3, 5, 7), dtype=dtype), attrs, tolerance or 8e-3)
        of_weight = {**attrs, "dtype": dtype}
        run(f"{norm}_weight_grad", normal((3, 5, 7), (3, 5, 7), dtype=dtype), of_weight, tolerance or 8e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_are_summed_in_float32(dtype: str) -> None:
    """Of 4,096 numbers around 1 a narrow sum stops at 256 or 2,048."""
    run("matmul", normal((3, 4096), (4096, 2), dtype=dtype), {}, 1e-2)
    run("linear", normal((3, 4096), (2, 4096), dtype=dtype), {}, 1e-2)
    run("sum", normal((3, 4096), dtype=dtype), {"axis": (1,), "keepdims": False}, 1e-2)


@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_a_sum_of_nothing_is_zero(name: str) -> None:
    run(name, [torch.ones(3, 0), torch.ones(*((0, 5) if name == "matmul" else (5, 0)))], {}, 0.0)


def test_integers_divided_by_zero_are_zero() -> None:
    from tvm import relax

    module, _ = sample_module([("floor_divide", [of("int64", 3), of("int64", 3)], {}),
                               ("mod", [of("int64", 3), of("int64", 3)], {})])  # fmt: skip
    machine = relax.VirtualMachine(relax.build(to_relax(module), tvm.target.Target("llvm")), tvm.cpu())
    a, b = torch.tensor([7, -7, 0]), torch.tensor([2, 0, 0])
    results = machine["main_0"](*(tvm.runtime.from_dlpack(x) for x in (a, b, a, b)))
    assert [torch.from_dlpack(y).tolist() for y in results] == [[3, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("number", [0.0, -0.0, 0.1, 3.0])
@pytest.mark.parametrize("name", ["floor_divide", "mod", "divide"])
def test_a_divisor_that_is_known(name: str, number: float) -> None:
    from distir_relax.ir import Function, Input, Module, Op, Output, Value

    x, c, y = (Value(n, TensorType(shape, "float64")) for n, shape in (("x", (9,)), ("c", ()), ("y", (9,))))
    ops = (Op("constant", (), (c,), {"value": number, "dtype": "float64"}), Op(name, (x, c), (y,), {}))
    module = Module("ranked", (Function("main", (Input(x, "input"),), ops, (Output("y", y),)),), ranks=("main",))
    from tvm import relax

    data = torch.tensor(NUMBERS, dtype=torch.float64)
    machine = relax.VirtualMachine(relax.build(to_relax(module), tvm.target.Target("llvm")), tvm.cpu())
    [found] = machine["main"](tvm.runtime.from_dlpack(data))
    divisor = torch.tensor(number, dtype=torch.float64)
    check_against_reference([ops[1]], [[data, divisor]], [torch.from_dlpack(found)], 1e-15)
