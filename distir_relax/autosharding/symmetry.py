"""Find equivalent values and ops of a function, so that they share one set of variables.

The weights of a model's layers are passed to the calls of one function, and a step of training updates each: ops that
do the same to the same inputs of a function are equivalent. Equivalence is color refinement (Weisfeiler and Leman,
1968) for a few rounds: the color of a value depends on its producer and its users. All calls of
a function have the same color, so the position of a layer does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from distir_relax.ir import Function, Op

_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class SymmetryKeys:
    """Keys of the inputs and ops of a function; those with equal keys are equivalent."""

    inputs: tuple[Hashable, ...]
    ops: tuple[Hashable, ...]


def find_symmetry(
    function: Function, operand_key: Callable[[str, int], Hashable], result_key: Callable[[str, int], Hashable]
) -> SymmetryKeys:  # fmt: skip
    """Return keys of inputs and ops near calls; all others get unique ones.

    `operand_key` and `result_key` map a callee and an operand or result number to a key: equal ones are equivalent.
    """
    return _ColorRefinement(function, operand_key, result_key).run()


@dataclass(slots=True)
class _ColorRefinement:
    function: Function
    operand_key: Callable[[str, int], Hashable]
    result_key: Callable[[str, int], Hashable]
    numbers: dict[Hashable, int] = field(default_factory=dict)
    users: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By value: the number of each op that uses it, and of the operand."""

    def run(self) -> SymmetryKeys:
        function = self.function
        for number, op in enumerate(function.ops):
            for operand, value in enumerate(op.operands):
                self.users[value.name].append((number, operand))
        values = {i.value.name: self._color((i.role, i.value.type)) for i in function.inputs}
        ops = [self._color(_op_color(op)) for op in function.ops]
        outputs = {output.value.name for output in function.outputs}
        for _ in range(_ROUNDS):
            for number, op in enumerate(function.ops):
                # Calls are not refined by their operands: the keys of the callee stand for them.
                if not op.callee:
                    ops[number] = self._color((ops[number], *(values[v.name] for v in op.operands)))
                values.update(
                    (v.name, self._color((ops[number], self._result_key(op, i)))) for i, v in enumerate(op.results)
                )
            for name, color in values.items():
                used = frozenset((ops[user], self._operand_key(user, operand)) for user, operand in self.users[name])
                values[name] = self._color((color, used, name in outputs))
        near_calls = self._near_calls()
        return SymmetryKeys(
            tuple(values[i.value.name] if i.value.name in near_calls else i.value.name for i in function.inputs),
            tuple(
                ops[number] if any(v.name in near_calls for v in (*op.operands, *op.results)) else -number - 1
                for number, op in enumerate(function.ops)
            ),
        )

    def _operand_key(self, user: int, operand: int) -> Hashable:
        op = self.function.ops[user]
        return self.operand_key(op.callee, operand) if op.callee else operand

    def _result_key(self, op: Op, result: int) -> Hashable:
        return self.result_key(op.callee, result) if op.callee else result

    def _near_calls(self) -> set[str]:
        """Return operands and results of calls, and those of ops on them."""
        names = {v.name for op in self.function.ops if op.callee for v in (*op.operands, *op.results)}
        for op in self.function.ops:
            if any(v.name in names for v in op.operands):
                names.update(v.name for v in (*op.operands, *op.results))
        return names

    def _color(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


def _op_color(op: Op) -> Hashable:
    if op.callee:
        return ("call", op.callee)
    return (op.name, tuple(sorted((key, str(value)) for key, value in op.attrs.items())), *(v.type for v in op.results))
