"""The sharded stage in TVM's distributed dialect: typed listings in, `R.DTensor` modules out, and back to the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import PlacementError, UnsupportedOpError, VerificationError
from distir_relax.ir import DTensorType, Function, parse
from distir_relax.layout import DeviceMesh, Shard
from distir_relax.lowering.emit.relax_dtensor import to_relax_dtensor

tvm = pytest.importorskip("tvm")

from tvm import relax  # noqa: E402
from tvm.script import from_source  # noqa: E402

TYPED = """
# from tvm.script import ir as I
# from tvm.script import relax as R
@I.ir_module
class Module:
    I.module_attrs({"device_num": 2})
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})
    @R.function
    def foo(
        x: R.DTensor((128, 128), "float32", "mesh[0]", "R"),
        A: R.DTensor((128, K), "float32", "mesh[0]", "S[1]"),
        B: R.DTensor((K, 128), "float32", "mesh[0]", "S[0]"),
        C: R.DTensor((128, 1), "float32", "mesh[0]", "R"),
    ) -> R.DTensor((128, 128), "float32", "mesh[0]", "S[0]"):
        lv0: R.DTensor((128, K), "float32", "mesh[0]", "S[1]") = R.matmul(x, A)
        Y: R.DTensor((128, K), "float32", "mesh[0]", "S[1]") = R.nn.gelu(lv0)
        Z: R.DTensor((128, 128), "float32", "mesh[0]", "R") = R.matmul(Y, B)
        O: R.DTensor((128, 128), "float32", "mesh[0]", "R") = R.multiply(Z, C)
        W: R.DTensor((128, 128), "float32", "mesh[0]", "S[0]") = R.dist.redistribute(
            O, device_mesh="mesh[0]", placement="S[0]"
        )
        return W
"""


def typed(columns: int, result: str = "S[0]") -> Any:
    """The RFC's example as TVM's own propagation types it; the result redistributed to `result`."""
    head, _, tail = TYPED.replace("K", str(columns)).partition('-> R.DTensor((128, 128), "float32", "mesh[0]", "S[0]")')
    arrow = '-> R.DTensor((128, 128), "float32", "mesh[0]", "S[0]")'.replace("S[0]", result)
    before, _, after = tail.partition("        W: ")
    return from_source(head + arrow + before + "        W: " + after.replace("S[0]", result))


@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("columns", [128, 127])
@pytest.mark.parametrize("result", ["S[0]", "R"])
def test_a_typed_listing_compiles_and_runs(columns: int, result: str, backend: str) -> None:
    plan = dr.compile(typed(columns, result))
    main = plan.modules["sharded"].main
    assert [_split_dim(item.value) for item in main.inputs] == [None, 1, 0, None]
    [output] = main.outputs
    assert (output.name, _split_dim(output.value)) == ("W", {"S[0]": 0, "R": None}[result])
    generator = torch.Generator().manual_seed(0)
    sizes = (128, 128), (128, columns), (columns, 128), (128, 1)
    x, a, b, c = (torch.randn(*s, generator=generator) for s in sizes)
    expected = torch.nn.functional.gelu(x @ a / 11) @ b * c
    torch.testing.assert_close(plan(x, a / 11, b, c, backend=backend), expected, atol=1e-4, rtol=1e-4)


def test_the_type_of_a_result_is_kept() -> None:
    text = TYPED[: TYPED.index("        lv0")].replace("K", "128") + "        return A\n"
    plan = dr.compile(from_source(text))
    [output] = plan.modules["sharded"].main.outputs
    assert _split_dim(output.value) == 0
    a = torch.randn(128, 128)
    torch.testing.assert_close(plan(a, a, a, a[:, :1]), a)


def _split_dim(value: Any) -> int | None:
    [placement] = value.dtensor.placements
    return placement.dim if isinstance(placement, Shard) else None


class Rows(torch.nn.Module):
    """Split along the batch: no sum over a split dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.sigmoid(self.up(x)) * 0.5)
        return torch.relu(down + x)


class Attention(torch.nn.Module):
    """Split along the heads, gathered behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(12, 12, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).reshape(2, 5, 4, 3).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed: torch.Tensor = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        return mixed


class Moves(torch.nn.Module):
    """One value, laid out three ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh = DeviceMesh((2,))
        y = dr.annotate_sharding(torch.relu(x), mesh, "S[1]")
        z = dr.annotate_sharding(torch.exp(y), mesh, "R")
        return torch.softmax(z, -1)


ROUND: dict[str, tuple[torch.nn.Module, tuple[int, ...], dict[str, str], tuple[int, ...]]] = {
    "rows": (Rows(), (4, 6), {"x": "S[0]"}, (2,)),
    "columns": (torch.nn.Linear(6, 8), (3, 6), {"weight": "S[0]"}, (2,)),
    "heads": (Attention(), (2, 5, 12), {"[qkv].weight": "S[0]"}, (2,)),
    "batch on two axes": (Rows(), (4, 6), {"x": "R, S[0]"}, (3, 2)),
    "moves": (Moves(), (4, 6), {"x": "S[0]"}, (2,)),
    "replicated": (Rows(), (4, 6), {"x": "R"}, (3,)),
}


@pytest.mark.parametrize("name", ROUND)
def test_a_program_goes_to_tvm_and_back_and_stays_the_same(name: str) -> None:
    model, shape, shardings, mesh = ROUND[name]
    plan = dr.compile(model, (torch.zeros(*shape),), shardings=shardings, mesh=DeviceMesh(mesh), outline=False)
    module = plan.to_relax_dtensor()
    relax.analysis.well_formed(module)
    read = from_source(module.script())
    tvm.ir.assert_structural_equal(read, module)
    again = dr.compile(read, outline=False)
    assert layouts(again) == layouts(plan)
    assert again.modules["sharded"].meshes[0].shape == mesh
    x = torch.randn(*shape)
    weights = [plan.imported.tensors[i.value.name] for i in plan.modules["sharded"].main.inputs if i.role != "input"]
    inputs = [x if i.role == "input" else weights.pop(0) for i in plan.modules["sharded"].main.inputs]
    torch.testing.assert_close(again(*inputs), model(x).detach(), atol=1e-5, rtol=1e-5)


def layouts(plan: Any) -> tuple[object, object]:
    """The placements of all values that Relax names, and of the results."""
    main: Function = plan.modules["sharded"].main
    values = [i.value for i in main.inputs] + [v for op in main.ops for v in op.results if op.name != "constant"]
    kinds = {v.name.replace(".", "_"): v.type.placements for v in values if isinstance(v.type, DTensorType)}
    relaxed = {n: p for n, p in kinds.items() if not n.startswith("gv")}
    return relaxed, [o.value.type for o in main.outputs]


def test_the_text_reads_like_tvms_own() -> None:
    x, shardings = torch.zeros(4, 6), {"x": "S[0]"}
    text = dr.compile(Moves(), (x,), shardings=shardings, mesh=DeviceMesh((2,))).to_relax_dtensor().script()
    assert 'I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})' in text
    assert 'def main(x: R.DTensor((4, 6), "float32", "mesh[0]", "S[0]"))' in text
    assert 'R.dist.redistribute(exp, device_mesh="mesh[0]", placement="R")' in text


class Sliced(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 1:3] + 1


class Split(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.split(x, 3, 1)
        return left + right


class Apart(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).reshape(4, 2, 6)


class Small(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.expm1(x)


REFUSED: list[tuple[torch.nn.Module, tuple[int, ...], dict[str, str], type[Exception], str]] = [
    (torch.nn.Linear(6, 8), (4, 6), {"weight": "S[1]"}, PlacementError, r"I\[sum\] of %\S+: Relax has no partial sums"),
    (torch.nn.Linear(6, 7), (4, 6), {"weight": "S[0]"}, PlacementError, r"S\[0: 4\|3\] of %weight: .* equal shards"),
    (Moves(), (3, 6), {"x": "S[0]"}, PlacementError, r"S\[0: 2\|1\] of %x: .* equal shards"),
    (Sliced(), (4, 6), {"x": "S[0]"}, UnsupportedOpError, r"cannot type %\S+, the strided_slice, .*dist.FInferType"),
    (Split(), (4, 6), {"x": "S[0]"}, UnsupportedOpError, r"the split, as R.DTensor: it has several results"),
    (Apart(), (8, 6), {"x": "S[0]"}, UnsupportedOpError, r"the reshape, .*expected S\[0\], TVM's own rule gives R"),
    (Small(), (4, 6), {"x": "S[0]"}, UnsupportedOpError, r"the expm1, as R.DTensor: TVM has no such op"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "shape", "shardings", "kind", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_relax_cannot_express_is_named(
    model: torch.nn.Module, shape: tuple[int, ...], shardings: dict[str, str], kind: type[Exception], message: str
) -> None:
    plan = dr.compile(model, (torch.zeros(*shape),), shardings=shardings, mesh=DeviceMesh((2,)))
    with pytest.raises(kind, match=message):
        plan.to_relax_dtensor()


INTERLEAVED = """
module @sharded {
  mesh[0] = device_mesh((2, 2), ("a", "b"))
  func @main(
    input %x: R.DTensor((8, 8), "float32", "mesh[0]", "PLACEMENTS"),  # model.py:3
  ) {
    return "x": %x
  }
}
"""


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ("S[0: 2*(2|2)], R", r"model.py:3: R.DTensor cannot express S\[0: 2\*\(2\|2\)\] of %x: .* contiguous blocks"),
        ("S[0: 4|4], S[0: 4|4]", "model.py:3: R.DTensor cannot split one dim of %x along two mesh axes"),
    ],
)
def test_cuts_that_are_no_blocks_are_named(placements: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        to_relax_dtensor(parse(INTERLEAVED.replace("PLACEMENTS", placements)))


def test_only_the_sharded_stage_has_layouts() -> None:
    plan = dr.compile(Moves(), (torch.zeros(4, 6),), shardings={"x": "S[0]"}, mesh=DeviceMesh((2,)))
    with pytest.raises(VerificationError, match="sharded stage, found the global stage"):
        to_relax_dtensor(plan.modules["global"])


@pytest.mark.parametrize("result", ["R", "S[0]"])
def test_a_pending_sum_can_be_typed_as_tvm_types_it(result: str) -> None:
    plan = dr.compile(typed(128, result), outline=False)
    module = plan.to_relax_dtensor(pending="R")
    relax.analysis.well_formed(module)
    read = from_source(module.script())
    tvm.ir.assert_structural_equal(read, module)
    again = dr.compile(read, outline=False)
    assert [o.value.type for o in again.modules["sharded"].main.outputs] == [
        o.value.type for o in plan.modules["sharded"].main.outputs
    ]
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(s, generator=generator) / 11 for s in ((128, 128), (128, 128), (128, 128), (128, 1))]
    torch.testing.assert_close(again(*data), plan(*data), atol=1e-5, rtol=1e-5)


def test_another_word_for_pending_sums_is_an_error() -> None:
    plan = dr.compile(typed(128))
    with pytest.raises(PlacementError, match=r'pending="R"'):
        plan.to_relax_dtensor()
    with pytest.raises(ValueError, match="found 'P'"):
        plan.to_relax_dtensor(pending="P")
