"""Float32 master weights for a model of lower precision, and the initial tensors of a training step.

Micikevicius et al., Mixed Precision Training, 2017: updates are often too small for the dtype of the model.
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
    """Pass within the global stage: bfloat16 and float16 parameters become float32, each followed by a cast.

    It runs before `Differentiate`, so gradients, the optimizer's state and its updates are float32. `with_state`
    converts the tensors.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"

    def run(self, module: Module) -> Module:
        """Return the module with float32 parameters."""
        main = module.main
        names = value_names(main)
        inputs: list[Input] = []
        casts: dict[str, Op] = {}
        for item in main.inputs:
            type_ = item.value.tensor
            if item.role == "parameter" and type_.dtype in _NARROW:
                item = replace(item, value=Value(item.value.name, TensorType(type_.shape, "float32")))
                cast = Value(fresh_name(f"{item.value.name}.{type_.dtype}", names), type_)
                casts[item.value.name] = Op("astype", (item.value,), (cast,), {"dtype": type_.dtype}, item.location)
            inputs.append(item)
        replaced = {name: op.results[0] for name, op in casts.items()}
        ops = [replace(op, operands=tuple(replaced.get(v.name, v) for v in op.operands)) for op in main.ops]
        outputs = [replace(o, value=replaced.get(o.value.name, o.value)) for o in main.outputs]
        converted = replace(main, inputs=tuple(inputs), ops=(*casts.values(), *ops), outputs=tuple(outputs))
        return replace(module, functions=(converted, *module.functions[1:]))


def with_state(module: Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors` as inputs of a program of the global stage: in its dtypes, with zeros for missing state."""
    import torch

    result = dict(tensors)
    for item in module.main.inputs:
        name, tensor_type = item.value.name, item.value.tensor
        dtype = getattr(torch, tensor_type.dtype)
        if name in result:
            result[name] = result[name].to(dtype)
        elif item.role == "state":
            # Expanded zeros take no memory until a rank has its shard.
            result[name] = torch.zeros((), dtype=dtype).expand(tensor_type.shape)
    return result
