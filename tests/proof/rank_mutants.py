"""Programs of ranks with one mistake each, as a faulty compiler or a faulty edit makes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from distir_relax.ir import Function, Module, Op, Value, count_uses, inline
from distir_relax.ops import Trait, lookup

Mutation = Callable[[random.Random, Function], Function | None]


def mutants(ranked: Module, count: int, seed: int) -> Iterator[tuple[str, Module]]:
    """Iterate over `count` mutants of a ranked module, each with the name of its mutation. Calls are inlined.

    Of a program in which hardly anything can be changed there may be fewer.
    """
    draw = random.Random(seed)
    module = inline(ranked)
    names = list(MUTATIONS)
    found = 0
    for _ in range(100 * count):
        if found == count:
            return
        name = draw.choice(names)
        number = draw.randrange(len(module.functions))
        changed = MUTATIONS[name](draw, module.functions[number])
        if changed is not None and changed != module.functions[number]:
            functions = (*module.functions[:number], changed, *module.functions[number + 1 :])
            yield name, replace(module, functions=functions)
            found += 1


def _live(function: Function) -> list[int]:
    """Return the numbers of the ops whose results are used."""
    uses = count_uses(function)
    return [i for i, op in enumerate(function.ops) if any(uses[v.name] for v in op.results)]


def _communicates(op: Op) -> bool:
    return Trait.COMMUNICATES in lookup(op.name).traits


def _with(function: Function, number: int, *ops: Op) -> Function:
    return replace(function, ops=(*function.ops[:number], *ops, *function.ops[number + 1 :]))


def _substituted(function: Function, old: str, new: Value, start: int) -> Function:
    """Use another value in place of one, from an op on."""
    ops = [
        replace(op, operands=tuple(new if v.name == old else v for v in op.operands)) if i >= start else op
        for i, op in enumerate(function.ops)
    ]
    outputs = tuple(replace(o, value=new) if o.value.name == old else o for o in function.outputs)
    return replace(function, ops=tuple(ops), outputs=outputs)


def drop(draw: random.Random, function: Function) -> Function | None:
    """An op is left out: its operand stands for its result."""
    numbers = [
        i for i in _live(function)
        if function.ops[i].operands and function.ops[i].operands[0].type == function.ops[i].results[0].type
    ]  # fmt: skip
    if not numbers:
        return None
    number = draw.choice(numbers)
    op = function.ops[number]
    return _with(_substituted(function, op.results[0].name, op.operands[0], number + 1), number)


def repeat(draw: random.Random, function: Function) -> Function | None:
    """A communication, or another op that keeps the type, is done twice."""
    numbers = [
        i for i in _live(function)
        if function.ops[i].operands and function.ops[i].operands[0].type == function.ops[i].results[0].type
        and not lookup(function.ops[i].name).traits & {Trait.TRIVIAL, Trait.FINISHES, Trait.STARTS}
    ]  # fmt: skip
    if not numbers:
        return None
    number = draw.choice(numbers)
    op = function.ops[number]
    first = replace(op.results[0], name=f"{op.results[0].name}.again")
    again = replace(op, operands=(first, *op.operands[1:]))
    return _with(function, number, replace(op, results=(first, *op.results[1:])), again)


def exchange(draw: random.Random, function: Function) -> Function | None:
    """Two operands of an op are exchanged."""
    numbers = [
        i for i in _live(function)
        if len(function.ops[i].operands) > 1
        and function.ops[i].operands[0].type == function.ops[i].operands[1].type
        and function.ops[i].operands[0] != function.ops[i].operands[1]
        and Trait.COMMUTATIVE not in lookup(function.ops[i].name).traits
    ]  # fmt: skip
    if not numbers:
        return None
    number = draw.choice(numbers)
    op = function.ops[number]
    return _with(function, number, replace(op, operands=(op.operands[1], op.operands[0], *op.operands[2:])))


def other_operand(draw: random.Random, function: Function) -> Function | None:
    """An op takes another value of the same type."""
    numbers = _live(function)
    if not numbers:
        return None
    number = draw.choice(numbers)
    op = function.ops[number]
    values = [i.value for i in function.inputs] + [v for o in function.ops[:number] for v in o.results]
    choices = [(k, v) for k, x in enumerate(op.operands) for v in values if v.type == x.type and v != x]
    if not choices:
        return None
    place, value = draw.choice(choices)
    return _with(function, number, replace(op, operands=(*op.operands[:place], value, *op.operands[place + 1 :])))


def other_attribute(draw: random.Random, function: Function) -> Function | None:
    """A number among the attributes of an op is another one, or its reduction is."""
    choices = [
        (i, key) for i in _live(function) for key, value in function.ops[i].attrs.items()
        if (isinstance(value, (int, float)) and key not in ("step", "copy", "microbatch", "stage")) or key == "op"
    ]  # fmt: skip
    if not choices:
        return None
    number, key = draw.choice(choices)
    op = function.ops[number]
    value = op.attrs[key]
    changed = {"sum": "max", "max": "min", "min": "max", "mean": "sum"}[str(value)] if key == "op" else (
        not value if isinstance(value, bool) else value + 1  # type: ignore[operator]
    )  # fmt: skip
    return _with(function, number, replace(op, attrs={**op.attrs, key: changed}))


def reorder(draw: random.Random, function: Function) -> Function | None:
    """Two communications are exchanged. To wait for one earlier or later is no mistake."""
    numbers = [
        i for i, op in enumerate(function.ops)
        if _communicates(op) and Trait.FINISHES not in lookup(op.name).traits
    ]  # fmt: skip
    pairs = [
        (a, b) for a, b in pairwise(numbers)
        if not {v.name for v in function.ops[b].operands} & {v.name for o in function.ops[a:b] for v in o.results}
    ]  # fmt: skip
    if not pairs:
        return None
    a, b = draw.choice(pairs)
    ops = list(function.ops)
    ops.insert(a, ops.pop(b))
    return replace(function, ops=tuple(ops))


def exchange_outputs(draw: random.Random, function: Function) -> Function | None:
    """Two outputs of the same type are exchanged."""
    pairs = [
        (a, b) for a in range(len(function.outputs)) for b in range(a)
        if function.outputs[a].value.type == function.outputs[b].value.type
        and function.outputs[a].value != function.outputs[b].value
    ]  # fmt: skip
    if not pairs:
        return None
    a, b = draw.choice(pairs)
    outputs = list(function.outputs)
    outputs[a] = replace(function.outputs[a], value=function.outputs[b].value)
    outputs[b] = replace(function.outputs[b], value=function.outputs[a].value)
    return replace(function, outputs=tuple(outputs))


MUTATIONS: dict[str, Mutation] = {
    "drop": drop, "repeat": repeat, "exchange operands": exchange, "other operand": other_operand,
    "other attribute": other_attribute, "reorder": reorder, "exchange outputs": exchange_outputs,
}  # fmt: skip
