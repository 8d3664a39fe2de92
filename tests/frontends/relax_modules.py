"""Relax modules as text, and imported ones run op by op."""

from __future__ import annotations

from typing import Any

import torch
from tvm.script import from_source
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tirx as T

from distir_relax import ir, ops
from distir_relax.frontends.imported_model import Imported

HEAD = """
# from tvm.script import ir as I
# from tvm.script import relax as R
# from tvm.script import tirx as T
@I.ir_module(s_tir=True)
class Module:
    I.module_attrs({"device_num": 2})
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})
"""


def script(body: str, head: str = HEAD) -> Any:
    """The module with these functions."""
    return from_source(head + body, extra_vars={"I": I, "R": R, "T": T})


def run(imported: Imported, *args: torch.Tensor) -> Any:
    """The imported program, op by op, as the op table means it."""
    values: dict[str, torch.Tensor] = {**imported.tensors, **imported.flatten(args, {})}
    ir.verify(imported.module, ops.check)
    for op in imported.module.main.ops:
        results = ops.evaluate(op, [values[v.name] for v in op.operands])
        values.update({v.name: y for v, y in zip(op.results, results, strict=True)})
    return imported.rebuild({o.name: values[o.value.name] for o in imported.module.main.outputs})
