"""Sample dims of the values of a program, and their sizes in a part of the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil

from distir_relax.ir import BatchDim, Instance, Module, TensorType, Value, inlined_main
from distir_relax.sharding.factors import factoring_of
from distir_relax.strategies.factor_costs import Classes


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a program whose batch is known.

    `classes` are the factor classes of the inlined program, without work; `instance` maps to it. `inputs` are the
    inputs that have samples, `owners` the classes that are samples, `size` their number, 1 if unknown.
    """

    classes: Classes
    instance: Instance
    inputs: frozenset[str]
    owners: frozenset[object]
    size: int
    _dims: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(module: Module) -> Samples:
        """Return the samples by the batch records of a module."""
        inlined = inlined_main(module)
        classes = Classes(inlined.function, factoring_of(module))
        records = [record for record in module.records if isinstance(record, BatchDim)]
        owners = frozenset(classes.of(record.value, record.dim) for record in records) - {None}
        size = max((record.size for record in records), default=1)
        return Samples(classes, inlined.instance, frozenset(record.value for record in records), owners, size)

    @property
    def names(self) -> Mapping[str, str]:
        """Return the inlined names of the entry's values."""
        return self.instance.names

    def has(self, value: Value) -> bool:
        """Return whether a value of the entry has a dim of samples."""
        return bool(self.dims(self.names[value.name], len(value.tensor.shape)))

    def dependent(self, sources: Collection[str]) -> set[str]:
        """Return the names of the entry's values that depend on the inputs `sources`, which are included.

        Results of a call are distinguished: each depends on its own operands inside of the function.
        """
        reached = {self.names[name] for name in sources}
        for op in self.classes.function.ops:
            if any(v.name in reached for v in op.operands):
                reached.update(v.name for v in op.results)
        return {name for name, inlined in self.names.items() if inlined in reached}

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the dims of a value of the inlined program that are samples."""
        dims = self._dims.get(name)
        if dims is None:
            dims = self._dims[name] = tuple(dim for dim in range(rank) if self.classes.of(name, dim) in self.owners)
        return dims

    def part(self, name: str, full: TensorType, share: Fraction) -> TensorType:
        """Return the type of the largest part of such a value, if a part has this share of the samples."""
        dims = self.dims(name, len(full.shape)) if share < 1 else ()
        if not dims:
            return full
        return replace(full, shape=tuple(ceil(n * share) if d in dims else n for d, n in enumerate(full.shape)))
