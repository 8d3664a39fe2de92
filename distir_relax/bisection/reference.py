"""Reference values of a plan: its program without placements, run op by op on whole tensors in this process.

The program is the sharded stage, in which every value is the model's. Ops run by their definition in the op table, on
the CPU, with eager torch: no pass that distributes, fuses or generates code has a part in it. A second evaluation in
float64 measures the rounding error of each value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distir_relax.bisection.rounding import difference, least_bound
from distir_relax.bundle import Bundle, Tensor
from distir_relax.errors import BundleError, RunError
from distir_relax.ir import HeadPartition, Module, Op, TensorType, Value, inline, parse_records
from distir_relax.ir.symbols import specialize
from distir_relax.ops import evaluate, lookup
from distir_relax.ops.table.dispatch import type_of
from distir_relax.runtime.arrays import as_torch, torch_dtype
from distir_relax.runtime.sequence_calls import PreparedCall
from distir_relax.runtime.verification import read_stage

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReferenceValue:
    """A value of the model, and the op that computes it from `operands`.

    `rounding` is its error against float64, at least that of one operation; infinite for integers that differ.
    """

    op: Op
    operands: tuple[torch.Tensor, ...]
    name: str
    tensor: torch.Tensor
    exact: torch.Tensor
    rounding: float


class Reference:
    """The model of a bundle in one call. `module` is its sharded stage, inlined, with the call's sizes.

    Raises BundleError for a bundle without a sharded stage.
    """

    def __init__(self, bundle: Bundle, prepared: PreparedCall) -> None:
        if "sharded.txt" not in bundle.texts:
            raise BundleError(
                "the bundle holds no sharded.txt: its program was written for devices, and has no model",
                str(bundle.path or bundle.manifest.name),
                "compile a model with distir compile, and bisect that bundle",
            )
        self.module: Module = inline(specialize(read_stage(bundle, "sharded"), prepared.call.sizes))
        self._bundle, self._prepared = bundle, prepared

    def run(self, visit: Callable[[ReferenceValue], None]) -> dict[str, torch.Tensor]:
        """Compute all values in program order, and pass each to `visit`; return the outputs by name.

        A value is freed after its last use.
        """
        import torch

        main = self.module.main
        with torch.inference_mode():
            values = self._inputs()
            exact: dict[str, torch.Tensor] = {}
            uses = Counter(v.name for op in main.ops for v in op.operands)
            uses.update(output.value.name for output in main.outputs)
            for op in main.ops:
                if not all(v.name in values for v in op.operands):
                    # A part of the sharded program was compiled: the rest has no inputs.
                    continue
                operands = tuple(values[v.name] for v in op.operands)
                # Inputs are widened for each op: two copies of all weights take more memory than the model.
                widened = [exact[v.name] if v.name in exact else _widened(values[v.name]) for v in op.operands]
                results, wide = run_op(op, operands), _run_wide(op, widened)
                least = least_bound(op, [type_of(x) for x in operands], [type_of(x) for x in results])
                for value, result, precise in zip(op.results, results, wide, strict=True):
                    values[value.name], exact[value.name] = result, precise
                    rounding = max(least, difference(result, precise.to(result.dtype)).error)
                    visit(ReferenceValue(op, operands, value.name, result, precise, rounding))
                for value in {*op.operands, *op.results}:
                    uses[value.name] -= sum(v == value for v in op.operands)
                    if uses[value.name] <= 0:
                        values.pop(value.name)
                        exact.pop(value.name, None)
            return {o.name: values[o.value.name] for o in main.outputs if o.value.name in values}

    def _inputs(self) -> dict[str, torch.Tensor]:
        """Return the inputs, weights and first states of the program, by name."""
        import torch

        manifest = self._prepared.call.manifest
        found = {name: as_torch(array) for name, array in self._prepared.inputs.items()}
        found |= {
            s.tensor.name: torch.zeros(s.tensor.shape, dtype=torch_dtype(s.tensor.dtype)) for s in manifest.states
        }
        stored = {tensor.name: tensor for tensor in manifest.weights}
        tensors = {}
        for item in self.module.main.inputs:
            name, declared = item.value.name, item.value.dtensor.tensor
            if name in stored:
                tensors[name] = self._weight(stored[name], declared)
            elif name in found:
                tensors[name] = found[name].to(torch_dtype(declared.dtype))
        return tensors

    def _weight(self, stored: Tensor, declared: TensorType) -> torch.Tensor:
        import torch

        tensor = self._bundle.weights.read(stored.name, [[(0, n)] if n else [] for n in stored.shape])
        if type_of(tensor) == declared:
            return tensor
        # The program has a copy of a key/value head for each rank that needs it.
        for record in parse_records(self._bundle.records):
            if isinstance(record, HeadPartition) and record.value == stored.name and record.copies:
                rows = declared.shape[record.dim] // len(record.copies)
                index = torch.tensor([head * rows + row for head in record.copies for row in range(rows)])
                return tensor.index_select(record.dim, index)
        raise BundleError(f"expected {declared} for the weight, found {type_of(tensor)}", stored.name)


def run_op(op: Op, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run an op of the sharded stage on global tensors: a change of layout changes no value."""
    if lookup(op.name, op.location).keeps_value:
        return (operands[0],)
    return evaluate(typed(op, operands), operands)


def typed(op: Op, operands: Sequence[torch.Tensor]) -> Op:
    """Return an op with the types of the tensors that it is evaluated on."""
    values = tuple(Value(f"x{i}", type_of(x)) for i, x in enumerate(operands))
    return Op(op.name, values, tuple(Value(v.name, _tensor_type(v)) for v in op.results), op.attrs, op.location)


def _tensor_type(value: Value) -> TensorType:
    return value.type if isinstance(value.type, TensorType) else value.dtensor.tensor


def _run_wide(op: Op, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run an op in float64; if it has no such form, in the dtypes that it declares."""
    try:
        results = run_op(op, operands)
    except RunError:
        narrow = [x.to(torch_dtype(_tensor_type(v).dtype)) for x, v in zip(operands, op.operands, strict=True)]
        results = run_op(op, narrow)
    return tuple(map(_widened, results))


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
