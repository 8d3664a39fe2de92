"""Verification of a bundle's programs against its manifest and each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import STAGE_FILES, Bundle, Manifest, State, local_shape, weights_identity
from distir_relax.bundle.write import MANIFEST_FILE
from distir_relax.errors import BundleError, DistIRError
from distir_relax.layout import evaluate_size, size_of

if TYPE_CHECKING:
    from distir_relax.ir import Module, TensorType


@dataclass(frozen=True)
class Verified:
    """Identity of a bundle whose programs were verified and whose weights were hashed.

    `manifest` is the manifest's checksum, which covers those of all files; `weights` is the identity of the file of
    weights, which changes with a write (`StoredWeights.identity`). A bundle that is `trusted` may call foreign code.
    """

    manifest: str
    weights: tuple[int, ...]
    trusted: bool

    @classmethod
    def of(cls, bundle: Bundle) -> Verified:
        """Return the identity of a bundle that was read from files."""
        return cls(bundle.manifest.checksums[MANIFEST_FILE], weights_identity(bundle), bundle.trusted)

    def to_json(self) -> list[Any]:
        """Return plain values."""
        return [self.manifest, *self.weights, self.trusted]


def verify_programs(bundle: Bundle) -> None:
    """Raise BundleError unless the ranks' programs, the text of the ranked stage, match each other and the manifest.

    Those of its encoder and evaluation, too (`ir.verify`). What runs is generated from that text, which calls no
    foreign code unless the bundle is trusted. A bundle made by hand without it is not checked.
    """
    for part in (bundle.encoder, bundle.evaluation):
        if part is not None:
            verify_programs(part)
    file = STAGE_FILES["ranked"]
    if file not in bundle.texts:
        return
    where = str(bundle.path / file if bundle.path else file)
    try:
        ranked = read_stage(bundle, "ranked")
    except BundleError as wrong:
        raise BundleError(f"the programs of the ranks do not match: {wrong.message}", where) from None
    _check_steps(ranked, where)
    _check_manifest(bundle.manifest, ranked, str(bundle.path or bundle.manifest.name))
    if not bundle.trusted:
        _refuse_foreign(ranked, where)


def read_stage(bundle: Bundle, stage: str, verified: bool = False) -> Module:
    """Return the program of a bundle at a stage; unless `verified`, verify it, since files may have been modified.

    Raises BundleError when the bundle has no text of it, or one that is no valid program.
    """
    from distir_relax.ir import verify
    from distir_relax.ops import check

    where = str(bundle.path / STAGE_FILES[stage]) if bundle.path else STAGE_FILES[stage]
    text = bundle.stage(stage)
    try:
        module = _parsed(text, where)
        if not verified:
            verify(module, check)
    except DistIRError as wrong:
        raise BundleError(f"not a program of the {stage} stage: {wrong}", where) from None
    if module.stage != stage:
        raise BundleError(f"expected a program of the {stage} stage, found the {module.stage} stage", where)
    return module


@lru_cache(maxsize=4)
def _parsed(text: str, where: str) -> Module:
    """Return the program of a text; ranks that are threads, and parts of a bundle's loading, share it."""
    from distir_relax.ir import gc_disabled, parse

    with gc_disabled():
        return parse(text, where)


def _check_steps(ranked: Module, where: str) -> None:
    """Raise BundleError for a communication without its step in the schedule, which the watchdog reports."""
    from distir_relax.ops import Trait, lookup

    for function in ranked.functions:
        for op in function.ops:
            if not op.callee and Trait.COMMUNICATES in lookup(op.name, op.location).traits and "step" not in op.attrs:
                place = op.location or op.results[0]
                raise BundleError(f"expected the step of {op.name} at {place}, found none", where)


def _refuse_foreign(ranked: Module, where: str) -> None:
    """Raise BundleError for an op that runs code which the text contains or names."""
    from distir_relax.ops import Trait, lookup

    for function in ranked.functions:
        for op in function.ops:
            if not op.callee and Trait.FOREIGN in lookup(op.name, op.location).traits:
                raise BundleError(
                    f"{op.name}{f' at {op.location}' if op.location else ''} runs a function of TVM, which is code",
                    where,
                    "if you trust the bundle as you would a program, pass --trust-code",
                )


def _check_manifest(manifest: Manifest, ranked: Module, where: str) -> None:
    """Raise BundleError unless the programs' inputs and outputs are the manifest's shards of each rank.

    States are inputs of the programs, after the others; their next values are outputs after the others.
    """
    from distir_relax.ir import TensorType

    if len(ranked.ranks) != manifest.mesh.size or ranked.meshes[:1] != (manifest.mesh,):
        raise BundleError(f"the manifest is for {manifest.mesh}, its programs are not", where)
    new = next((size_of(symbol) for symbol in manifest.symbols if symbol.name == "new"), 0)
    compared = set()
    for rank, name in enumerate(ranked.ranks):
        inputs, weights, outputs = (
            tuple((t.name, TensorType(local_shape(t, manifest.mesh, rank), t.dtype)) for t in tensors if t.is_on(rank))
            for tensors in (manifest.inputs, manifest.weights, manifest.outputs)
        )
        states = [state for state in manifest.states if state.tensor.is_on(rank)]
        inputs += tuple((s.tensor.name, _state_type(s, manifest, rank, 0)) for s in states)
        outputs += tuple((s.output, _state_type(s, manifest, rank, new)) for s in states)
        if (name, inputs, weights, outputs) in compared:
            continue
        compared.add((name, inputs, weights, outputs))
        if manifest.program_of(rank).name != name:
            raise BundleError(
                f"the manifest has rank {rank} run {manifest.program_of(rank).name!r}, not {name!r}", where
            )
        function = ranked.function(name)
        for role, expected in (("input", inputs), ("weight", weights)):
            types = {i.value.name: i.value.tensor for i in function.inputs if (i.role == "input") == (role == "input")}
            _compare(role, "takes", types, dict(expected), rank, where)
        _compare("output", "gives", {o.name: o.value.tensor for o in function.outputs}, dict(outputs), rank, where)


def _state_type(state: State, manifest: Manifest, rank: int, new: int) -> TensorType:
    """Return the type of a rank's shard of a state with `new` more positions."""
    from distir_relax.ir import TensorType

    shape = local_shape(state.tensor, manifest.mesh, rank)
    if state.grows:
        total = state.tensor.shape[state.dim] + new
        shape = tuple(evaluate_size(size, {"past": total}) for size in shape)
    return TensorType(shape, state.tensor.dtype)


def _compare(
    role: str, does: str, program: Mapping[str, TensorType], expected: Mapping[str, TensorType], rank: int, where: str
) -> None:
    if list(program) != list(expected):
        names = ", ".join(program) or "nothing"
        raise BundleError(
            f"the manifest has the {role}s {', '.join(expected) or 'none'}, rank {rank} {does} {names}", where
        )
    for name, kind in program.items():
        if expected[name] != kind:
            raise BundleError(
                f"the manifest does not fit the programs: rank {rank} {does} {kind}, the manifest has {expected[name]}",
                f"{where} ({role} {name!r})",
            )
