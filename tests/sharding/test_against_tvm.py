"""Propagation against TVM's `PropagateSharding`: the same small programs, the layout of the result by both.

``docs/tvm.md`` has the reasons in words, and is checked to name every one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax.interpret import interpret
from distir_relax.ir import DTensorType, Value
from distir_relax.layout import Shard

tvm = pytest.importorskip("tvm")

from tvm import relax  # noqa: E402
from tvm.relax.distributed import DeviceMesh, Placement  # noqa: E402

PENDING = "pending sums"
RESHAPE = "reshape"
NO_RULE = "ops without a rule"
TUPLE = "tuples"
CONFLICT = "rows and columns"
EXCHANGE = "two numbers of each row"

ERROR = {
    NO_RULE: "Cannot find the dist.FInferType attribute",
    TUPLE: "is not assigned device mesh",
    CONFLICT: "Sharding conflict detected",
}
"""What TVM says where its pass ends with an error."""


@dataclass(frozen=True)
class Case:
    """A program, its annotations by parameter, and the layout of its result: TVM's, ours, why they differ."""

    shapes: Sequence[tuple[int, ...]]
    marks: dict[int, str]
    body: Callable[..., Any]
    tvm: str
    ours: str
    reason: str = ""


def matmul(a: Any, b: Any) -> Any:
    return relax.op.matmul(a, b)


def mlp(x: Any, up: Any, down: Any) -> Any:
    return matmul(relax.op.nn.gelu(matmul(x, up)), down)


def attention(x: Any, q: Any, k: Any, v: Any, out: Any) -> Any:
    """Four heads of four, batch 2, six tokens."""

    def heads(w: Any) -> Any:
        return relax.op.permute_dims(relax.op.reshape(matmul(x, w), (2, 6, 4, 4)), [0, 2, 1, 3])

    scores = relax.op.nn.softmax(matmul(heads(q), relax.op.permute_dims(heads(k), [0, 1, 3, 2])), -1)
    mixed = relax.op.permute_dims(matmul(scores, heads(v)), [0, 2, 1, 3])
    return matmul(relax.op.reshape(mixed, (2, 6, 16)), out)


R = relax.op
LEFT, RIGHT = (8, 6), (6, 4)
MLP = [(8, 6), (6, 12), (12, 6)]
ATTENTION = [(2, 6, 16), *[(16, 16)] * 4]

CASES: dict[str, Case] = {
    "matmul, rows": Case([LEFT, RIGHT], {0: "S[0]"}, matmul, "S[0]", "S[0]"),
    "matmul, columns": Case([LEFT, RIGHT], {1: "S[1]"}, matmul, "S[1]", "S[1]"),
    "matmul, k": Case([LEFT, RIGHT], {0: "S[1]", 1: "S[0]"}, matmul, "R", "I[sum]", PENDING),
    "matmul, k of the left": Case([LEFT, RIGHT], {0: "S[1]"}, matmul, "R", "I[sum]", PENDING),
    "matmul, k of the right": Case([LEFT, RIGHT], {1: "S[0]"}, matmul, "R", "I[sum]", PENDING),
    "matmul, rows and columns": Case([LEFT, RIGHT], {0: "S[0]", 1: "S[1]"}, matmul, "error", "S[0]", CONFLICT),
    "matmul, batch": Case([(4, 8, 6), (4, 6, 4)], {0: "S[0]"}, matmul, "S[0]", "S[0]"),
    "matmul, replicated": Case([LEFT, RIGHT], {0: "R"}, matmul, "R", "R"),
    "add": Case([LEFT, LEFT], {0: "S[1]"}, R.add, "S[1]", "S[1]"),
    "add, broadcast": Case([LEFT, (6,)], {0: "S[1]"}, R.add, "S[1]", "S[1]"),
    "add, from the broadcast": Case([LEFT, (6,)], {1: "S[0]"}, R.add, "S[1]", "S[1]"),
    "add, uneven": Case([(7, 6), (7, 6)], {0: "S[0]"}, R.add, "S[0]", "S[0]"),
    "times a number": Case([LEFT], {0: "S[0]"}, lambda x: R.multiply(x, relax.const(2.0)), "S[0]", "S[0]"),
    "relu": Case([LEFT], {0: "S[0]"}, R.nn.relu, "S[0]", "S[0]"),
    "gelu": Case([LEFT], {0: "S[1]"}, R.nn.gelu, "S[1]", "S[1]"),
    "relu of a sum": Case([LEFT, RIGHT], {0: "S[1]"}, lambda a, b: R.nn.relu(matmul(a, b)), "R", "R"),
    "softmax, another dim": Case([LEFT], {0: "S[0]"}, lambda x: R.nn.softmax(x, -1), "S[0]", "S[0]"),
    "softmax, its own dim": Case([LEFT], {0: "S[1]"}, lambda x: R.nn.softmax(x, -1), "R", "S[1]", EXCHANGE),
    "permute_dims": Case([(2, 4, 6)], {0: "S[1]"}, lambda x: R.permute_dims(x, [1, 0, 2]), "S[0]", "S[0]"),
    "reshape to heads": Case([(2, 6, 16)], {0: "S[2]"}, lambda x: R.reshape(x, (2, 6, 4, 4)), "S[2]", "S[2]"),
    "reshape from heads": Case([(2, 6, 4, 4)], {0: "S[2]"}, lambda x: R.reshape(x, (2, 6, 16)), "S[2]", "S[2]"),
    "reshape, batch joined": Case([(4, 6, 8)], {0: "S[0]"}, lambda x: R.reshape(x, (24, 8)), "R", "S[0]", RESHAPE),
    "reshape, inner dim joined": Case([(4, 6, 8)], {0: "S[1]"}, lambda x: R.reshape(x, (24, 8)), "R", "S[0]", RESHAPE),
    "reshape, batch apart": Case([(8, 6)], {0: "S[0]"}, lambda x: R.reshape(x, (4, 2, 6)), "R", "S[0]", RESHAPE),
    "sum of the split dim": Case([LEFT], {0: "S[0]"}, lambda x: R.sum(x, 0), "R", "I[sum]", PENDING),
    "sum of another dim": Case([LEFT], {0: "S[0]"}, lambda x: R.sum(x, 1), "S[0]", "S[0]"),
    "max of the split dim": Case([LEFT], {0: "S[0]"}, lambda x: R.max(x, 0), "R", "I[max]", PENDING),
    "mlp": Case(MLP, {1: "S[1]"}, mlp, "R", "I[sum]", PENDING),
    "mlp, batch": Case(MLP, {0: "S[0]"}, mlp, "S[0]", "S[0]"),
    "attention, heads": Case(ATTENTION, {1: "S[1]"}, attention, "R", "I[sum]", PENDING),
    "attention, batch": Case(ATTENTION, {0: "S[0]"}, attention, "R", "S[0]", RESHAPE),
    "concat along the split": Case([LEFT, LEFT], {0: "S[0]"}, lambda a, b: R.concat([a, b], 0), "error", "S[0]", TUPLE),
    "split across": Case([LEFT], {0: "S[0]"}, lambda x: R.split(x, 3, 1)[2], "error", "S[0]", NO_RULE),
    "take": Case([LEFT], {0: "S[1]"}, lambda x: R.take(x, relax.const([1, 5], "int64"), 0), "error", "S[1]", NO_RULE),
    "take, split rows": Case(
        [LEFT], {0: "S[0]"}, lambda x: R.take(x, relax.const([1, 5], "int64"), 0), "error", "I[sum]", NO_RULE
    ),
    "layer_norm": Case(
        [LEFT, (6,), (6,)], {0: "S[0]"}, lambda x, w, b: R.nn.layer_norm(x, w, b, [-1]), "error", "S[0]", NO_RULE
    ),
    "expand_dims": Case([LEFT], {0: "S[0]"}, lambda x: R.expand_dims(x, 0), "error", "S[1]", NO_RULE),
    "cumsum": Case([LEFT], {0: "S[0]"}, lambda x: R.cumsum(x, 1), "error", "S[0]", NO_RULE),
}


@pytest.mark.parametrize("name", CASES)
def test_the_layout_of_the_result(name: str) -> None:
    case = CASES[name]
    assert (case.tvm != case.ours) == bool(case.reason)
    module = program(case)
    if case.tvm == "error":
        with pytest.raises(Exception, match=ERROR[case.reason]):
            theirs(module)
    else:
        assert theirs(module) == case.tvm
    plan = dr.compile(module)
    assert ours(plan) == case.ours
    check_values(plan)


@pytest.mark.parametrize("name", ["matmul, columns", "mlp", "relu", "reshape to heads"])
def test_what_tvm_has_propagated_is_taken_as_it_is(name: str) -> None:
    case = CASES[name]
    propagated = relax.distributed.transform.PropagateSharding()(program(case))
    plan = dr.compile(propagated)
    assert ours(plan) == case.ours
    check_values(plan)


def test_uneven_dims_end_in_tvms_lowering_and_run_here() -> None:
    case = CASES["add, uneven"]
    passes = relax.distributed.transform
    propagated = relax.transform.LegalizeOps()(passes.PropagateSharding()(program(case)))
    local = passes.LowerGlobalViewToLocalView()(passes.LegalizeRedistribute()(propagated))
    with pytest.raises(Exception, match="divisible by the num_workers"):
        passes.LowerDistIR()(local)
    check_values(dr.compile(program(case)))


def test_the_document_gives_every_reason() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tvm.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert {case.reason for case in CASES.values()} - {""} <= set(rows)


def program(case: Case) -> Any:
    """The case as a Relax module for two devices, with `annotate_sharding` on the marked parameters."""
    mesh = DeviceMesh((2,), tvm.ir.Range(0, 2))
    builder = relax.BlockBuilder()
    parameters = [relax.Var(f"p{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(case.shapes)]
    with builder.function("main", parameters):
        values = [
            builder.emit(R.distributed.annotate_sharding(p, mesh, Placement.from_text(case.marks[i])))
            if i in case.marks
            else p
            for i, p in enumerate(parameters)
        ]
        builder.emit_func_output(builder.emit(case.body(*values), name_hint="out"))
    return tvm.IRModule(dict(builder.get().functions.items()), global_infos={"mesh": [mesh]})


def theirs(module: Any) -> str:
    """The layout that TVM's pass gives the result."""
    propagated = relax.distributed.transform.PropagateSharding()(module)
    return str(propagated["main"].ret_ty.placement).strip('"')


def ours(plan: dr.Plan) -> str:
    """The layout that our propagation gives the result where it is computed, without sizes."""
    main = plan.modules["sharded"].main
    made_by = {value.name: op for op in main.ops for value in op.results}
    value = main.outputs[0].value
    while made_by[value.name].name == "redistribute":
        [value] = made_by[value.name].operands
    return layout(value)


def layout(value: Value) -> str:
    assert isinstance(value.type, DTensorType)
    [placement] = value.dtensor.placements
    return f"S[{placement.dim}]" if isinstance(placement, Shard) else str(placement)


def check_values(plan: dr.Plan) -> None:
    """The plan, run on two ranks, gives what the program gives whole."""
    generator = torch.Generator().manual_seed(0)
    main = plan.modules["global"].main
    data: dict[str, torch.Tensor] = dict(plan.imported.tensors)
    for item in main.inputs:
        if item.value.name not in data:
            data[item.value.name] = torch.randn(*item.value.tensor.shape, generator=generator)
    [expected] = interpret(main, data).values()
    inputs = [data[item.value.name] for item in main.inputs if item.role == "input"]
    torch.testing.assert_close(plan(*inputs), expected, atol=1e-5, rtol=1e-5)
