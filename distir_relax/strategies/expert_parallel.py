"""Expert parallelism: experts split by their number, along the axis that tokens are split along, or another.

Where tokens are split along the same axis, each row goes to the device that has its expert, and its result comes back
(Lepikhin et al., GShard, 2020; Rajbhandari et al., DeepSpeed-MoE, 2022): propagation makes these exchanges of the split
alone (`sharding.routing`). What are experts, the entries of ops that work on rows of groups say.
"""

from __future__ import annotations

from distir_relax.errors import DistIRError
from distir_relax.ir import Module
from distir_relax.ops import Routing, lookup
from distir_relax.sharding.factors import Slot
from distir_relax.strategies.factor_costs import Classes, classes_of
from distir_relax.strategies.strategy import Strategy


def expert_classes(classes: Classes) -> frozenset[Slot]:
    """The classes that number the experts of a program's layers."""
    found = set()
    for op in classes.function.ops:
        if lookup(op.name, op.location).split.routing is Routing.WITHIN:
            found.add(classes.of(op.operands[-1].name, 0))
    return frozenset(owner for owner in found if owner is not None)


def chosen_experts(classes: Classes, strategy: Strategy) -> frozenset[Slot]:
    """The classes of experts that the strategy splits by number.

    Raises `DistIRError` where it asks for that and the model has no experts.
    """
    if strategy.experts == "hidden":
        return frozenset()
    found = expert_classes(classes)
    if not found:
        raise DistIRError(
            "the model has no experts that could be split by their number",
            f"strategy {strategy}",
            "leave experts out, or mark the weights that are experts S[0]",
        )
    return found


def experts_of(module: Module) -> frozenset[str]:
    """The parameters of a program's entry that are experts, each whole on the device that has it."""
    if not any(
        lookup(op.name).split.routing is Routing.WITHIN for f in module.functions for op in f.ops if not op.callee
    ):
        return frozenset()
    classes = classes_of(module)
    experts = expert_classes(classes)
    parameters = (item.value for item in module.main.inputs if item.role == "parameter")
    return frozenset(v.name for v in parameters if v.tensor.shape and classes.of(v.name, 0) in experts)
