"""Conversion of the sharded stage to TVM's distributed Relax dialect: `R.DTensor` types, `R.dist.redistribute`.

Relax has the placements ``R`` and ``S[dim]`` with equal contiguous shards, so programs with partial sums or uneven,
interleaved or empty shards cannot be converted. TVM must also be able to infer types of ops on `R.DTensor`s, as it can
for elementwise ops, `matmul`, reductions, `softmax`, `permute_dims` and `reshape`, for instance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError, PlacementError, UnsupportedOpError, VerificationError
from distir_relax.ir import Function, Module, Op, Value
from distir_relax.ir.symbols import module_symbols
from distir_relax.layout import DeviceMesh, Partial, Placement, R, Routed, Shard
from distir_relax.lowering.emit.relax_namespace import relax_scope
from distir_relax.lowering.emit.relax_sizes import RelaxSizes, with_own_names
from distir_relax.ops import Trait, lookup, relax_expression

if TYPE_CHECKING:
    import tvm


def to_relax_dtensor(module: Module, pending: str = "") -> tvm.IRModule:
    """Convert the entry function of the sharded `module` to Relax, with every value of type `R.DTensor`.

    Parameters keep their order; dots in names become underscores, and mesh axes lose their names. The mesh is the
    module's global info ``mesh[0]``. `frontends.relax` reads the module back.

    With `pending="R"`, a partial sum has the type that TVM's propagation gives it, ``R``, and its reduction is omitted:
    reading such a module back restores the reductions.

    Raises ValueError for another `pending`, `PlacementError` for a value whose layout Relax cannot express,
    `UnsupportedOpError` for an op that TVM cannot type on `R.DTensor`s or types differently, and `VerificationError` if
    the module is not sharded.
    """
    import tvm

    if pending not in ("", "R"):
        raise ValueError(f"expected pending='' or pending='R', found {pending!r}")
    if module.stage != "sharded":
        raise VerificationError(f"expected a module of the sharded stage, found the {module.stage} stage")
    mesh = _relax_mesh(module.meshes[0])
    sizes = RelaxSizes(tuple(module_symbols(module).values()))
    function = _FunctionBuilder(mesh, bool(pending), sizes).function(module.main)
    return tvm.IRModule(
        {tvm.ir.GlobalVar(module.main.name): function},
        attrs=tvm.ir.make_node("ir.DictAttrs", device_num=module.meshes[0].size),
        global_infos={"mesh": [mesh]},
    )


def _relax_mesh(mesh: DeviceMesh) -> Any:
    import tvm
    from tvm.relax.distributed import DeviceMesh as RelaxMesh

    return RelaxMesh(mesh.shape, tvm.ir.Range(0, mesh.size))


class _FunctionBuilder:
    """Builds a function's bindings with a `BlockBuilder`; `values` has the Relax expression of each value.

    With `sums_as_replicated` a partial sum has type ``R``.
    """

    def __init__(self, mesh: Any, sums_as_replicated: bool, sizes: RelaxSizes) -> None:
        from tvm import relax

        self.mesh = mesh
        self.sums_as_replicated = sums_as_replicated
        self.builder = relax.BlockBuilder()
        self.sizes = sizes
        self.scope: Mapping[str, Any] = {**relax_scope(exact=False), **sizes.scope()}
        self.values: dict[str, Any] = {}

    def function(self, function: Function) -> Any:
        """Return the Relax function; a single output is returned bare, several as a tuple."""
        from tvm import relax

        parameters = [self._variable(item.value, item.location) for item in function.inputs]
        with self.builder.function(function.name, parameters):
            try:
                for op in function.ops:
                    self._op(op)
            except DistIRError:
                # A builder that is left inside a function prints a complaint to stderr.
                self.builder.emit_func_output(relax.Tuple([]))
                raise
            outputs = [self.values[o.value.name] for o in function.outputs]
            self.builder.emit_func_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
        [(_, emitted)] = self.builder.get().functions.items()
        return emitted

    def _op(self, op: Op) -> None:
        import tvm
        from tvm import relax
        from tvm_ffi import structural_equal

        if len(op.results) != 1:
            raise _type_error(op, "it has several results")
        [value] = op.results
        operands = [self.values[v.name] for v in op.operands]
        entry = lookup(op.name, op.location)
        variable = self._variable(value, op.location)
        if Trait.SCALAR in entry.traits:
            self.values[value.name] = tvm.ir.GenericConst(self._expression(op, operands).value, variable.ty)
            return
        if Trait.REDISTRIBUTION in entry.traits and structural_equal(variable.ty, operands[0].ty):
            self.values[value.name] = operands[0]
            return
        if Trait.REDISTRIBUTION in entry.traits:
            call = relax.op.distributed.redistribute(operands[0], self.mesh, variable.ty.placement)
        else:
            try:
                call = self._expression(op, operands)
            except AttributeError:
                raise _type_error(op, "TVM has no such op, and constants within an expression have no type") from None
        try:
            call = self.builder.normalize(call)
        except Exception as error:
            raise _type_error(op, str(error).strip().splitlines()[-1]) from None
        if not structural_equal(call.ty, variable.ty):
            raise _type_error(op, f"expected {_layout(variable.ty)}, TVM's own rule gives {_layout(call.ty)}")
        self.builder.emit_normalized(relax.VarBinding(variable, call))

    def _expression(self, op: Op, operands: list[Any]) -> Any:
        names = [f"a{i}" for i in range(len(operands))]
        return eval(
            relax_expression(with_own_names(op), names), {**self.scope, **dict(zip(names, operands, strict=True))}
        )

    def _variable(self, value: Value, where: str) -> Any:
        from tvm import relax
        from tvm.relax.distributed import DTensorType as RelaxDTensor
        from tvm.relax.distributed import Placement as RelaxPlacement

        tensor = relax.TensorType(self.sizes.shape(value.dtensor.shape), value.dtensor.dtype)
        placement = RelaxPlacement.from_text(_placements(value, where, self.sums_as_replicated))
        variable = relax.Var(value.name.replace(".", "_"), RelaxDTensor(tensor, self.mesh, placement))
        self.values[value.name] = variable
        return variable


def _placements(value: Value, where: str, sums_as_replicated: bool) -> str:
    """Print the layout of a value as in Relax: ``S[0], R``; a partial sum is ``R`` if `sums_as_replicated`."""
    placements = [R if sums_as_replicated and isinstance(p, Partial) else p for p in value.dtensor.placements]
    for placement in placements:
        if problem := _inexpressible(placement):
            raise PlacementError(f"R.DTensor cannot express {placement} of {value}: {problem}", where, _hint(placement))
    dims = [p.dim for p in placements if isinstance(p, Shard)]
    if len(set(dims)) < len(dims):
        raise PlacementError(f"R.DTensor cannot split one dim of {value} along two mesh axes", where, _HINT)
    return ", ".join(f"S[{p.dim}]" if isinstance(p, Shard) else "R" for p in placements)


def _inexpressible(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "Relax has no partial sums"
    if isinstance(placement, Routed):
        return "Relax has no routed rows"
    if isinstance(placement, Shard) and placement.cut is not None:
        if not placement.cut.is_block:
            return "Relax splits a dim into contiguous blocks"
        if len(set(placement.cut.local_sizes())) > 1:
            return "Relax splits a dim into equal shards"
    return ""


def _layout(kind: Any) -> str:
    return str(getattr(kind, "placement", kind)).strip('"')


def _type_error(op: Op, reason: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"TVM cannot type {op.results[0]}, the {op.name}, as R.DTensor: {reason}", op.location, _HINT
    )


def _hint(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return 'to_relax_dtensor(pending="R") types it R and omits the reduction, as TVM does; ' + _HINT
    return _HINT


_HINT = "the ranked stage has no such limits: to_relax writes one Relax function per distinct rank"
