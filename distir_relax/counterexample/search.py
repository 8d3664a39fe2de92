"""Search for the smallest input on which two programs of a plan differ."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distir_relax.counterexample.comparison import (
    Comparison,
    Inputs,
    ProjectionComparison,
    ScheduleComparison,
    elements,
)
from distir_relax.counterexample.double import in_float64
from distir_relax.counterexample.model_comparison import ModelComparison
from distir_relax.counterexample.result import Counterexample, Difference, Element
from distir_relax.counterexample.shrink import Shrinker, Tensors, TimeIsOver
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, Op, PlacedType, TensorType, Type, UpdateProgram, inline, parse
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.layout import Symbol, assuming
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table.spmd_inference import local_attrs
from distir_relax.proof.plan import MATCH, PROJECTION, SCHEDULE

if TYPE_CHECKING:
    import torch

DEFAULT_SECONDS = 10.0
"""Time of a search."""

_MAX_ELEMENTS = 1 << 24
"""Maximum number of elements of all values of both programs: a run of more takes about a second."""
_MAX_FLOPS = 1e10
"""Maximum number of operations of both programs: a run of more takes seconds."""
_MAX_OPS = 50_000
"""Maximum number of ops of both programs, on all devices."""
_TOLERANCE = {True: 1e-7, False: 1e-2}
"""Largest difference that rounding explains, in float64 or not, relative to the largest element of a result."""
_DRAWS = 12
"""Number of inputs tried for each choice of sizes."""
_SIZES = (1, 2, 3, 4, 5, 8)


@dataclass(frozen=True)
class Stages:
    """The programs of a plan, verified; a schedule that was written by hand has no sharded program and no model."""

    ranked: Module
    distributed: Module
    sharded: Module | None = None
    model: Module | None = None


def find_counterexample(stages: Stages, statement: str, seconds: float = DEFAULT_SECONDS) -> Counterexample:
    """Search for the smallest input that shows that a `statement` of a proof (`Refuted.statement`) does not hold.

    Both programs of the statement run on random inputs: first at the smallest symbolic sizes, multiples of 1/64 in
    float64, and integers that the programs accept. An input with different results is shrunk (`shrink`). The search
    takes about `seconds`; it is deterministic unless time is over. Programs that are too large, or that cannot run
    here, are reported in the result.
    """
    search = _Search(stages, statement, time.monotonic() + seconds, seconds)
    try:
        with assuming(stages.ranked.guards):
            return search.run()
    except DistIRError as error:
        return Counterexample(reason=f"the programs cannot run here: {error.message}", tried=search.tried)


@dataclass
class _Search:
    stages: Stages
    statement: str
    deadline: float
    seconds: float
    tried: int = 0
    is_over: bool = False
    ranges: dict[str, int] = field(default_factory=dict)
    """The numbers that each input of integers may have: those below."""

    def run(self) -> Counterexample:
        """See `find_counterexample`."""
        if self.statement == MATCH:
            return Counterexample(reason="the programs do not match")
        inlined = {name: inline(module) for name, module in self._modules().items()}
        if reason := _refusal(inlined):
            return Counterexample(reason=reason)
        symbols: dict[str, Symbol] = {}
        for module in inlined.values():
            symbols.update(module_symbols(module))
        reason = "no sizes fit the program's conditions"
        for sizes in _choices(symbols):
            found = self._at(inlined, sizes)
            if isinstance(found, Counterexample):
                return self._with_smaller_sizes(inlined, symbols, found)
            reason = found
            if self._time() > 0.5:
                break
        return Counterexample(tried=self.tried, reason="" if self.tried else reason)

    def _modules(self) -> dict[str, Module]:
        """Return the programs of the statement, by stage."""
        stages, found = self.stages, {}
        if self.statement == PROJECTION:
            found = {"ranked": stages.ranked, "distributed": stages.distributed}
        elif self.statement == SCHEDULE:
            found = {"distributed": stages.distributed}
        elif stages.model is not None:
            found = {"model": stages.model}
        return found if stages.sharded is None else {**found, "sharded": stages.sharded}

    def _comparison(self, modules: Mapping[str, Module], wide: bool) -> Comparison:
        given = {name: in_float64(module) if wide else module for name, module in modules.items()}
        if "ranked" in given:
            return ProjectionComparison(given.get("sharded"), given["distributed"], given["ranked"])
        if "distributed" in given:
            return ScheduleComparison(given["sharded"], given["distributed"])
        records = modules["sharded"].records
        update = next((inline(parse(r.text)) for r in records if isinstance(r, UpdateProgram)), None)
        if update is not None and wide:
            update = in_float64(update)
        return ModelComparison(given["model"], given["sharded"], update)

    def _at(self, inlined: Mapping[str, Module], sizes: Mapping[str, int]) -> Counterexample | str:
        """Search at these sizes; return why nothing was found, or nothing could be tried."""
        try:
            modules = {name: specialize(module, sizes) for name, module in inlined.items()}
        except DistIRError as error:
            return error.message
        reason = ""
        for wide in (True, False):
            comparison = self._comparison(modules, wide)
            if elements(comparison.programs) > _MAX_ELEMENTS or _flops(comparison.programs) > _MAX_FLOPS:
                return "the program is too large to run here"
            try:
                self._bound_integers(comparison, wide)
                found = self._search(comparison, sizes, _TOLERANCE[wide])
            except DistIRError as error:
                # An op has no form in float64, or the sizes do not suit it.
                reason = f"the programs cannot run here: {error.message}"
                continue
            return found or "no difference"
        return reason

    def _search(self, comparison: Comparison, sizes: Mapping[str, int], tolerance: float) -> Counterexample | None:
        """Compare both programs on drawn inputs. Raises `DistIRError` if the first one accepts none of them."""
        inputs, refused = comparison.inputs, []
        for number in range(_DRAWS):
            if number and self._time() > 0.6:
                break
            drawn = _draw(inputs, self.ranges, number)
            try:
                difference = comparison.difference(drawn, tolerance)
            except DistIRError as error:
                refused.append(error)
                continue
            self.tried += 1
            if difference is not None:
                return self._shrunk(comparison, drawn, difference, sizes, tolerance)
        if len(refused) == number + 1:
            raise refused[0]
        return None

    def _shrunk(
        self, comparison: Comparison, drawn: Tensors, difference: Difference, sizes: Mapping[str, int], tolerance: float
    ) -> Counterexample:  # fmt: skip
        one = comparison.only(difference.output) if difference.output else comparison
        found = difference

        def shows(tensors: Inputs) -> bool:
            nonlocal found
            if self._time() > 1.0:
                raise TimeIsOver
            try:
                other = one.difference(tensors, tolerance)
            except DistIRError:
                return False
            found = other or found
            return other is not None

        needed = one.inputs
        shrinker = Shrinker({name: x for name, x in drawn.items() if name in needed}, shows)
        try:
            if not shows(shrinker.tensors):
                # An op that the output does not depend on takes part in the difference.
                one, shrinker = comparison, Shrinker(drawn, shows)
            shrinker.shrink()
        except TimeIsOver:
            self.is_over = True
        tensors = shrinker.tensors
        return Counterexample(
            found, tuple(_listed(tensors)), sizes, {name: x.numel() for name, x in tensors.items()}, self.tried,
            not self.is_over,
        )  # fmt: skip

    def _with_smaller_sizes(
        self, inlined: Mapping[str, Module], symbols: Mapping[str, Symbol], found: Counterexample
    ) -> Counterexample:
        """Return the same, or a counterexample with one of the sizes smaller, one after the other."""
        for name, symbol in symbols.items():
            for size in range(symbol.low, found.sizes[name]):
                if self._time() > 0.8:
                    return found
                smaller = self._at(inlined, {**found.sizes, name: size})
                if isinstance(smaller, Counterexample):
                    found = smaller
                    break
        return replace(found, tried=self.tried)

    def _bound_integers(self, comparison: Comparison, wide: bool) -> None:
        """Find the largest range of each input of integers that the first program accepts, of the sizes of dims and 2.

        Raises `DistIRError` if it does not accept zeros; `wide`, if one of the programs does not.
        """
        import torch

        inputs = comparison.inputs
        zeros = {name: torch.zeros(kind.shape, dtype=getattr(torch, kind.dtype)) for name, kind in inputs.items()}
        comparison.expected(zeros)
        if wide:
            comparison.found(zeros)
        limits = sorted({2, *(n for kind in inputs.values() for n in kind.shape if n > 2)}, reverse=True)
        for name, kind in inputs.items():
            self.ranges[name] = 1
            if "int" not in kind.dtype:
                continue
            for limit in limits:
                if self._time() > 0.3:
                    break
                if self._accepts(comparison, {**zeros, name: zeros[name] + (limit - 1)}):
                    self.ranges[name] = limit
                    break

    @staticmethod
    def _accepts(comparison: Comparison, inputs: Inputs) -> bool:
        try:
            comparison.expected(inputs)
        except DistIRError:
            return False
        return True

    def _time(self) -> float:
        """Return the share of the time that is over."""
        return 1.0 - (self.deadline - time.monotonic()) / self.seconds


def _refusal(modules: Mapping[str, Module]) -> str:
    """Return why programs do not run here, or an empty text."""
    count = 0
    for module in modules.values():
        devices = max(1, len(module.ranks) or (module.meshes[0].size if module.stage == "distributed" else 1))
        count += devices * sum(len(function.ops) for function in module.functions)
        if any(_is_foreign(op) for function in module.functions for op in function.ops):
            return "an op runs code of TVM"
    if "model" in modules and sum(isinstance(r, UpdateProgram) for r in modules["sharded"].records) > 1:
        return "a later loss is of the parameters after the updates before it"
    if count > _MAX_OPS:
        return f"the programs have {count:,} ops on all devices, more than {_MAX_OPS:,}"
    return ""


def _is_foreign(op: Op) -> bool:
    return Trait.FOREIGN in lookup(op.name, op.location).traits


def _flops(modules: Sequence[Module]) -> float:
    """Return the operations of programs, on all devices; those of the first device stand for the others."""
    total = 0.0
    for module in modules:
        for function in module.functions:
            times = max(1, module.ranks.count(function.name))
            for op in function.ops:
                flops = lookup(op.name, op.location).cost.flops
                if flops is not None:
                    operands, results = ([_first(v.type) for v in side] for side in (op.operands, op.results))
                    devices = len(op.results[0].placed.devices) if module.stage == "distributed" else times
                    total += devices * flops(tuple(operands), local_attrs(op.attrs, 0), tuple(results))
    return total


def _first(kind: Type) -> TensorType:
    """Return the type of a tensor on the first of its devices."""
    if isinstance(kind, PlacedType):
        return kind.local(0)
    assert isinstance(kind, TensorType)
    return kind


def _choices(symbols: Mapping[str, Symbol]) -> Iterator[dict[str, int]]:
    """Iterate over choices of sizes, small ones first."""
    tried = []
    for size in (*_SIZES, None):
        values = {name: s.typical if size is None else s.nearest(size) for name, s in symbols.items()}
        if values not in tried:
            tried.append(values)
            yield values


def _draw(inputs: Mapping[str, TensorType], ranges: Mapping[str, int], number: int) -> Tensors:
    """Draw inputs: multiples of 1/64, of all signs or positive, small or larger; integers, 0 and 1 first."""
    import torch

    generator = torch.Generator().manual_seed(number)
    largest, is_positive = ((128, False), (128, True), (16, False), (512, False))[number % 4]
    drawn = {}
    for name, kind in inputs.items():
        dtype = getattr(torch, kind.dtype)
        if kind.dtype == "bool":
            drawn[name] = torch.randint(0, 2, kind.shape, generator=generator).bool()
        elif dtype.is_floating_point or dtype.is_complex:
            numbers = torch.randint(1, largest + 1, kind.shape, generator=generator).double() / 64
            signs = 1 - 2 * torch.randint(0, 2, kind.shape, generator=generator)
            drawn[name] = (numbers if is_positive else numbers * signs).to(dtype)
        else:
            limit = min(2, ranges.get(name, 1)) if number == 0 else ranges.get(name, 1)
            drawn[name] = torch.randint(0, limit, kind.shape, generator=generator).to(dtype)
    return drawn


def _listed(tensors: Mapping[str, torch.Tensor]) -> Iterator[Element]:
    for name, x in tensors.items():
        for index in x.nonzero().tolist():
            value = x[tuple(index)].item()
            yield Element(name, tuple(index), value.real if isinstance(value, complex) else float(value))
