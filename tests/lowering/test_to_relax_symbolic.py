"""Ops of symbolic sizes in Relax: emitted and compiled once, and run at several sizes, by TVM and by the backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
from op_samples import Sample, check_against_reference, f32, local_ops, of, operand_data, sample_module, samples

from distir_relax.errors import DistIRError, UnsupportedOpError
from distir_relax.ir import Attribute, Op, print_module
from distir_relax.ir.symbols import specialize_op
from distir_relax.layout import DeviceMesh, Symbol, balanced_part, minimum, size_of
from distir_relax.lowering.emit.relax import to_relax
from distir_relax.ops import evaluate
from distir_relax.runtime.transports.threads import ThreadWorld

tvm = pytest.importorskip("tvm")

SYMBOL = Symbol("n", 0, 40)
N = size_of(SYMBOL)
HALF, REST = balanced_part(N, 2, 0), balanced_part(N, 2, 1)
SIZES = (0, 1, 2, 7, 33)


def computed() -> list[Sample]:
    """Ops with symbolic attributes."""
    every: dict[str, Attribute] = {"axes": (1,), "strides": (1,)}
    tail: dict[str, Attribute] = {"rank": 2, "dim": 1, "value": 0.5, "shape": (3, 2 * REST)}
    return [
        ("constant", [], {"value": N + 2, "dtype": "float32"}),
        ("constant", [], {"value": REST, "dtype": "int64"}),
        ("arange", [], {"start": 0, "end": HALF, "stride": 1, "dtype": "int64"}),
        ("arange", [], {"start": REST, "end": N, "stride": 1, "dtype": "float32"}),
        ("reshape", [f32(3, N, 4)], {"shape": (N, 12)}),
        ("reshape", [f32(N, HALF, 2)], {"shape": (N * HALF, 1, 2)}),
        ("broadcast_to", [f32(3, 1)], {"shape": (HALF, 3, N)}),
        ("strided_slice", [f32(3, N)], {**every, "begin": (HALF,), "end": (N,)}),
        ("strided_slice", [f32(3, N)], {**every, "begin": (0,), "end": (minimum(N, 2),)}),
        ("strided_slice", [f32(3, 2 * N + 1)], {**every, "begin": (1,), "end": (2 * N + 1,), "strides": (2,)}),
        ("concat", [f32(HALF, 3), f32(REST, 3), f32(2, 3)], {"axis": 0}),
        ("split", [f32(3, N)], {"axis": 1, "sizes": (HALF, REST)}),
        ("pad", [f32(3, REST)], {"low": (0, 1), "high": (2, HALF), "value": 1.5}),
        ("slices", [f32(3, 2 * N)], {"dim": 1, "intervals": ((0, HALF), (N, N + REST))}),
        ("pad_tail", [f32(3, 2 * REST)], {**tail, "blocks": 2, "size": REST, "padded": HALF}),
        ("pad_tail", [f32(3, 2 * REST)], {**tail, "blocks": 1, "size": 2 * REST, "padded": 2 * HALF}),
        ("trim_tail", [f32(3, 2 * HALF)],
         {**tail, "shape": (3, 2 * HALF), "blocks": 2, "size": REST, "padded": HALF}),
        ("check_indices", [of("int64", 3)], {"low": 0, "high": N + 5, "user": "take"}),
        ("uniform", [of("int64"), of("int64", N), of("int64", 5)], {"dtype": "float32"}),
        ("indexed", [],
         {"value": "i2 <= i0 + n", "names": ("n",), "sizes": (REST,), "shape": (3, 1, 2 * N), "dtype": "bool"}),
        ("matmul", [f32(HALF, 5), f32(5, N)], {}),
        ("matmul", [f32(3, 1, REST, N), f32(HALF, N, HALF)], {}),
        ("linear", [f32(2, REST, 5), f32(19, 5)], {}),
    ]  # fmt: skip


def with_symbol(sample: Sample) -> Iterator[Sample]:
    """Yield the sample with `N`, or `N` + 5, for each size of its first operand, if it can have any such size."""
    _, types, attrs = sample
    # Attributes of these ops are numbers of elements too. TVM takes minutes for volumes of symbolic sizes.
    is_left_out = attrs.keys() & {"intervals", "blocks"} or any(len(t.shape) > 4 or t.dtype == "float16" for t in types)
    for old in dict.fromkeys(types[0].shape if types and not is_left_out else ()):
        yield from islice(filter(runs, (_replaced(sample, old, new) for new in (N, N + 5))), 1)


def _replaced(sample: Sample, old: int, new: int) -> Sample:
    def symbolic(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new if n == old else n for n in shape)

    name, types, attrs = sample
    operands = [replace(t, shape=symbolic(t.shape)) for t in types]
    return name, operands, {key: symbolic(n) if key == "shape" else n for key, n in attrs.items()}


def runs(sample: Sample) -> bool:
    """Whether the op takes these types, and its indices are valid at all sizes."""
    try:
        _, ops = sample_module([sample])
        for size in SIZES:
            [op], [operands] = at(ops, size), operand_data(at(ops, size))
            evaluate(op, operands)
    except (DistIRError, NotImplementedError):
        return False
    return True


def is_emitted(sample: Sample) -> bool:
    """Whether the sample has a form in Relax."""
    try:
        to_relax(sample_module([sample])[0])
    except UnsupportedOpError:
        return False
    return True


@cache
def symbolic_samples() -> list[Sample]:
    """Samples of symbolic sizes: of each sample one, whose symbolic dim differs from sample to sample."""
    found = []
    for number, sample in enumerate(samples()):
        symbolic = list(filter(is_emitted, with_symbol(sample)))
        found += symbolic[number % len(symbolic) :][:1] if symbolic else []
    return [*computed(), *found]


def at(ops: list[Op], size: int) -> list[Op]:
    """Return ops of this size."""
    return [specialize_op(op, {SYMBOL.name: size}) for op in ops]


def test_most_ops_have_a_form_of_symbolic_sizes() -> None:
    assert local_ops() - {name for name, _, _ in symbolic_samples()} <= {
        *("call_tir", "call_dps_packed", "group_numbers", "next_seed"),
        # Volumes are left out.
        *(f"nn.{op}" for op in ("conv3d", "conv3d_transpose", "conv3d_weight_grad", "max_pool3d", "avg_pool3d")),
        *(f"nn.adaptive_{kind}3d" for kind in ("avg_pool", "max_pool")),
        *("nn.adaptive_max_pool3d_places", "nn.max_pool3d_places", "image.resize3d"),
    }


def test_a_dim_that_an_op_needs_to_know_is_named() -> None:
    attrs: dict[str, Attribute] = {"clip": float("inf"), "reverse": False, "extras": (), "activations": ("relu",)}
    module, _ = sample_module([("nn.rnn", [f32(N, 4, 5), f32(5, 5), f32(4, 5)], attrs)])
    with pytest.raises(UnsupportedOpError, match=r"nn\.rnn has no form in TVM for dim 0 of size n"):
        to_relax(module)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("part", range(5))
def test_every_op_means_in_the_tvm_backend_what_it_means_in_the_op_table(
    monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    from distir_relax.runtime.backends.tvm import TvmProgram, compile
    from distir_relax.runtime.backends.tvm.compile import ProgramText, compile_program

    # What an op means does not depend on how far LLVM optimises it, which takes most of the time. Ops of fixed sizes
    # are optimised (`test_to_relax_compiled.py`).
    _, host = compile.machine(1)
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
    monkeypatch.setattr(compile, "machine", lambda threads: (target, host))
    module, ops = sample_module(symbolic_samples()[part::5])
    names = [item.value.name for item in module.main.inputs]
    comm = ThreadWorld(DeviceMesh((1,), ("tp",))).communicator(0)
    text = ProgramText(print_module(module), "main_0")
    program = TvmProgram(compile_program(text), comm, names, {}, {}, "samples")
    for size in SIZES:
        operands = operand_data(at(ops, size))
        data = [x for values in operands for x in values]
        check_against_reference(at(ops, size), operands, program(*data, sizes={"n": size}), tolerance=3e-6)
