"""Weights kept in float32 of a model that computes in less, and the tensors that a step of training begins with.

Micikevicius et al., Mixed Precision Training, 2017: updates are often too small for the dtype that a model computes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from distir_relax.ir import Input, Module, Op, TensorType, Value, fresh_name, value_names

if TYPE_CHECKING:
    import torch

_NARROW = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class MasterWeights:
    """The pass: global stage in and out. Parameters of bfloat16 and float16 become float32, with a cast behind each.

    It stands before `Differentiate`: gradients, the optimizer's state and its updates are float32 then. `with_state`
    gives the tensors that fit.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"

    def run(self, module: Module) -> Module:
        """The module with parameters of float32."""
        main = module.main
        taken = value_names(main)
        inputs: list[Input] = []
        casts: dict[str, Op] = {}
        for item in main.inputs:
            kind = item.value.tensor
            if item.role == "parameter" and kind.dtype in _NARROW:
                item = replace(item, value=Value(item.value.name, TensorType(kind.shape, "float32")))
                narrow = Value(fresh_name(f"{item.value.name}.{kind.dtype}", taken), kind)
                casts[item.value.name] = Op("astype", (item.value,), (narrow,), {"dtype": kind.dtype}, item.location)
            inputs.append(item)
        known = {name: op.results[0] for name, op in casts.items()}
        ops = [replace(op, operands=tuple(known.get(v.name, v) for v in op.operands)) for op in main.ops]
        outputs = [replace(o, value=known.get(o.value.name, o.value)) for o in main.outputs]
        new = replace(main, inputs=tuple(inputs), ops=(*casts.values(), *ops), outputs=tuple(outputs))
        return replace(module, functions=(new, *module.functions[1:]))


def with_state(module: Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` as a program of the global stage takes them: in its dtypes, and zeros for state that has none."""
    import torch

    found = dict(tensors)
    for item in module.main.inputs:
        name, kind = item.value.name, item.value.tensor
        dtype = getattr(torch, kind.dtype)
        if name in found:
            found[name] = found[name].to(dtype)
        elif item.role == "state":
            # It takes no memory until a rank has its part.
            found[name] = torch.zeros((), dtype=dtype).expand(kind.shape)
    return found
