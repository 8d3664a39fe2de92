"""Annotation of a model's inputs and parameters by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from distir_relax.errors import AnnotationError
from distir_relax.ir import PLACEMENTS, Attribute, Function, Module, Op, Value, fresh_name, value_names
from distir_relax.layout import DeviceMesh, Placement, print_placements
from distir_relax.layout.validate import validate_annotation
from distir_relax.sharding.factors import is_annotation


@dataclass(frozen=True, slots=True)
class Mark:
    """A requested layout: its source `where`, a placement per mesh axis, and the `round` in which it propagates.

    With `open`, it requests splits alone: propagation may split along the axes that have none.
    """

    where: str
    placements: tuple[Placement, ...]
    round: int = 0
    open: bool = False

    def op(self, value: Value, marked: Value) -> Op:
        """Return the annotation op from `value` to `marked`."""
        attrs: dict[str, Attribute] = {PLACEMENTS: self.placements}
        if self.round:
            attrs["round"] = self.round
        if self.open:
            attrs["open"] = True
        return Op("annotate_sharding", (value,), (marked,), attrs, self.where)


@dataclass(frozen=True, slots=True)
class ApplyShardings:
    """Pass: annotate inputs and parameters of the entry function; global stage in and out.

    `shardings` maps patterns (``"encoder.layer.*.dense.weight"``, with the wildcards of `fnmatch`) to placements on
    `mesh`; `names` maps names that a user may use to value names, by
    default those of the entry function's inputs. `unused` are the names of the model's parameters that
    the program does not need: patterns with wildcards may match them.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    shardings: Mapping[str, str]
    mesh: DeviceMesh
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    unused: frozenset[str] = field(default=frozenset(), repr=False)

    def run(self, module: Module) -> Module:
        """Annotate the inputs that the patterns match.

        Raises `AnnotationError` for a pattern that matches nothing or names an unused parameter, for two patterns that
        contradict each other, and for a mesh other than that of the model's own annotations; `PlacementError` for a
        placement that does not fit.
        """
        if any(mesh != self.mesh for mesh in module.meshes):
            raise AnnotationError(
                f"expected one mesh for all annotations: shardings are for {self.mesh}, the model's own annotations "
                f"for {module.meshes[0]}"
            )
        named = self if self.names else replace(self, names={i.value.name: i.value.name for i in module.main.inputs})
        matches = named._match({item.value.name: item.value.tensor.shape for item in module.main.inputs})
        marks = {value: Mark(f'shardings["{pattern}"]', layout) for value, (pattern, layout) in matches.items()}
        return replace(module, functions=(mark_inputs(module.main, marks), *module.functions[1:]), meshes=(self.mesh,))

    def _match(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[Placement, ...]]]:
        """Return the pattern and placements of each value that a pattern matches."""
        result: dict[str, tuple[str, tuple[Placement, ...]]] = {}
        for pattern, text in self.shardings.items():
            where = f'shardings["{pattern}"]'
            matches = [name for name in self.names if fnmatchcase(name, pattern)]
            if not matches:
                self._check_unused(pattern)
            for name in matches:
                value = self.names[name]
                layout = validate_annotation(text, self.mesh, shapes[value], f"{where}, {name}")
                other, before = result.setdefault(value, (pattern, layout))
                if before != layout:
                    raise AnnotationError(
                        f"{name} matches both {other!r}, with {print_placements(before)}, and {pattern!r}, with "
                        f"{print_placements(layout)}",
                        where,
                        "make one of the patterns narrower",
                    )
        return result

    def _check_unused(self, pattern: str) -> None:
        """Raise `AnnotationError` unless `pattern` has wildcards and matches unused parameters."""
        if pattern in self.unused:
            raise AnnotationError(
                f"{pattern!r} is a parameter that this call of the model does not use",
                f'shardings["{pattern}"]',
                "leave it out, or give an example call that uses it",
            )
        if not any(fnmatchcase(name, pattern) for name in self.unused):
            raise _no_match(pattern, self.names)


def matched_inputs(patterns: Iterable[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values whose names some of the patterns match; see `ApplyShardings`."""
    patterns = list(patterns)
    return tuple(value for name, value in names.items() if any(fnmatchcase(name, pattern) for pattern in patterns))


def change_annotations(
    function: Function, where: str, change: Callable[[Value, tuple[Placement, ...]], tuple[Placement, ...]]
) -> Function:
    """Return a function whose annotations with the source `where` have other placements.

    `change` returns them, from the annotated value and its present placements.
    """

    def changed(op: Op) -> Op:
        if not is_annotation(op) or op.location != where:
            return op
        placements = change(op.operands[0], op.placements)
        return replace(op, attrs={**op.attrs, PLACEMENTS: placements})

    return replace(function, ops=tuple(map(changed, function.ops)))


def mark_inputs(function: Function, marks: Mapping[str, Mark]) -> Function:
    """Annotate the inputs named in `marks`, and replace all their uses."""
    taken = value_names(function)
    annotated: dict[str, Value] = {}
    annotations: list[Op] = []
    for item in function.inputs:
        if (mark := marks.get(item.value.name)) is not None:
            name = fresh_name(f"{item.value.name}.sharded", taken)
            annotated[item.value.name] = Value(name, item.value.type)
            annotations.append(mark.op(item.value, annotated[item.value.name]))
    ops = [replace(op, operands=tuple(annotated.get(v.name, v) for v in op.operands)) for op in function.ops]
    outputs = [replace(o, value=annotated.get(o.value.name, o.value)) for o in function.outputs]
    return replace(function, ops=(*annotations, *ops), outputs=tuple(outputs))


def _no_match(pattern: str, names: Iterable[str]) -> AnnotationError:
    all_names = list(names)
    closest = difflib.get_close_matches(pattern.replace("*", "0"), all_names, n=3, cutoff=0.4)
    listed = ", ".join(closest or all_names[:3])
    return AnnotationError(
        f"the pattern {pattern!r} matches no input and no parameter",
        f'shardings["{pattern}"]',
        f"the nearest names are {listed}" if closest else f"the names are such as {listed}",
    )
