"""Passes as text: ``propagate{mesh=2},delay-reductions,to-distir{tail=pad}``, parsed and printed.

A pass is a frozen dataclass; its fields are its options. Fields of types without a text form (data of an imported
model, such as its scopes) keep their defaults. A value with commas or brackets is in double quotes.

    passes  = pass {"," pass}
    pass    = name ["{" [option {"," option}] "}"]
    option  = field "=" value
    value   = word | '"' text '"' | "[" value {"," value} "]" | "{" key "=" value {"," key "=" value} "}"
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from distir_relax.autodiff import Differentiate, LinearCasts, ReduceGradients
from distir_relax.autosharding import PlaceBySearch
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import DistIRError
from distir_relax.executable import BatchRequests, Hoist, PlanMemory, SelectKernels
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.incremental import ComputeOnce, EachCall, FirstCall, Incremental, LastPositions
from distir_relax.ir import Inline, Pass, pass_name
from distir_relax.layout import DeviceMesh, as_mesh
from distir_relax.lowering import (
    AccumulateInCalls,
    AttendStates,
    BoundAttention,
    DropIdentities,
    FuseDifferentiable,
    FuseLocal,
    IndexPositions,
    JoinProducts,
    MergeEqual,
    Microbatches,
    OneSequence,
    OrderSums,
    OverlapCollectives,
    Pipeline,
    Project,
    SkipRepeats,
    ToDistIR,
    ToPlaces,
)
from distir_relax.optimizers import OPTIMIZERS, MasterWeights, Optimize, Optimizer, OrderUpdates, ReloadWeights
from distir_relax.sharding import ApplyShardings, DelayReductions, Propagate
from distir_relax.strategies.apply import ApplyStrategy
from distir_relax.strategies.hoist_positions import HoistPositions
from distir_relax.strategies.pipeline_stages import CutStages
from distir_relax.strategies.replicate_heads import ReplicateHeads
from distir_relax.strategies.sequence_parallel import SplitSequence
from distir_relax.strategies.strategy import Strategy, as_strategy
from distir_relax.strategies.zero import GatherParameters, ShardGradients, ShardParameters

PASSES: dict[str, type[Pass]] = {}
"""The passes by name."""

_OPTIMIZERS: dict[str, type[Optimizer]] = {name.lower(): kind for name, kind in OPTIMIZERS.items()}


def register_pass(kind: type[Pass]) -> type[Pass]:
    """Register a pass under the name of its class: ``JoinReductions`` is ``join-reductions``; a class decorator.

    Raises ValueError for a class that is not a dataclass, and for a name that another pass has.
    """
    name = pass_name(kind)
    if not is_dataclass(kind):
        raise ValueError(f"expected {kind.__name__} to be a dataclass, whose fields are its options")
    if PASSES.setdefault(name, kind) is not kind:
        raise ValueError(f"there is another pass {name}: {PASSES[name].__qualname__}")
    return kind


for _kind in (
    Incremental, LastPositions, ComputeOnce, FirstCall, EachCall, ReplicateHeads, Outline, MasterWeights,
    ApplyShardings, ApplyStrategy, ShardParameters, SplitSequence, HoistPositions, CutStages, FuseDifferentiable,
    OrderUpdates, Differentiate, LinearCasts, ShardGradients, Microbatches, ReduceGradients, AccumulateInCalls,
    GatherParameters, Optimize, ReloadWeights, Propagate, DelayReductions, PlaceBySearch, ToDistIR, ToPlaces, Pipeline,
    OrderSums, OverlapCollectives, Project, Inline, FuseLocal, JoinProducts,
    OneSequence, MergeEqual, DropIdentities, SkipRepeats, IndexPositions, BoundAttention, AttendStates, Hoist,
    BatchRequests, PlanMemory, SelectKernels,
):  # fmt: skip
    register_pass(_kind)


def parse_passes(text: str) -> list[Pass]:
    """Parse a list of passes. Raises `DistIRError` for unknown passes and options, and for malformed values."""
    return [_parse_pass(part) for part in _split(text) if part.strip()]


def print_passes(passes: Sequence[Pass]) -> str:
    """Print passes with the options that differ from their defaults, as `parse_passes` reads them."""
    return ",".join(map(print_pass, passes))


def print_pass(step: Pass) -> str:
    """Print one pass; see `print_passes`."""
    options = _print_options(step)
    return f"{pass_name(step)}{{{options}}}" if options else pass_name(step)


@dataclass(frozen=True)
class PassOption:
    """An option of a pass: its name, type and default as text; the default is None where the option is required."""

    name: str
    type: str
    default: str | None


def pass_options(kind: type[Pass]) -> list[PassOption]:
    """Return the options of a pass that have a text form."""
    options = []
    for spec, hint in _options(kind):
        default = _default(spec)
        options.append(PassOption(spec.name, _type_name(hint), None if default is MISSING else _print(default)))
    return options


def _parse_pass(text: str) -> Pass:
    name, brace, rest = text.strip().partition("{")
    kind = PASSES.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, PASSES, 1)
        raise DistIRError(
            f"there is no pass {name!r}",
            hint=f"did you mean {near[0]}? distir opt --list shows all" if near else "distir opt --list shows all",
        )
    if brace and not rest.endswith("}"):
        raise DistIRError(f"expected }} at the end of {text.strip()!r}")
    step: Pass = _build(name, kind, rest[:-1])
    return step


def _build(name: str, kind: type[Any], text: str) -> Any:
    """Construct a dataclass instance from the options in `text`."""
    options = {declared.name: (declared, hint) for declared, hint in _options(kind)}
    values = {}
    for key, value in _pairs(text, name):
        if key not in options:
            available = f"has the options {', '.join(options)}" if options else "has no options"
            raise DistIRError(f"the pass {name} has no option {key!r}", hint=f"it {available}")
        values[key] = _read(value, options[key][1], f"{name}{{{key}=...}}")
    missing = [key for key, (declared, _) in options.items() if key not in values and _default(declared) is MISSING]
    if missing:
        raise DistIRError(f"the pass {name} needs {', '.join(missing)}", hint=f"{name}{{{missing[0]}=...}}")
    return kind(**values)


def _options(kind: type[Any]) -> Iterator[tuple[Field[Any], Any]]:
    """Return the fields that have a text form, with their types."""
    hints = get_type_hints(kind)
    for declared in fields(kind):
        if _has_text(hints[declared.name]):
            yield declared, hints[declared.name]


def _default(declared: Field[Any]) -> Any:
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


def _has_text(hint: Any) -> bool:
    if _is_union(hint):
        return any(_has_text(part) for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        return get_args(hint)[1:] == (Ellipsis,) and _has_text(get_args(hint)[0])
    return hint in _READERS or (get_origin(hint) is Mapping and get_args(hint)[1] in _READERS)


def _read(text: str, hint: Any, where: str) -> Any:
    """Parse a value of a type. Raises `DistIRError` for malformed text."""
    if _is_union(hint):
        parts = get_args(hint)
        if type(None) in parts and text == "none":
            return None
        return _read(text, next(part for part in parts if _has_text(part)), where)
    if get_origin(hint) is tuple:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return tuple(_read(_unquoted(part.strip()), get_args(hint)[0], where) for part in _split(inner) if part.strip())
    if get_origin(hint) is Mapping:
        if not (text.startswith("{") and text.endswith("}")):
            raise DistIRError(f"expected {{KEY=VALUE,...}}, found {text!r}", where)
        return {key: _read(value, get_args(hint)[1], where) for key, value in _pairs(text[1:-1], where)}
    try:
        return _READERS[hint](text)
    except ValueError:
        raise DistIRError(f"expected a value of type {_type_name(hint)}, found {text!r}", where) from None


def _print_options(instance: Any) -> str:
    """Print the options of a pass or an optimizer that differ from their defaults."""
    values = [(declared, getattr(instance, declared.name)) for declared, _ in _options(type(instance))]
    return ",".join(f"{declared.name}={_print(value)}" for declared, value in values if value != _default(declared))


def _print(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(_print(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_quoted(key)}={_print(item)}" for key, item in value.items()) + "}"
    if isinstance(value, DeviceMesh):
        return _quoted("x".join(map(str, value.shape)) + ":" + ",".join(value.axes))
    if isinstance(value, Profile):
        return _quoted(value.name)
    if isinstance(value, Optimizer):
        return f"{type(value).__name__.lower()}{{{_print_options(value)}}}"
    return _quoted(str(value))


def _read_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _read_device_mesh(text: str) -> DeviceMesh:
    shape, _, axes = text.partition(":")
    sizes = tuple(map(int, shape.split("x")))
    return as_mesh(sizes) if not axes else DeviceMesh(sizes, tuple(axes.split(",")))


def _read_optimizer(text: str) -> Optimizer:
    name, _, rest = text.partition("{")
    if name not in _OPTIMIZERS:
        raise DistIRError(f"expected {', '.join(_OPTIMIZERS)}, found {name!r}", hint="optimizer=adamw{lr=0.001}")
    optimizer: Optimizer = _build(name, _OPTIMIZERS[name], rest.removesuffix("}"))
    return optimizer


_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    bool: _read_bool,
    DeviceMesh: _read_device_mesh,
    Strategy: as_strategy,
    Profile: as_profile,
    Optimizer: _read_optimizer,
}
"""The types that have a text form, each with its parser."""


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _type_name(hint: Any) -> str:
    if _is_union(hint):
        return " | ".join(_type_name(part) for part in get_args(hint) if part is type(None) or _has_text(part))
    if hint is type(None):
        return "none"
    return str(hint).replace("typing.", "").replace("collections.abc.", "") if get_args(hint) else hint.__name__


def _pairs(text: str, where: str) -> Iterator[tuple[str, str]]:
    for part in _split(text):
        if part.strip():
            key, equals, value = _partition(part)
            if not equals:
                raise DistIRError(f"expected OPTION=VALUE, found {part.strip()!r}", where)
            yield _unquoted(key.strip()), _unquoted(value.strip())


def _partition(text: str) -> tuple[str, str, str]:
    """Split at the first equals sign outside of quotes."""
    quoted = False
    for index, char in enumerate(text):
        quoted ^= char == '"'
        if char == "=" and not quoted:
            return text[:index], "=", text[index + 1 :]
    return text, "", ""


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes. Raise `DistIRError` for unbalanced ones."""
    parts, depth, quoted = [""], 0, False
    for char in text:
        quoted ^= char == '"'
        if not quoted:
            depth += (char in "{[(") - (char in "}])")
        if depth < 0:
            break
        if char == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    if depth or quoted:
        raise DistIRError(f"expected matching brackets and quotes, found {text!r}")
    return parts


def _quoted(text: str) -> str:
    return f'"{text}"' if not text or any(char in ',{}[]()=" ' for char in text) else text


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' and '"' not in text[1:-1] else text
