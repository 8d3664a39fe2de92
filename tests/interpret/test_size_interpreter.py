"""Programs on tensors of symbolic sizes give, at values of the symbols, what torch computes from these numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distir_relax.interpret.global_executor import interpret
from distir_relax.interpret.size_interpreter import interpret_sizes
from distir_relax.ir import TensorType
from distir_relax.layout import Guards, Symbol, evaluate_size, guarding, size_of
from distir_relax.ops import Builder, SizeArray, Trait, entries, size_array

BATCH, LENGTH = size_of(Symbol("batch", 1)), size_of(Symbol("length", 2, 64))
VECTOR = size_array([BATCH, 6, LENGTH], "int64")
MATRIX = size_array([[BATCH * LENGTH, 4, 2 * LENGTH], [LENGTH + 1, BATCH, 8]], "int64")
POSITIVE = np.array([2, 3, 5])
MASK = np.array([True, False, True])
FLOATS = SizeArray(MATRIX.entries, "float32")

# Of each op that computes sizes: operands and attributes.
COMPUTED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    **{name: ([MATRIX, VECTOR], {}) for name in ("add", "subtract", "multiply", "maximum", "minimum")},
    **{name: ([MATRIX, POSITIVE], {}) for name in ("floor_divide", "mod")},
    "divide": ([SizeArray(MATRIX.entries * 30, "float32"), POSITIVE.astype(np.float32)], {}),
    **{name: ([MATRIX, np.array([0, -1, 999_999_999])], {}) for name in ("equal", "not_equal")},
    **{name: ([MATRIX, np.array(-3)], {}) for name in ("less", "less_equal", "greater", "greater_equal")},
    "where": ([MASK, MATRIX, VECTOR], {}),
    **{name: ([VECTOR], {}) for name in ("negative", "abs", "square", "sign")},
    **{name: ([FLOATS], {}) for name in ("floor", "ceil", "round", "trunc")},
    "astype": ([MATRIX], {"dtype": "float32"}),
    "constant": ([], {"value": BATCH + 1, "dtype": "int32"}),
    **{name: ([MATRIX], {"axis": (0, 1), "keepdims": True}) for name in ("sum", "max", "min")},
    "prod": ([MATRIX], {"axis": 1, "keepdims": False}),
}
# Of each op that only moves elements.
MOVED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "reshape": ([MATRIX], {"shape": (3, 2)}),
    "repeat_elements": ([VECTOR], {"axis": 0, "repeats": (2, 1, 3)}),
    "broadcast_to": ([VECTOR], {"shape": (2, 3)}),
    "strided_slice": ([MATRIX], {"axes": (1,), "begin": (0,), "end": (3,), "strides": (2,)}),
    "permute_dims": ([MATRIX], {"axes": (1, 0)}),
    "append": ([MATRIX, np.array([[1, 2, 3]])], {"axis": 0}),
    "concat": ([MATRIX, np.array([[1, 2, 3]])], {"axis": 0}),
    "split": ([MATRIX], {"sizes": (1, 2), "axis": 1}),
    "flip": ([MATRIX], {"axis": 1}),
    "take": ([MATRIX, np.array([2, 0, 0])], {"axis": 1}),
}
VALUES = [{"batch": 1, "length": 2}, {"batch": 7, "length": 3}, {"batch": 128, "length": 64}]


def test_every_op_that_knows_sizes_has_a_case() -> None:
    assert {entry.name for entry in entries() if entry.semantics.sizes} == COMPUTED.keys()
    assert {entry.name for entry in entries() if Trait.MOVES in entry.traits} == MOVED.keys()


@pytest.mark.parametrize("name", [*COMPUTED, *MOVED])
def test_results_at_values_are_those_of_torch(name: str) -> None:
    operands, attrs = (COMPUTED | MOVED)[name]
    builder = Builder()
    values = [builder.input(f"x{i}", TensorType(tuple(x.shape), str(x.dtype))) for i, x in enumerate(operands)]
    results = builder.emit(name, *values, **attrs)
    results = results if isinstance(results, tuple) else (results,)
    function = builder.function("main", [(str(i), value) for i, value in enumerate(results)])
    known = {f"x{i}": x if isinstance(x, SizeArray) else torch.from_numpy(x) for i, x in enumerate(operands)}
    with guarding(Guards()) as guards:
        found = interpret_sizes(function, known)
    assert not guards.found
    for numbers in VALUES:
        inputs = {f"x{i}": at(x, numbers) for i, x in enumerate(operands)}
        if not operands:
            expected = {"0": torch.tensor(numbers["batch"] + 1, dtype=torch.int32)}
        else:
            expected = interpret(function, inputs)
        for label, wanted in expected.items():
            torch.testing.assert_close(at(found[label], numbers), wanted)


def at(x: Any, numbers: dict[str, int]) -> torch.Tensor:
    """A tensor at values of the symbols."""
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    elements = [evaluate_size(n, numbers) for n in x.entries.reshape(-1)]
    return torch.tensor(elements, dtype=getattr(torch, x.dtype)).reshape(x.shape)


def test_fractions_and_other_ops_are_refused() -> None:
    for name, operands in (
        ("divide", [FLOATS, np.array(7.0, np.float32)]),
        ("multiply", [FLOATS, np.array(0.5, np.float32)]),
        ("sqrt", [FLOATS]),
        ("take", [np.arange(9), VECTOR]),
    ):
        builder = Builder()
        values = [builder.input(f"x{i}", TensorType(tuple(x.shape), str(x.dtype))) for i, x in enumerate(operands)]
        result = builder.emit(name, *values, **({"axis": 0} if name == "take" else {}))
        known = {f"x{i}": x if isinstance(x, SizeArray) else torch.from_numpy(x) for i, x in enumerate(operands)}
        with pytest.raises(NotImplementedError, match=r"a fraction|sqrt of symbolic sizes|take by symbolic indices"):
            interpret_sizes(builder.function("main", [("y", result)]), known)
