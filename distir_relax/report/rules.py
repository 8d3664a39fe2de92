"""The op table as text: dims that may be sharded, reductions that remain, and dims that must not be sharded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distir_relax.errors import DistIRError, UnsupportedOpError
from distir_relax.ir import TensorType
from distir_relax.layout import DTYPES
from distir_relax.ops import BLOCKED, PARALLEL, Factor, OpDef, Rule, Trait, all_operands, entries, infer, lookup


def table() -> list[tuple[str, str, str, str]]:
    """Return for each op of a model: its name, rule, the operands through which a partial sum passes, torch code.

    A rule that depends on shapes or attributes is ``by shape``; `explain_rule` shows it for an instance.
    """
    return [(entry.name, _rule_text(entry), _linear(entry), _torch(entry)) for entry in entries() if entry.computes]


def explain_rule(name: str, operands: Sequence[str] = (), attrs: Mapping[str, Any] | None = None) -> str:
    """Explain an op's rule, for an instance with `operands` (types as in program text: ``f32[4,5]``) and `attrs`.

    Without operands an instance is generated from the rule. For an op that communicates, explain its attributes. Raises
    `UnsupportedOpError` for an op that is not in the table, and `DistIRError` for operands that the op does not take,
    or that cannot be generated.
    """
    entry = lookup(name)
    if entry.semantics.attributes and not entry.computes:
        attributes = entry.semantics.attributes.items()
        return "\n".join([f"{name}: for distributed programs", *(f"  {key}: {text}" for key, text in attributes)])
    types, results, rule = _instance(entry, operands, attrs)
    attributes_text = f" with {', '.join(f'{k}={v}' for k, v in attrs.items())}" if attrs else ""
    lines = [f"{name}: {_rule_text(entry)}"]
    lines.append(f"{', '.join(map(str, types))} -> {', '.join(map(str, results))}{attributes_text}")
    lines += [f"  {line}" for line in _factors(rule, entry)]
    sets = entry.linear_sets(len(types), attrs or {})
    lines += [f"  a partial sum may pass: {_groups(sets)}"] if sets else ["  no partial sum may pass"]
    lines.append(f"  torch: {_torch(entry)}")
    return "\n".join(lines)


def rule_json(name: str, operands: Sequence[str] = (), attrs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return `explain_rule` as JSON: operand and result types, factors with their dims, operand sets that pass a
    partial sum.

    A factor's `kind` is ``parallel``, ``blocked``, or its reduction; `operands` and `results` list, for each tensor,
    the dims of the factor. For an op that communicates, its attributes.
    """
    entry = lookup(name)
    if entry.semantics.attributes and not entry.computes:
        return {"op": name, "attributes": dict(entry.semantics.attributes)}
    types, results, rule = _instance(entry, operands, attrs)

    def dims(tensors: Sequence[Sequence[Sequence[int]]], index: int) -> list[list[int]]:
        return [[dim for dim, factors in enumerate(tensor) if index in factors] for tensor in tensors]

    return {
        "op": name,
        "rule": _rule_text(entry),
        "operands": list(map(str, types)),
        "results": list(map(str, results)),
        "factors": [
            {
                "name": factor.name, "size": factor.size, "kind": factor.kind,
                "operands": dims(rule.operands, index), "results": dims(rule.results, index),
            }
            for index, factor in enumerate(rule.factors)
        ],
        "linear": [sorted(group) for group in entry.linear_sets(len(types), attrs or {})],
        "torch": _torch(entry),
    }  # fmt: skip


def _instance(
    entry: OpDef, operands: Sequence[str], attrs: Mapping[str, Any] | None
) -> tuple[list[TensorType], Sequence[TensorType], Rule]:
    """Return the operand and result types of an instance of an op, and its rule."""
    name = entry.name
    types = [_parse_type(text) for text in operands] or _generated_types(entry)
    try:
        results = infer(name, types, attrs or {})
        return types, results, entry.rule_for(types, attrs or {}, results)
    except NotImplementedError:
        raise UnsupportedOpError(f"{name} is an internal op of the compiler, which has no rule") from None
    except DistIRError as error:
        hint = f"distir rules {name} 'f32[4,6]' ... --attr axis=1, with valid operands and attributes"
        raise DistIRError(error.message, "", hint) from None
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise DistIRError(f"{name} has no instance with ({', '.join(map(str, types))}): {error}") from None


def parse_attrs(texts: Sequence[str]) -> dict[str, Any]:
    """Parse attributes ``key=value`` with Python literals as values. Raise `DistIRError` if malformed."""
    attrs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        try:
            attrs[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise DistIRError(f"expected key=value, such as axis=1 or shape=(4,6), found {text!r}") from None
        assert equals
    return attrs


def _factors(rule: Rule, entry: OpDef) -> Iterator[str]:
    for index, factor in enumerate(rule.factors):
        places = [
            f"dim {dim} of {tensor}"
            for tensor, dims in (
                *((f"operand {i}", d) for i, d in enumerate(rule.operands)),
                *(("the result" if len(rule.results) == 1 else f"result {i}", d) for i, d in enumerate(rule.results)),
            )
            for dim, factors in enumerate(dims)
            if index in factors
        ]
        is_in_result = any(index in factors for dims in rule.results for factors in dims)
        yield f"{factor.name} ({factor.size}): {', '.join(places)}: {_meaning(factor, entry, is_in_result)}"
    for window in rule.windows:
        yield (
            f"window {window.index} ({window}): "
            f"dim {window.operand_dim} of operand {window.operand}, dim {window.result_dim} of the result: "
            "may be split; devices exchange halos"
        )


def _meaning(factor: Factor, entry: OpDef, is_in_result: bool) -> str:
    if factor.kind == BLOCKED:
        return "must be whole on one device"
    parts = " (devices then run other ops)" if factor.name in entry.split.expand or "*" in entry.split.expand else ""
    if factor.kind == PARALLEL:
        return f"may be split; each device computes its part{parts}"
    if factor.kind in ("sum", "max", "min"):
        results = "results without it are" if is_in_result else "the result is"
        return f"may be split; {results} I[{factor.kind}] then{parts}"
    return f"may be split; it is a {factor.kind}{parts}"


def _rule_text(entry: OpDef) -> str:
    if isinstance(entry.split.rule, str):
        return entry.split.rule
    return "each element by itself" if Trait.POINTWISE in entry.traits else "by shape"


def _linear(entry: OpDef) -> str:
    linear = entry.semantics.linear
    if linear is all_operands:
        return "all operands together"
    return "by attributes" if callable(linear) else _groups(linear)


def _groups(sets: Sequence[frozenset[int]]) -> str:
    texts = [" and ".join(str(i) for i in sorted(group)) + (" together" if len(group) > 1 else "") for group in sets]
    return f"operand {' or '.join(texts)}" if texts else ""


def _torch(entry: OpDef) -> str:
    return entry.semantics.torch if isinstance(entry.semantics.torch, str) else "by attributes"


def _parse_type(text: str) -> TensorType:
    match = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    dtypes = {short: long for long, (short, _) in DTYPES.items()}
    if match is None or match[1] not in dtypes:
        raise DistIRError(f"expected an operand's type, such as f32[4,5], found {text!r}")
    return TensorType(tuple(int(n) for n in match[2].split(",") if n), dtypes[match[1]])


def _generated_types(entry: OpDef) -> list[TensorType]:
    """Generate small operands of different sizes, one per operand of the rule; matrices for a pointwise op."""
    if not isinstance(entry.split.rule, str):
        for count in range(1, 4):
            types = [TensorType((2, 3), "float32")] * count
            try:
                entry.rule_for(types, {}, infer(entry.name, types, {}))
            except (DistIRError, ValueError, IndexError, KeyError, TypeError, NotImplementedError):
                continue
            return types
        raise DistIRError(
            f"the rule of {entry.name} depends on shapes and attributes",
            hint=f"give an instance: distir rules {entry.name} 'f32[4,6]' ... --attr axis=1",
        )
    sizes: dict[str, int] = {}
    types = []
    for operand in entry.split.rule.split("->")[0].split(","):
        shape = []
        for token in re.findall(r"\.\.\.|\([^)]*\)|[^\s()]+", operand):
            size = 1
            for name in ["4"] if token == "..." else token.strip("()").split():
                size *= 1 if name == "1" else sizes.setdefault(name, len(sizes) + 2)
            shape.append(size)
        types.append(TensorType(tuple(shape), "float32"))
    return types
