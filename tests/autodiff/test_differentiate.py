"""Whole models differentiated: gradients against torch's autograd, functions once, slices, what cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.autodiff import Differentiate
from distir_relax.errors import DistIRError, UnsupportedOpError
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret import interpret
from distir_relax.ir import Module, parse, print_module, verify
from distir_relax.ops import TABLE, check, lookup
from distir_relax.runtime.execute import run_bundle


class Block(nn.Module):
    """A pre-norm transformer block of odd sizes."""

    def __init__(self, width: int = 15, heads: int = 3, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 31), nn.Linear(31, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Blocks(nn.Module):
    """Equal blocks one after the other, and a number made of what they give."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return ((x - target) ** 2).mean()


class Perceptron(nn.Module):
    """Two products, and a number made of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(15, 31), nn.Linear(31, 15)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((self.down(F.gelu(self.up(x))) - target) ** 2).mean()


def differentiated(
    model: nn.Module, args: tuple[Any, ...], outline: bool = False, training: bool = False, **options: Any
) -> tuple[Any, Module]:
    """The imported model, and its module with gradients."""
    imported = import_torch(model, args, training=training)
    module = Outline(imported.scopes).run(imported.module) if outline else imported.module
    result = Differentiate(**options).run(module)
    verify(result, check)
    assert parse(print_module(result)) == result
    return imported, result


def run(imported: Any, module: Module, *args: Any) -> dict[str, torch.Tensor]:
    """The outputs of a module of the global stage, calls and all, by name."""
    return interpret(module, {**imported.tensors, **imported.flatten(args, {})})


@pytest.mark.parametrize("outline", [False, True])
def test_a_transformer_s_gradients_are_torch_s(outline: bool) -> None:
    torch.manual_seed(0)
    model = Blocks().double()
    args = torch.randn(5, 7, 15, dtype=torch.float64), torch.randn(5, 7, 15, dtype=torch.float64)
    imported, module = differentiated(model, args, outline)
    found = run(imported, module, *args)
    loss = model(*args)
    loss.backward()
    torch.testing.assert_close(found["output"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[f"{imported.names[name]}.grad"], parameter.grad, rtol=1e-10, atol=1e-12)


def test_a_function_is_differentiated_once_in_two_slices() -> None:
    model = Blocks(4)
    _, module = differentiated(model, (torch.randn(5, 7, 15), torch.randn(5, 7, 15)), True)
    names = [f.name for f in module.functions]
    assert sorted(n.rpartition("block")[2] for n in names[1:]) == ["", "_backward", "_backward_weights", "_forward"]
    calls = [op.callee.rpartition("block")[2] for op in module.main.ops if op.callee]
    assert calls.count("_forward") == 4
    assert calls.count("_backward_weights") == 4
    # The input of the first block is no parameter, yet its slice carries what the weights' gradients need.
    assert calls.count("_backward") == 4


def test_gradients_keep_the_place_and_the_name_of_their_op() -> None:
    _, module = differentiated(Blocks(1), (torch.randn(2, 7, 15), torch.randn(2, 7, 15)))
    grads = [op for op in module.main.ops if ".grad" in op.results[0].name]
    assert len(grads) > 20
    assert all("test_differentiate.py" in op.location for op in grads)


class Tied(nn.Module):
    """One weight used twice, and one input that another branch ends in an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ self.weight) @ self.weight.t()
        y = dr.annotate_sharding(y, dr.DeviceMesh((3,), ("tp",)), "S[1]")
        return (y * (x > 0) + y.argmax(-1, keepdim=True)).sum()


def test_a_weight_used_twice_has_both_gradients() -> None:
    model, x = Tied().double(), torch.randn(5, 7, dtype=torch.float64)
    imported, module = differentiated(model, (x,), wrt=("weight", "x"))
    found = run(imported, module, x)
    given = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(given), (model.weight, given))
    torch.testing.assert_close(found["weight.grad"], expected[0])
    torch.testing.assert_close(found["x.grad"], expected[1])


class Sums(nn.Module):
    def __init__(self, number: bool, blind: bool = False) -> None:
        super().__init__()
        self.number, self.blind = number, blind
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + (torch.sign(self.weight) if self.blind else self.weight)
        return y.sum() if self.number else y


def test_what_cannot_be_differentiated_is_said() -> None:
    x = torch.randn(5)
    with pytest.raises(DistIRError, match=r"expected a loss that is a number, found f32\[5\]"):
        differentiated(Sums(False), (x,))
    with pytest.raises(DistIRError, match="the loss does not depend on weight"):
        differentiated(Sums(True, blind=True), (x,))


def test_an_op_without_a_gradient_is_named() -> None:
    with TABLE.extended() as table:
        table.replace(replace(lookup("tanh"), gradient=None))
        with pytest.raises(UnsupportedOpError, match="no gradient of tanh") as caught:
            differentiated(Tied(), (torch.randn(5, 7),), wrt=("weight",))
    assert "test_differentiate.py" in caught.value.where


def with_gradients(passes: Sequence[Any]) -> list[Any]:
    outline, *rest = passes
    assert isinstance(outline, Outline)
    return [outline, Differentiate(), *rest]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("mesh", "shardings", "backend"),
    [
        (5, {"*.up.weight": "S[0]", "*.qkv.weight": "S[0]"}, "torch"),
        (3, {"x": "S[0]", "target": "S[0]"}, "tvm"),
        ((2, 3), {"x": "S[0], R", "target": "S[0], R", "*.up.weight": "R, S[0]", "*.qkv.weight": "R, S[0]"}, "torch"),
    ],
    ids=str,
)
def test_ranks_have_the_gradients_of_one_process(mesh: Any, shardings: dict[str, str], backend: str) -> None:
    torch.manual_seed(1)
    # TVM takes its time to compile a block.
    model = (Perceptron() if backend == "tvm" else Blocks(2)).double()
    args = torch.randn(5, 7, 15, dtype=torch.float64), torch.randn(5, 7, 15, dtype=torch.float64)
    plan = dr.compile(model, args, shardings=shardings, mesh=mesh, passes=with_gradients)
    found = run_bundle(plan.bundle((backend,)), plan.imported.flatten(args, {}), backend)
    loss = model(*args)
    loss.backward()
    torch.testing.assert_close(found["output"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[f"{plan.imported.names[name]}.grad"], parameter.grad, rtol=1e-9, atol=1e-11)
