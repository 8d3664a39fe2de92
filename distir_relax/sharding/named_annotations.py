"""Annotations from outside a model: placements for inputs and parameters, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from distir_relax.errors import AnnotationError
from distir_relax.ir import Attribute, Function, Module, Op, Value, fresh_name, value_names
from distir_relax.layout import DeviceMesh, print_placements
from distir_relax.layout.validate import fit_annotation


@dataclass(frozen=True, slots=True)
class Mark:
    """A layout asked for: by whom, the placements as text, and in which round it spreads (`sharding.spread`)."""

    where: str
    placements: str
    round: int = 0

    def op(self, value: Value, marked: Value) -> Op:
        """The op that makes of `value` the `marked` one."""
        attrs: dict[str, Attribute] = {"placements": self.placements}
        if self.round:
            attrs["round"] = self.round
        return Op("annotate_sharding", (value,), (marked,), attrs, self.where)


@dataclass(frozen=True, slots=True)
class ApplyShardings:
    """The pass: global stage in and out, with marks on inputs and parameters of the entry function.

    `shardings` leads from patterns (``"encoder.layer.*.dense.weight"``, with the wildcards of `fnmatch`) to placements
    on `mesh`; `names` from every name that a user may use to the name of its value,
    by default those of the entry function's inputs. `unused` are names of parameters
    that the model has and the program does not need: a pattern with wildcards may cover them.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    shardings: Mapping[str, str]
    mesh: DeviceMesh
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    unused: frozenset[str] = field(default=frozenset(), repr=False)

    def run(self, module: Module) -> Module:
        """Mark what the patterns match.

        Raises `AnnotationError` for a pattern that matches nothing, or names what is not used, for two patterns that
        disagree about one tensor, and for a mesh unlike that of the model's own annotations; `PlacementError` for a
        placement that does not fit.
        """
        if any(known != self.mesh for known in module.meshes):
            raise AnnotationError(
                f"expected one mesh for all annotations: shardings are for {self.mesh}, the model's own annotations "
                f"for {module.meshes[0]}"
            )
        named = self if self.names else replace(self, names={i.value.name: i.value.name for i in module.main.inputs})
        chosen = named._chosen({item.value.name: item.value.tensor.shape for item in module.main.inputs})
        marks = {value: Mark(f'shardings["{pattern}"]', text) for value, (pattern, text) in chosen.items()}
        return replace(module, functions=(mark_inputs(module.main, marks), *module.functions[1:]), meshes=(self.mesh,))

    def _chosen(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, str]]:
        """The pattern and the placements of each value that a pattern matches."""
        chosen: dict[str, tuple[str, str]] = {}
        for pattern, text in self.shardings.items():
            where = f'shardings["{pattern}"]'
            matches = [name for name in self.names if fnmatchcase(name, pattern)]
            if not matches:
                self._check_unused(pattern)
            for name in matches:
                value = self.names[name]
                fitted = fit_annotation(text, self.mesh, shapes[value], f"{where}, {name}")
                placements = print_placements(fitted)
                other, before = chosen.setdefault(value, (pattern, placements))
                if before != placements:
                    raise AnnotationError(
                        f"{name} is matched by {other!r}, which says {before}, and by {pattern!r}, which says "
                        f"{placements}",
                        where,
                        "make one of the patterns narrower",
                    )
        return chosen

    def _check_unused(self, pattern: str) -> None:
        """Raise `AnnotationError` unless `pattern` has wildcards, and covers parameters that are not used."""
        if pattern in self.unused:
            raise AnnotationError(
                f"{pattern!r} is a parameter that this call of the model does not use",
                f'shardings["{pattern}"]',
                "leave it out, or give an example call that uses it",
            )
        if not any(fnmatchcase(name, pattern) for name in self.unused):
            raise _no_match(pattern, self.names)


def mark_inputs(function: Function, marks: Mapping[str, Mark]) -> Function:
    """The function with `marks` on inputs, by their names: an op on each, which all that used the input use instead."""
    taken = value_names(function)
    marked: dict[str, Value] = {}
    heads: list[Op] = []
    for item in function.inputs:
        if (mark := marks.get(item.value.name)) is not None:
            name = fresh_name(f"{item.value.name}.sharded", taken)
            marked[item.value.name] = Value(name, item.value.type)
            heads.append(mark.op(item.value, marked[item.value.name]))
    ops = [replace(op, operands=tuple(marked.get(v.name, v) for v in op.operands)) for op in function.ops]
    outputs = [replace(o, value=marked.get(o.value.name, o.value)) for o in function.outputs]
    return replace(function, ops=(*heads, *ops), outputs=tuple(outputs))


def _no_match(pattern: str, names: Iterable[str]) -> AnnotationError:
    known = list(names)
    near = difflib.get_close_matches(pattern.replace("*", "0"), known, n=3, cutoff=0.4)
    listed = ", ".join(near or known[:3])
    return AnnotationError(
        f"the pattern {pattern!r} matches no input and no parameter",
        f'shardings["{pattern}"]',
        f"the nearest names are {listed}" if near else f"the names are such as {listed}",
    )
