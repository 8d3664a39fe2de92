"""Which values of a program have a dim of samples, and what is left of them in a part of the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil

from distir_relax.ir import BatchDim, Instance, Module, TensorType, Value, whole_of
from distir_relax.sharding.factors import factoring_of
from distir_relax.strategies.factor_costs import Classes


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a program whose batch is known: which of its values have them.

    `classes` are those of the program with its calls written out, of which no work is counted, `instance` leads there.
    `inputs` are the inputs that have samples, `owners` the classes that are samples, `size` is how many there are, 1
    where that is not known.
    """

    classes: Classes
    instance: Instance
    inputs: frozenset[str]
    owners: frozenset[object]
    size: int
    _dims: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(module: Module) -> Samples:
        """Those that the records of a module's batch say."""
        whole = whole_of(module)
        classes = Classes(whole.function, factoring_of(module))
        records = [record for record in module.records if isinstance(record, BatchDim)]
        owners = frozenset(classes.of(record.value, record.dim) for record in records) - {None}
        size = max((record.size for record in records), default=1)
        return Samples(classes, whole.instance, frozenset(record.value for record in records), owners, size)

    @property
    def names(self) -> Mapping[str, str]:
        """From the names of the entry's values to those of the program with calls written out."""
        return self.instance.names

    def has(self, value: Value) -> bool:
        """Whether a value of the entry has a dim of samples."""
        return bool(self.dims(self.names[value.name], len(value.tensor.shape)))

    def dependent(self, sources: Collection[str]) -> set[str]:
        """The names of the entry's values that depend on `sources`, names of its inputs; these included.

        The results of a call are distinguished: each depends on its own operands inside of the function.
        """
        reached = {self.names[name] for name in sources}
        for op in self.classes.function.ops:
            if any(v.name in reached for v in op.operands):
                reached.update(v.name for v in op.results)
        return {name for name, inlined in self.names.items() if inlined in reached}

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """Which dims of a value of the program with calls written out are samples."""
        found = self._dims.get(name)
        if found is None:
            found = self._dims[name] = tuple(dim for dim in range(rank) if self.classes.of(name, dim) in self.owners)
        return found

    def part(self, name: str, whole: TensorType, share: Fraction) -> TensorType:
        """The type of the largest part of such a value, where a part has this share of the samples."""
        dims = self.dims(name, len(whole.shape)) if share < 1 else ()
        if not dims:
            return whole
        return replace(whole, shape=tuple(ceil(n * share) if d in dims else n for d, n in enumerate(whole.shape)))
