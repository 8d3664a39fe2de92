"""Whole models through the whole pipeline, ranks as threads: they give what unsharded torch gives."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax.ir import inline
from tests.imported_once import compile_case
from tests.zoo import Case, gpt2, made_once, minilm, mlp, mobilenet, resnet, unet, uneven_unet

pytestmark = pytest.mark.shares("models")


def compiled(case: Case, ranks: int, tail: str) -> dr.Plan:
    mesh = dr.DeviceMesh((ranks,), ("tp",))
    return compile_case(case, shardings=case.shardings, mesh=mesh, tail=tail)


def largest_difference(found: Any, expected: Any) -> float:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        return float((found - expected).detach().abs().max())
    pairs = [(found[key], expected[key]) for key in expected if isinstance(expected[key], torch.Tensor)]
    assert pairs
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("ranks", "tail"), [(2, "pad"), (3, "ragged"), (5, "pad"), (5, "ragged")])
@pytest.mark.parametrize("make", [mlp, gpt2, minilm])
def test_torch_backend(make: Any, ranks: int, tail: str) -> None:
    case = made_once(make)
    plan = compiled(case, ranks, tail)
    with torch.no_grad():
        expected = case.model(*case.args, **case.kwargs)
    assert largest_difference(plan(*case.args, **case.kwargs), expected) < 1e-5


def optimise(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let LLVM optimise what the tvm backend compiles so far: 3 is what it does otherwise.

    What a program computes does not depend on it, and it takes most of the time.
    """
    import tvm

    from distir_relax.runtime.backends.tvm import compile

    target, host = compile.machine(1)
    chosen = tvm.target.Target({"kind": "llvm", "mcpu": str(target.attrs["mcpu"]), "opt-level": level})
    monkeypatch.setattr(compile, "machine", lambda threads: (chosen, replace(host, threads=threads)))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("make", "ranks", "tail", "level"),
    [
        (mlp, 2, "ragged", 3), (mlp, 2, "pad", 3), (mlp, 3, "ragged", 3), (mlp, 3, "pad", 3),
        (gpt2, 3, "ragged", 3), (gpt2, 3, "pad", 0), (minilm, 5, "ragged", 0), (minilm, 5, "pad", 0),
    ],
)  # fmt: skip
def test_tvm_backend(make: Any, ranks: int, tail: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    optimise(level, monkeypatch)
    case = made_once(make)
    plan = compiled(case, ranks, tail)
    with torch.no_grad():
        expected = case.model(*case.args, **case.kwargs)
    assert largest_difference(plan(*case.args, backend="tvm", **case.kwargs), expected) < 1e-4


WHOLE_GRID = {
    "mlp": (lambda: mlp(13, 127), {"0.weight": "S[0], S[0]", "2.weight": "S[1], S[1]"}),
    "mlp of given sizes": (lambda: mlp(13, 127), {"0.weight": "S[0: 64|63], S[0: 0|60|4 + 21|21|21]"}),
    "gpt2": (
        lambda: gpt2(1, vocabulary=97, width=35, heads=7),
        {"*.c_attn.weight": "S[1], S[1]", "*.c_fc.weight": "S[1], S[1]", "*.wte.weight": "S[0], S[0]"},
    ),
    "resnet": (resnet, {"picture": "S[2], S[2]"}),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("name", WHOLE_GRID)
def test_one_dim_split_along_both_axes_of_a_grid(name: str, tail: str) -> None:
    """Seven heads, 97 words, 127 columns and the rows of a picture on 2x3 ranks; nothing is gathered unasked."""
    make, shardings = WHOLE_GRID[name]
    case, mesh = made_once(make), dr.DeviceMesh((2, 3), ("a", "b"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", dr.ImplicitGatherWarning)
        plan = compile_case(case, shardings=shardings, mesh=mesh, tail=tail, gather_threshold=1)
    with torch.no_grad():
        expected = case.model(*case.args, **case.kwargs)
    assert largest_difference(plan(*case.args, **case.kwargs), expected) < 1e-5


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("ranks", "tail"), [(2, "pad"), (3, "ragged"), (5, "pad"), (5, "ragged")])
@pytest.mark.parametrize("make", [resnet, mobilenet, unet, uneven_unet])
def test_pictures_split_in_space(make: Any, ranks: int, tail: str) -> None:
    """Rows or columns stay where they are from the first layer to the last: halos are sent, nothing is gathered."""
    case = made_once(make)
    plan = compiled(case, ranks, tail)
    names = [op.name for op in plan.modules["distributed"].main.ops]
    assert "send" in names
    assert "all_gather" not in names
    with torch.no_grad():
        expected = case.model(*case.args)
    assert largest_difference(plan(*case.args), expected) < 1e-5


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("make", "ranks", "tail", "level"),
    [(resnet, 3, "ragged", 0), (mobilenet, 5, "pad", 0), (unet, 2, "ragged", 3), (uneven_unet, 3, "ragged", 0)],
)
def test_pictures_with_tvm(make: Any, ranks: int, tail: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    optimise(level, monkeypatch)
    case = made_once(make)
    plan = compiled(case, ranks, tail)
    with torch.no_grad():
        expected = case.model(*case.args)
    assert largest_difference(plan(*case.args, backend="tvm"), expected) < 1e-4


def test_gpt2_is_cut_by_heads_and_by_vocabulary() -> None:
    """Twelve heads of 64 on five ranks are 3|3|2|2|2; a tied table of 50257 rows serves both ends."""
    case = gpt2(layers=1, vocabulary=50257, width=768, heads=12)
    plan = dr.compile(case.model, case.args, case.kwargs, shardings=case.shardings, mesh=5)
    text = plan.text("sharded")
    assert '"S[1: 3*(192|192|128|128|128)]"' in text
    assert '"S[0: 10052|10052|10051|10051|10051]"' in text
    names = [i.value.name for i in plan.modules["sharded"].main.inputs]
    assert len([n for n in names if n in ("transformer.wte.weight", "lm_head.weight")]) == 1


@pytest.mark.parametrize("make", [gpt2, minilm])
def test_data_and_tensor_parallel_together(make: Any) -> None:
    """On a 2 x 2 mesh the batch of 3 (or 2) is cut along one axis, heads along the other; nothing is gathered."""
    case = made_once(make)
    shardings = {pattern: f"R, {placement}" for pattern, placement in case.shardings.items()}
    shardings |= {name: "S[0], R" for name in ("input_ids", *case.kwargs) if name in ("input_ids", "attention_mask")}
    mesh = dr.DeviceMesh((2, 2), ("dp", "tp"))
    plan = compile_case(case, shardings=shardings, mesh=mesh)
    ops = inline(plan.modules["distributed"]).main.ops
    assert {(op.name, op.attrs["axis"]) for op in ops if "axis" in op.attrs and "op" in op.attrs} == {
        ("all_reduce", "tp")
    }
    assert not [op for op in ops if op.name in ("all_gather", "all_to_all")]
    with torch.no_grad():
        expected = case.model(*case.args, **case.kwargs)
    assert largest_difference(plan(*case.args, **case.kwargs), expected) < 1e-5


def test_annotation_in_the_model() -> None:
    mesh = dr.DeviceMesh((2,), ("tp",))

    class Annotated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(8, 15)
            self.down = torch.nn.Linear(15, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = dr.annotate_sharding(self.up.weight, mesh, "S[0]")
            return self.down(torch.relu(torch.nn.functional.linear(x, weight, self.up.bias)))

    torch.manual_seed(0)
    model, x = Annotated().eval(), torch.randn(3, 8)
    plan = dr.compile(model, example_inputs=(x,))
    assert "S[0: 8|7]" in plan.text("sharded")
    assert "from the annotation at test_models.py:" in plan.text("sharded")
    assert largest_difference(plan(x), model(x)) < 1e-6
    with pytest.raises(dr.DistIRError, match=r"\(3, 8\)"):
        plan(torch.randn(4, 8))


def test_the_front_door_is_light() -> None:
    """Importing the package, or what a rank needs to start, brings in neither TVM nor the compiler."""
    code = (
        "import sys, distir_relax, distir_relax.cli, distir_relax.runtime.execute\n"
        "found = ('torch', 'tvm', 'onnx', 'distir_relax.compiler.compile', 'distir_relax.ops')\n"
        "heavy = [m for m in found if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parent.parent)
