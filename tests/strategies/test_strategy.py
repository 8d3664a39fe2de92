"""Strategies: read and printed, applied to models that they do not know, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.errors import AnnotationError, DistIRError
from distir_relax.strategies import Strategy
from tests.families import FAMILIES


def test_options_are_read_and_printed() -> None:
    found = Strategy.parse("2/3/1/4, zero=1, checkpoint=block, sequence_parallel")
    assert found == Strategy(2, 3, 1, 4, zero=1, checkpoint="block", sequence_parallel=True)
    assert str(found) == "2/3/1/4,zero=1,checkpoint=block,sequence_parallel"
    assert Strategy.parse(str(found)) == found
    assert Strategy.parse("1/1/1/1,sequence_parallel=false") == Strategy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2/2/1/1,zero=4", "zero is 0, 1, 2 or 3, found 4"),
        ("2/2/1/1,zero=one", "expected a number for zero, found 'one'"),
        ("2/2/1/1,checkpoint=all", "checkpoint is none, block, selective, found 'all'"),
        ("2/2/1/1,experts=all", "experts is hidden, data, tensor, found 'all'"),
        ("2/2/1/1,sequence_parallel=maybe", "expected on or off for sequence_parallel"),
        (
            "2/2/1/1,speed=9",
            "expected schedule, chunks, zero, checkpoint, sequence_parallel, context, ring, rows, experts, placements "
            "after D/T/P/K",
        ),
        ("2/2/1/1,", "expected schedule"),
        ("2/2/1/1,schedule=1b1f", "^strategy 2/2/1/1,schedule=1b1f: expected a schedule, one of gpipe, 1f1b, .*'1b1f'"),
        ("2/2/3/5,chunks=2", "the schedule 1f1b takes 1 chunk a rank, found 2\n  hint: chunks=1, or a schedule"),
        ("2/2/1/1,chunks=0", "chunks is at least 1"),
        ("9" * 99 + "/1/1/1", "numbers of too many digits"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        Strategy.parse(text)


class Perceptron(nn.Module):
    """Products of odd sizes; the last is marked where a `mark` is given."""

    def __init__(self, mark: str = "", mesh: dr.DeviceMesh | None = None) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(15, 127), nn.Linear(127, 15), nn.Linear(15, 31)
        self.mark, self.mesh = mark, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.last.weight
        if self.mesh is not None:
            last = dr.annotate_sharding(last, self.mesh, self.mark)
        return nn.functional.linear(torch.relu(self.down(torch.relu(self.up(x)))), last, self.last.bias)


def placements(plan: dr.Plan) -> dict[str, str]:
    """How inputs and parameters lie, along data and tensor, without sizes."""
    kinds = {item.value.name: item.value.dtensor.placements for item in plan.modules["sharded"].main.inputs}
    return {name: ",".join(str(p).partition(":")[0].rstrip("]") + "]" * ("S" in str(p)) for p in found)
            for name, found in kinds.items()}  # fmt: skip


@pytest.mark.parametrize("strategy", ["3/1/1/1", "1/3/1/1", "2/3/1/1", "1/1/1/5", "2/2/1/3", "3/2/1/2,zero=3"])
def test_a_strategy_changes_no_result(strategy: str) -> None:
    torch.manual_seed(0)
    model, x = Perceptron().double(), torch.randn(5, 15, dtype=torch.float64)
    plan = dr.compile(model, (x,), strategy=strategy)
    torch.testing.assert_close(plan(x), model(x).detach(), rtol=1e-12, atol=1e-12)
    assert plan.mesh.size == Strategy.parse(strategy).devices


def test_products_are_split_in_pairs() -> None:
    """The first gives its part of the hidden dim, the second sums over it: one all-reduce between them."""
    model, x = Perceptron(), torch.randn(5, 15)
    plan = dr.compile(model, (x,), strategy="2/3/1/1")
    assert placements(plan) == {
        "x": "S[0],R", "up.weight": "R,S[0]", "up.bias": "R,S[0]", "down.weight": "R,S[1]", "down.bias": "R,R",
        "last.weight": "R,S[0]", "last.bias": "R,S[0]",
    }  # fmt: skip
    ops = [op.name for op in plan.modules["distributed"].main.ops]
    assert (ops.count("all_reduce"), ops.count("all_gather")) == (1, 0)


def test_heads_hidden_dims_and_vocabulary_of_a_transformer_are_split() -> None:
    family = FAMILIES["gpt2"]()
    lies = placements(dr.compile(family.model.float().eval(), family.args, strategy="1/3/1/1"))
    split = {name.removeprefix("model.transformer."): text for name, text in lies.items() if "S" in text}
    layer = {"attn.c_attn.weight": "R,S[1]", "attn.c_attn.bias": "R,S[0]", "attn.c_proj.weight": "R,S[0]",
             "mlp.c_fc.weight": "R,S[1]", "mlp.c_fc.bias": "R,S[0]", "mlp.c_proj.weight": "R,S[0]"}  # fmt: skip
    assert split == {"wte.weight": "R,S[0]"} | {f"h.{i}.{name}": text for i in range(2) for name, text in layer.items()}


@pytest.mark.parametrize(
    ("mesh", "mark", "expected"),
    [
        (dr.DeviceMesh((3,), ("tp",)), "S[1]", "R,S[1]"),
        (dr.DeviceMesh((2,), ("dp",)), "S[0]", "S[0],R"),
        (dr.DeviceMesh((2, 3), ("a", "b")), "S[1], R", "S[1],R"),
    ],
)
def test_a_model_s_own_marks_win(mesh: dr.DeviceMesh, mark: str, expected: str) -> None:
    torch.manual_seed(0)
    model, x = Perceptron(mark, mesh).double(), torch.randn(5, 15, dtype=torch.float64)
    plan = dr.compile(model, (x,), strategy="2/3/1/1")
    assert placements(plan)["last.weight"] == expected
    assert placements(plan)["up.weight"] == "R,S[0]"
    torch.testing.assert_close(plan(x), model(x).detach(), rtol=1e-12, atol=1e-12)


def test_shardings_win() -> None:
    model, x = Perceptron(), torch.randn(5, 15)
    plan = dr.compile(model, (x,), strategy="2/3/1/1", shardings={"up.weight": "R, S[1]"})
    assert placements(plan)["up.weight"] == "R,S[1]"


def test_inputs_and_outputs_of_microbatches_are_whole_to_the_user() -> None:
    torch.manual_seed(0)
    model, x = Perceptron().double(), torch.randn(5, 15, dtype=torch.float64)
    plan = dr.compile(model, (x,), strategy="1/1/1/3")
    assert [i.value.type.shape for i in plan.modules["sharded"].main.inputs][:3] == [(2, 15), (2, 15), (1, 15)]
    with pytest.raises(DistIRError, match=r"input 'x': expected float64 \(5, 15\), found float64 \(4, 15\)"):
        plan(x[:4])


class Sequence(nn.Module):
    """Something over the samples that needs all of them, and nothing for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


@pytest.mark.parametrize(
    ("model", "x", "strategy", "message"),
    [
        (Perceptron(), torch.randn(5, 15), "7/1/1/1", "a batch of 5 has too few samples for 7 data-parallel ranks"),
        (Perceptron(), torch.randn(5, 15), "1/1/1/7", "a batch of 5 has too few samples for 7 microbatches"),
        (Perceptron(), torch.randn(1, 15), "2/1/1/1", r"no batch that can be split: dim 0 of 'x' has size 1"),
        (Sequence(), torch.randn(5, 1), "2/1/1/1", r"no batch .*: dim 0 of 'x' is a dim of parameters as well"),
        (Perceptron(), torch.randn(5, 15), "1/1/9/1", "consecutive ops with weights, too few for 9"),
        (Perceptron(), torch.randn(5, 15), "2/1/1/1,sequence_parallel", "no repeated blocks that pass on a sequence"),
    ],
)
def test_what_a_strategy_cannot_do(model: nn.Module, x: torch.Tensor, strategy: str, message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        dr.compile(model, (x,), strategy=strategy)


def test_marks_for_another_mesh_are_refused() -> None:
    x = torch.randn(5, 15)
    with pytest.raises(AnnotationError, match="which is not the mesh of the strategy 2/3/1/1"):
        dr.compile(Perceptron("S[0]", dr.DeviceMesh((5,), ("tp",))), (x,), strategy="2/3/1/1")
    with pytest.raises(AnnotationError, match="remove the mesh"):
        dr.compile(Perceptron(), (x,), strategy="2/3/1/1", mesh=6)


def test_an_onnx_model_is_split(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Perceptron(), torch.randn(5, 15)
    torch.onnx.export(model, (x,), str(tmp_path / "p.onnx"), dynamo=False, input_names=["x"])
    plan = dr.compile(tmp_path / "p.onnx", strategy="2/3/1/2")
    found = plan(x.numpy())
    torch.testing.assert_close(next(iter(found.values())) if isinstance(found, dict) else found, model(x).detach())
    assert plan.footprint.ranks == 6


def test_a_relax_module_is_split() -> None:
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    torch.manual_seed(0)
    model, x = Perceptron(), torch.randn(5, 15)
    mod = from_exported_program(torch.export.export(model, (x,)), keep_params_as_input=True)
    mod, params = relax.frontend.detach_params(mod)
    plan = dr.compile(mod, params=params["main"], strategy="2/3/1/2")
    found = plan(x)
    torch.testing.assert_close(found[0] if isinstance(found, (tuple, list)) else found, model(x).detach())


@pytest.mark.parametrize(("layers", "all_reduces"), [(2, 1), (3, 2), (4, 3), (8, 7), (9, 8), (16, 15)])
def test_a_chain_of_products_is_split_in_pairs_to_its_end(layers: int, all_reduces: int) -> None:
    """Of a step of training: one between the products of a pair, and one for each gradient that goes on to a pair."""
    chain = [nn.Sequential(nn.Linear(31, 31, bias=False), nn.ReLU()) for _ in range(layers)]
    x = torch.randn(5, 31)
    step = dr.compile_training(
        nn.Sequential(*chain),
        F.mse_loss,
        optimizer=dr.optim.SGD(),
        example_batch=(x, x),
        strategy="1/3/1/1",
        outline=False,
    )
    lies = {name: text for name, text in placements(step.plan).items() if name.endswith("weight")}
    assert list(lies.values()) == [f"R,S[{number % 2}]" for number in range(layers)]
    ops = [op.name for op in step.plan.modules["distributed"].main.ops]
    # With an odd number of layers the last result is split, and so is the loss.
    assert ops.count("all_reduce") == all_reduces + layers % 2
