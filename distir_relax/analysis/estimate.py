"""How long the ops of a program of the global stage take on one device, from the cost that their entries say."""

from __future__ import annotations

from dataclasses import dataclass, field

from distir_relax.cost.profile import Profile
from distir_relax.cost.roofline import op_seconds
from distir_relax.ir import Module, Op
from distir_relax.ops import lookup


@dataclass
class Estimate:
    """Times of ops of `module`, a program of the global stage, on one device of a machine; a call's are its ops'."""

    module: Module
    profile: Profile
    _functions: dict[str, float] = field(default_factory=dict)
    _ops: dict[object, float] = field(default_factory=dict)

    def seconds(self, op: Op) -> float:
        """The time of an op, in seconds."""
        if op.callee:
            return self._function(op.callee)
        key = (op.name, id(op.attrs), *(v.type for v in op.operands))
        if key not in self._ops:
            operands, results = [v.tensor for v in op.operands], [v.tensor for v in op.results]
            entry = lookup(op.name, op.location)
            self._ops[key] = op_seconds(self.profile, entry, operands, op.attrs, results)
        return self._ops[key]

    def _function(self, name: str) -> float:
        if name not in self._functions:
            self._functions[name] = sum(map(self.seconds, self.module.function(name).ops))
        return self._functions[name]
