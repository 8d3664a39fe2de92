"""What of a function lies alike because a block that it belongs to is one function, however often it is called.

The weights of a model's layers are passed on to the calls of one function, and a step of training updates each: what
does the same to the same inputs of a function has one set of variables. Alike are values and ops that cannot be told
apart by what is done with them and what they are made of, as far as a few steps away (Weisfeiler and Leman, 1968);
calls are looked at from outside, so it does not matter which of the layers it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from distir_relax.ir import Function, Op

_STEPS = 2


@dataclass(frozen=True, slots=True)
class Alike:
    """For each input and each op of a function a key: those with equal ones are alike."""

    inputs: tuple[Hashable, ...]
    ops: tuple[Hashable, ...]


def alike(
    function: Function, taken_as: Callable[[str, int], Hashable], given_as: Callable[[str, int], Hashable]
) -> Alike:  # fmt: skip
    """What is alike in a function: inputs and ops that have to do with calls, all others are like none.

    `taken_as` says of a function that is called, and the number of an operand, what it is there, `given_as` the same of
    a result: what is alike there has equal answers.
    """
    return _Colors(function, taken_as, given_as).run()


@dataclass(slots=True)
class _Colors:
    function: Function
    taken_as: Callable[[str, int], Hashable]
    given_as: Callable[[str, int], Hashable]
    known: dict[Hashable, int] = field(default_factory=dict)
    users: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Who uses each value: the number of an op, and of its operand."""

    def run(self) -> Alike:
        function = self.function
        for number, op in enumerate(function.ops):
            for operand, value in enumerate(op.operands):
                self.users[value.name].append((number, operand))
        values = {i.value.name: self._color((i.role, i.value.type)) for i in function.inputs}
        ops = [self._color(_form(op)) for op in function.ops]
        given = {output.value.name for output in function.outputs}
        for _ in range(_STEPS):
            for number, op in enumerate(function.ops):
                # Who calls it does not matter, and what is called with it is known from there.
                if not op.callee:
                    ops[number] = self._color((ops[number], *(values[v.name] for v in op.operands)))
                values.update(
                    (v.name, self._color((ops[number], self._given(op, i)))) for i, v in enumerate(op.results)
                )
            for name, color in values.items():
                used = frozenset((ops[user], self._taken(user, operand)) for user, operand in self.users[name])
                values[name] = self._color((color, used, name in given))
        of_calls = self._of_calls()
        return Alike(
            tuple(values[i.value.name] if i.value.name in of_calls else i.value.name for i in function.inputs),
            tuple(
                ops[number] if any(v.name in of_calls for v in (*op.operands, *op.results)) else -number - 1
                for number, op in enumerate(function.ops)
            ),
        )

    def _taken(self, user: int, operand: int) -> Hashable:
        op = self.function.ops[user]
        return self.taken_as(op.callee, operand) if op.callee else operand

    def _given(self, op: Op, result: int) -> Hashable:
        return self.given_as(op.callee, result) if op.callee else result

    def _of_calls(self) -> set[str]:
        """The values that calls take or give, and what is computed of or with them."""
        found = {v.name for op in self.function.ops if op.callee for v in (*op.operands, *op.results)}
        for op in self.function.ops:
            if any(v.name in found for v in op.operands):
                found.update(v.name for v in (*op.operands, *op.results))
        return found

    def _color(self, key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))


def _form(op: Op) -> Hashable:
    if op.callee:
        return ("call", op.callee)
    return (op.name, tuple(sorted((key, str(value)) for key, value in op.attrs.items())), *(v.type for v in op.results))
