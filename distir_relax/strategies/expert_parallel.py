"""Expert parallelism: split experts by number, along the axis that tokens are split along, or another.

If tokens are split along the same axis, each row goes to the device of its expert, and its result returns (Lepikhin et
al., GShard, 2020; Rajbhandari et al., DeepSpeed-MoE, 2022): propagation derives these exchanges from the split
(`sharding.expert_routing`). The entries of ops on grouped rows define which dims are experts.
"""

from __future__ import annotations

from distir_relax.errors import DistIRError
from distir_relax.ir import Module
from distir_relax.ops import Routing, lookup
from distir_relax.sharding.factors import Slot
from distir_relax.strategies.factor_costs import Classes, classes_of
from distir_relax.strategies.strategy import Strategy


def expert_classes(classes: Classes) -> frozenset[Slot]:
    """Return the classes that number the experts of a program's layers."""
    owners = set()
    for op in classes.function.ops:
        if lookup(op.name, op.location).split.routing is Routing.WITHIN:
            owners.add(classes.of(op.operands[-1].name, 0))
    return frozenset(owner for owner in owners if owner is not None)


def chosen_experts(classes: Classes, strategy: Strategy) -> frozenset[Slot]:
    """Return the classes of experts that the strategy splits by number.

    Raises `DistIRError` if it asks for that and the model has no experts.
    """
    if strategy.experts == "hidden":
        return frozenset()
    owners = expert_classes(classes)
    if not owners:
        raise DistIRError(
            "the model has no experts that can be split by number",
            f"strategy {strategy}",
            "remove experts, or annotate the expert weights S[0]",
        )
    return owners


def experts_of(module: Module) -> frozenset[str]:
    """Return the parameters of a program's entry that are experts, each whole on its device."""
    if not any(
        lookup(op.name).split.routing is Routing.WITHIN for f in module.functions for op in f.ops if not op.callee
    ):
        return frozenset()
    classes = classes_of(module)
    experts = expert_classes(classes)
    parameters = (item.value for item in module.main.inputs if item.role == "parameter")
    return frozenset(v.name for v in parameters if v.tensor.shape and classes.of(v.name, 0) in experts)
