"""Two blocks with residuals, ``x + gelu(x A) B``, as a frontend gives them: A is split in its 127 columns."""

from __future__ import annotations

import torch

from distir_relax.bundle import Bundle
from distir_relax.compiler.pass_manager import Stages, run_passes
from distir_relax.compiler.pass_pipeline import compile_passes
from distir_relax.frontends.imported_model import Frame
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.ir import Module, TensorType
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.emit.bundle import to_bundle
from distir_relax.ops import Builder


def blocks_module(blocks: int = 2, placement: str = "S[1]") -> Module:
    """The blocks as a function, called with the weights of each."""
    g = Builder()
    scopes: dict[str, tuple[Frame, ...]] = {}
    g.location = ""
    x = g.input("x", TensorType((5, 64), "float32"))
    for i in range(blocks):
        path = f"blocks.{i}"
        a = g.input(f"{path}.up", TensorType((64, 127), "float32"), "parameter")
        b = g.input(f"{path}.down", TensorType((127, 64), "float32"), "parameter")
        before = len(g.ops)
        g.location = f"{path}, model.py:7"
        a = g.emit("annotate_sharding", a, placements=placement)
        h = g.emit("nn.gelu", g.emit("matmul", x, a))
        g.location = f"{path}, model.py:8"
        x = g.emit("add", x, g.emit("matmul", h, b))
        scopes |= {op.results[0].name: (Frame(path, "FeedForward"),) for op in g.ops[before:]}
    module = Module("global", (g.function("main", [("y", x)]),), (DeviceMesh((2,), ("tp",)),))
    return Outline(scopes).run(module)


def blocks_bundle(
    ranks: int, tail: str = "ragged", backend: str = "torch", placement: str = "S[1]"
) -> tuple[Bundle, dict[str, torch.Tensor]]:
    """Three blocks for so many ranks, and their weights."""
    torch.manual_seed(ranks)
    stages = Stages()
    mesh = DeviceMesh((ranks,), ("tp",))
    run_passes(blocks_module(3, placement), compile_passes(mesh, tail), [stages])
    main = stages.modules["sharded"].main
    tensors = {i.value.name: torch.randn(i.value.dtensor.shape) / 9 for i in main.inputs if i.role != "input"}
    modules = (stages.modules[stage] for stage in ("sharded", "distributed", "ranked"))
    return to_bundle("blocks", *modules, tensors, tail, (backend,)), tensors
