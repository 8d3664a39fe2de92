"""What this package reads from elsewhere, as targets: valid files, their mutations, and all that is done with one.

A target reads a file and uses what it gave as the package does. It may raise `DistIRError`, with a place, and nothing
else; within seconds, and without taking memory that the file does not have.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

import distir_relax as dr
from distir_relax.autosharding import PlaceBySearch
from distir_relax.autosharding.serialize import parse_search, print_search
from distir_relax.bundle import FileWeights, Manifest, PrivateKey, PublicKey, Tensor, create_key, local_shape
from distir_relax.compiler.pass_manager import run_passes
from distir_relax.cost.profile import load_profile, read_profile
from distir_relax.cost.profile_writer import print_profile
from distir_relax.errors import BundleError, DistIRError, SignatureError
from distir_relax.frontends.checkpoint import with_checkpoint
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.onnx.importer import import_onnx
from distir_relax.interpret.distributed_executor import run_devices
from distir_relax.interpret.global_executor import interpret
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import Inline, Module, PlacedType, TensorType, Value, parse, parse_records, print_module, verify
from distir_relax.ir.printer import print_attribute
from distir_relax.ir.program import Function, Input
from distir_relax.ir.symbols import at_sizes
from distir_relax.layout import DTYPES
from distir_relax.lowering import FuseLocal, Project, ToDistIR
from distir_relax.lowering.emit.torch import to_torch
from distir_relax.ops import check, infer, lookup
from distir_relax.ops.table.entry import NO_SPLIT
from distir_relax.runtime.npz import read_npz
from distir_relax.schedules import from_csv, order_of, timeline, to_csv
from distir_relax.sharding import DelayReductions, NonfiniteValues, Propagate
from distir_relax.simulation.simulator import simulate_module
from distir_relax.support import parse_json
from tests import mutations
from tests.mutations import Mutation

MOST_SECONDS = 30.0
SMALL = 1 << 20
"""Programs whose tensors have more bytes in all are not run."""
GOLDEN = Path(__file__).parent / "golden"
MACHINE = load_profile("dgx2-v100")


@dataclass(frozen=True)
class Target:
    """A reader: the contents of valid files, how they are mutated, and what is done with a file."""

    name: str
    valid: Callable[[], Sequence[bytes]]
    mutations: tuple[Mutation, ...]
    read: Callable[[Path], object]

    def try_file(self, seed: int, folder: Path) -> str:
        """What is wrong with how the mutated file of this seed is read; nothing when it is well."""
        file = folder / f"file.{self.name}"
        with warnings.catch_warnings():
            # An archive may have a name twice.
            warnings.simplefilter("ignore")
            file.write_bytes(mutations.mutated(_valid(self), self.mutations, seed))
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.read(file)
        except DistIRError as error:
            try:
                str(error).encode()
            except UnicodeEncodeError:
                return f"{self.name} {seed}: an error that cannot be printed: {error!a}"
        except Exception:
            return f"{self.name} {seed}: {traceback.format_exc(limit=-8)}"
        taken = time.perf_counter() - start
        return f"{self.name} {seed}: it took {taken:.1f} s" if taken > MOST_SECONDS else ""


@cache
def _valid(target: Target) -> Sequence[bytes]:
    return target.valid()


def _arrays() -> list[bytes]:
    import io

    found = []
    for write in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        write(file, x=np.arange(12.0).reshape(3, 4), ids=np.arange(5), e=np.zeros((0, 3), np.float32), s=np.array(True))
        found.append(file.getvalue())
    return found


@cache
def _plan() -> Any:
    """A small model with a fused weight on 3 ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
    return dr.compile(model, (torch.ones(2, 5),), mesh=3, shardings={"0.weight": "S[0]"})


def _orders() -> list[bytes]:
    asked = (("1f1b", 3, 4, 1), ("zb-v", 2, 3, 2), ("streaming", 3, 2, 2), ("interleaved", 2, 4, 2))
    return [to_csv(order_of(name, *shape)).encode() for name, *shape in asked]


def _read_order(file: Path) -> None:
    order = from_csv(file.read_text(errors="replace"), where=str(file))
    assert timeline(order).makespan > 0
    assert from_csv(to_csv(order)) == order


@cache
def symbolic_plan() -> Any:
    """A program for batches of any size on 3 ranks, with a guard: a slice may be empty."""

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(5, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).flatten(1)[:, 2:].softmax(1) + x[:, 1:2].sum(2)

    dynamic = {"x": {0: dr.Dim("batch", typical=4), 1: dr.Dim("length", max=64)}}
    return dr.compile(Rows(), (torch.ones(4, 3, 5),), mesh=3, shardings={"x": "S[0]"}, dynamic_shapes=dynamic)


def _manifests() -> list[bytes]:
    return [json.dumps(_plan().bundle(("torch",)).manifest.to_json()).encode()]


def _symbolic_manifests() -> list[bytes]:
    return [json.dumps(symbolic_plan().bundle(("torch",)).manifest.to_json()).encode()]


def _read_manifest(file: Path) -> None:
    manifest = Manifest.from_json(parse_json(file.read_bytes(), BundleError, str(file)))
    fixed = manifest.at({symbol.name: symbol.typical for symbol in manifest.symbols})
    for tensor in (*fixed.inputs, *fixed.outputs, *fixed.weights):
        for rank in range(manifest.mesh.size):
            local_shape(tensor, manifest.mesh, rank)
    assert Manifest.from_json(parse_json(json.dumps(manifest.to_json()), BundleError)) == manifest


_STAGES = ("global", "sharded", "distributed", "ranked")


def _symbolic_texts() -> list[bytes]:
    return [symbolic_plan().text(stage).encode() for stage in _STAGES]


def _texts() -> list[bytes]:
    names = ("rfc_propagated", "rfc_delayed", "rfc_distributed_pad", "rfc_ranked_ragged", "blocks_distributed_ragged")
    found = [(GOLDEN / f"{name}.txt").read_bytes() for name in names]
    found += [_plan().text(stage).encode() for stage in _STAGES]
    folder = GOLDEN.parent.parent / "examples" / "paper"
    return found + [file.read_bytes() for file in sorted(folder.glob("*.distir"))]


def _op_texts() -> list[bytes]:
    """A program of the global stage for each sample of an op, marked so that propagation reads its rule."""
    from tests.ops.samples import SAMPLES

    found = []
    for name, samples in SAMPLES.items():
        for sample in samples:
            kinds = [re.sub(r" [<>=~].*", "", text) for text in sample.operands]
            texts = [f'module @global {{ func @m(input %x: {kind}) {{ return "x": %x }} }}' for kind in kinds]
            types = [parse(text).main.inputs[0].value.tensor for text in texts]
            if lookup(name).split is NO_SPLIT or lookup(name).semantics.partial_eval:
                continue  # of programs that are split already, or whose results only numbers tell
            results = infer(name, types, sample.attrs)
            inputs = ", ".join(f"input %x{i}: {kind}" for i, kind in enumerate(kinds))
            given = ", ".join(f"%x{i}" for i in range(len(kinds)))
            marked = "%m" + given[2:] if kinds and types[0].shape else given
            mark = f'%m0: {kinds[0]} = annotate_sharding(%x0) {{placements="S[0]"}}' if marked != given else ""
            made = ", ".join(f"%y{i}: {kind}" for i, kind in enumerate(results))
            attrs = ", ".join(f"{key}={print_attribute(value)}" for key, value in sample.attrs.items())
            outputs = ", ".join(f'"y{i}": %y{i}' for i in range(len(results)))
            found.append(
                f'module @global {{\n  mesh[0] = device_mesh((3,), ("tp",))\n  func @main({inputs}) {{\n    {mark}\n'
                f"    {made} = {name}({marked}) {{{attrs}}}\n    return {outputs}\n  }}\n}}\n".encode()
            )
    return found


def _read_program(file: Path) -> None:
    module = parse(file.read_bytes().decode("utf-8", "replace"), file.name, places=True)
    if module.stage == "distributed":
        module = infer_types(module)
    verify(module, check)
    # Of texts, since no nan is equal to itself.
    assert print_module(parse(print_module(module))) == print_module(module)
    _use(module)


def _use(module: Module) -> None:
    """What the package does with a verified program of a stage. It runs at typical sizes."""
    fixed = at_sizes(module, {})
    if module.stage == "global":
        if _is_small(fixed):
            interpret(fixed, {i.value.name: _tensor(i.value.tensor) for i in fixed.main.inputs})
        if module.meshes and module.meshes[0].size <= 64:
            _use(run_passes(module, (Propagate(None), DelayReductions())))
    elif module.stage == "sharded" and module.meshes[0].size <= 64:
        run_passes(module, (ToDistIR("ragged"), Project(), FuseLocal()))
        run_passes(module, (ToDistIR("pad"),))
    elif module.stage == "distributed":
        simulate_module(fixed, MACHINE)
        if module.meshes and module.meshes[0].size <= 16:
            ranked = run_passes(module, (Inline(), Project(), FuseLocal()))
            verify(ranked, check)
            to_torch(ranked, "m")
        if _is_small(fixed):
            run_devices(fixed, {i.value.name: _held(i.value.placed) for i in fixed.main.inputs})
    elif module.stage == "ranked":
        to_torch(module, "m")


def _is_small(module: Module) -> bool:
    total = 0
    for function in module.functions:
        for value in [i.value for i in function.inputs] + [v for op in function.ops for v in op.results]:
            kind: Any = value.type
            shape = [max(n.values) if hasattr(n, "values") else n for n in kind.shape]
            total += math.prod(shape) * DTYPES[kind.dtype][1] * len(getattr(kind, "devices", (0,)))
    return total <= SMALL


def _held(kind: PlacedType) -> dict[int, torch.Tensor]:
    return {device: _tensor(kind.local(index)) for index, device in enumerate(kind.devices)}


def _tensor(kind: TensorType) -> torch.Tensor:
    return torch.ones(kind.shape, dtype=getattr(torch, kind.dtype))


def _records() -> list[bytes]:
    return [plan.bundle(("torch",)).records.encode() for plan in (_plan(), symbolic_plan())]


def _read_records(file: Path) -> None:
    symbols = {symbol.name: symbol for symbol in symbolic_plan().symbols.values()}
    parse_records(file.read_text(errors="replace"), symbols=symbols)


@cache
def _search() -> dict[str, str]:
    search = PlaceBySearch(_plan().mesh, MACHINE, memory=1e9, hazards=NonfiniteValues(infinite=frozenset({"mask"})))
    return print_search(search, _plan().modules["global"])


def _searches() -> list[bytes]:
    return [_search()["search.json"].encode()]


def _read_search(file: Path) -> None:
    parse_search({**_search(), "search.json": file.read_text(errors="replace")}, _plan().mesh)


def _profiles() -> list[bytes]:
    folder = resources.files("distir_relax.cost.profiles")
    return [file.read_bytes() for file in folder.iterdir() if file.name.endswith(".toml")]


def _read_profile(file: Path) -> None:
    profile = load_profile(file)
    read_profile(print_profile(profile))
    simulate_module(_plan().modules["distributed"], replace(profile, devices=3))


def _onnx_models() -> list[bytes]:
    from tests.frontends.test_onnx_from_elsewhere import model  # type: ignore[import-not-found,unused-ignore]

    return [model().SerializeToString()]


def _read_onnx(file: Path) -> None:
    imported = import_onnx(str(file), {})
    verify(imported.module, check)
    text = print_module(imported.module)
    assert print_module(parse(text)) == text
    if _is_small(imported.module):
        inputs = {i.value.name: _tensor(i.value.tensor) for i in imported.module.main.inputs}
        interpret(imported.module, {**inputs, **imported.tensors})


_WEIGHTS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(0, 3), "c": torch.ones(5, dtype=torch.bfloat16)}


def _weights() -> list[bytes]:
    return [save(_WEIGHTS)]


def _read_weights(file: Path) -> None:
    tensors = [Tensor(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in _WEIGHTS.items()]
    source = FileWeights(file, tensors)
    for tensor in tensors:
        source.read(tensor.name, [[(0, n)] for n in tensor.shape])


def _read_checkpoint(file: Path) -> None:
    checkpoint = file.rename(file.with_suffix(".safetensors"))
    values = [Value(n, TensorType(tuple(t.shape), str(t.dtype).removeprefix("torch."))) for n, t in _WEIGHTS.items()]
    main = Function("main", tuple(Input(value, "parameter") for value in values), (), ())
    held = {name: tensor.to("meta") for name, tensor in _WEIGHTS.items()}
    imported = Imported(Module("global", (main,)), held, {n: n for n in held}, lambda a, k: {}, lambda f: f)
    found = with_checkpoint(imported, checkpoint)
    for name in _WEIGHTS:
        found.tensors[name].sum()


BYTES, TEXT = (mutations.of_bytes,), (mutations.of_words, mutations.of_numbers, mutations.of_lines)


@cache
def _signature() -> tuple[bytes, bytes, bytes, bytes]:
    """Return a manifest, its signature, and the private and the public key, as files have them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_key(folder / "key.pem")
        manifest = _manifests()[0]
        PrivateKey.read(folder / "key.pem").sign(manifest).write(folder)
        files = (folder / file for file in ("signature.json", "key.pem", "key.pub"))
        return manifest, *(file.read_bytes() for file in files)  # type: ignore[return-value]


def _read_signature(file: Path) -> None:
    """Check the signature of the valid manifest; no other signature than its own is accepted."""
    manifest, valid, _, public = _signature()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "key.pub").write_bytes(public)
        (folder / "signature.json").write_bytes(file.read_bytes())
        found = PublicKey.read(folder / "key.pub").check(manifest, folder)
    assert found.value == json.loads(valid)["signature"]


def _read_key(file: Path) -> None:
    """Read a key as both kinds; one that is read signs what its public key accepts."""
    kinds: Sequence[type[PrivateKey] | type[PublicKey]] = (PublicKey, PrivateKey)
    errors = []
    for kind in kinds:
        try:
            key = kind.read(file)
        except SignatureError as wrong:
            errors.append(wrong)
        else:
            assert len(key.fingerprint if isinstance(key, PublicKey) else key.sign(b"x").value) in (64, 128)
    if len(errors) == len(kinds):
        raise errors[0]


TARGETS = (
    Target("npz", _arrays, (*BYTES, mutations.of_archive, mutations.of_archive), read_npz),
    Target("manifest", _manifests, (*BYTES, mutations.of_numbers, *(mutations.of_json,) * 4), _read_manifest),
    Target("signature", lambda: [_signature()[1]], (*BYTES, mutations.of_json, mutations.of_numbers), _read_signature),
    Target("keys", lambda: _signature()[2:], (*BYTES, *TEXT), _read_key),
    Target("program", _texts, (*BYTES, *TEXT, *(mutations.of_program,) * 6), _read_program),
    Target("sizes", _symbolic_texts, (mutations.of_numbers, *(mutations.of_sizes,) * 4), _read_program),
    Target("symbols", _symbolic_manifests, (mutations.of_json, *(mutations.of_sizes,) * 3), _read_manifest),
    Target("ops", _op_texts, (mutations.of_numbers, *(mutations.of_program,) * 4), _read_program),
    Target("records", _records, (*BYTES, mutations.of_json), _read_records),
    Target("search", _searches, (*BYTES, mutations.of_json), _read_search),
    Target("toml", _profiles, (*BYTES, *TEXT), _read_profile),
    Target("onnx", _onnx_models, (*BYTES, *(mutations.of_onnx,) * 4), _read_onnx),
    Target("schedule", _orders, (*BYTES, mutations.of_numbers, *TEXT), _read_order),
    Target("weights", _weights, (*BYTES, mutations.of_safetensors), _read_weights),
    Target("checkpoint", _weights, (*BYTES, mutations.of_safetensors), _read_checkpoint),
)
