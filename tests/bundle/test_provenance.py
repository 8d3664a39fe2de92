"""The origin of a bundle in its manifest: model, source files of weights, versions; equal inputs give equal bundles."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

import distir_relax as dr
from distir_relax.bundle import Manifest, Provenance, read_bundle
from distir_relax.errors import BundleError
from distir_relax.report.provenance import provenance_json
from distir_relax.support.user_function import find_function, qualified_name
from tests.bundle_kinds import files_of
from tests.bundle_mutations import ROOT


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


NAME = f"{__name__}.Layers"
SHARDED: dict[str, Any] = {"mesh": 3, "shardings": {"up.weight": "S[0]"}}


def seeded() -> Layers:
    torch.manual_seed(0)
    return Layers().eval()


def digest(file: Path) -> tuple[str, str]:
    return file.name, hashlib.sha256(file.read_bytes()).hexdigest()


def provenance(bundle: Path) -> Provenance:
    return read_bundle(bundle).manifest.provenance


def checkpoints(bundle: Path) -> list[tuple[str, str]]:
    return [(file.name, file.checksum) for file in provenance(bundle).checkpoints]


def test_equal_inputs_give_equal_bundles(tmp_path: Path) -> None:
    made = []
    for number in range(2):
        path = dr.compile(seeded(), (torch.ones(2, 5),), **SHARDED).save(tmp_path / str(number) / "m.dist")
        made.append({file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()})
    assert made[0] == made[1]
    assert len(made[0]) >= 8


def test_the_class_and_the_versions(tmp_path: Path) -> None:
    plan = dr.compile(seeded(), (torch.ones(2, 5),), **SHARDED)
    found = provenance(plan.save(tmp_path / "m.dist", backends=("torch",)))
    assert (found.model, found.model_checksum, found.checkpoints) == (NAME, None, ())
    assert found.versions == {
        "distir-relax": dr.__version__, "python": platform.python_version(), "numpy": np.__version__,
        "torch": torch.__version__,
    }  # fmt: skip
    assert "tvm" in provenance(plan.save(tmp_path / "both.dist")).versions


def test_a_class_of_a_users_file_has_the_files_name(tmp_path: Path) -> None:
    """Also if a module of that name is loaded, and the file was renamed for it."""
    (tmp_path / "json.py").write_text("class Model:\n    class Inner: ...\n\ndef build(): return Model.Inner()\n")
    assert qualified_name(type(find_function(f"{tmp_path}/json.py:build")())) == "json.Model.Inner"


def test_classes_of_any_name(tmp_path: Path) -> None:
    """Their module may be gone, or have no version that is one."""
    for module, name in (("nowhere.x", "Made"), ("json", "a\nb"), (__name__, "x" * 3000)):
        kind = type(name, (torch.nn.Linear,), {"__module__": module})
        found = provenance(dr.compile(kind(5, 7), (torch.ones(2, 5),), mesh=1).save(tmp_path / "m.dist", ("torch",)))
        assert found.model is not None
        assert found.model.startswith(module if name.isprintable() else "'json.a\\nb'")
        assert found.versions.keys() - {"json"} == {"distir-relax", "python", "numpy", "torch"}


def test_a_program_has_no_model() -> None:
    from tests.runtime.handmade import mlp_bundle

    assert mlp_bundle([3, 2]).manifest.provenance.model is None


def test_training_names_the_model_not_its_loss(tmp_path: Path) -> None:
    batch = torch.ones(6, 5), torch.zeros(6, 3)
    step = dr.compile_training(
        seeded().train(), torch.nn.functional.mse_loss, example_batch=batch, optimizer=dr.optim.SGD(lr=0.1), metrics={}
    )
    weights = {name: tensor + 1 for name, tensor in seeded().state_dict().items()}
    save_file(weights, tmp_path / "start.safetensors")
    expected = digest(tmp_path / "start.safetensors")
    step.load_parameters(tmp_path / "start.safetensors")
    # The file was read, and may be written to.
    save_file({name: tensor * 2 for name, tensor in weights.items()}, tmp_path / "start.safetensors")
    read = read_bundle(step.save(tmp_path / "m.dist", backends=("torch",)))
    assert read.evaluation is not None
    for manifest in (read.manifest, read.evaluation.manifest):
        assert manifest.provenance.model == NAME
        assert [(file.name, file.checksum) for file in manifest.provenance.checkpoints] == [expected]
    # One of the weights is no longer the file's; then none is.
    step.load_parameters({"up.bias": torch.zeros(7)}, strict=False)
    assert checkpoints(step.save(tmp_path / "m.dist", backends=("torch",))) == [expected]
    step.load_parameters(weights)
    assert checkpoints(step.save(tmp_path / "m.dist", backends=("torch",))) == []


def test_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    tensors = seeded().state_dict()
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({n: t for n, t in tensors.items() if n.startswith("up")}, folder / "a.safetensors")
    save_file({n: t for n, t in tensors.items() if n.startswith("down")}, folder / "b.safetensors")
    with torch.device("meta"):
        model = Layers().eval()
    plan = dr.compile(model, (torch.ones(2, 5),), checkpoint=folder, **SHARDED)
    path = plan.save(tmp_path / "m.dist", backends=("torch",))
    assert checkpoints(path) == [digest(folder / "a.safetensors"), digest(folder / "b.safetensors")]
    plan = dr.compile(model, (torch.ones(2, 5),), checkpoint=folder, **SHARDED)
    save_file({n: t + 1 for n, t in tensors.items() if n.startswith("down")}, folder / "b.safetensors")
    with pytest.raises(BundleError, match=r"b\.safetensors: the file has changed since the model was read"):
        plan.save(tmp_path / "m.dist", backends=("torch",))


def test_an_onnx_file_with_external_data(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((5, 7), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 7])], [weight],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    file, data = tmp_path / "net.onnx", tmp_path / "net.data"
    onnx.save(model, str(file), save_as_external_data=True, location="net.data", size_threshold=0)
    expected = [digest(file), digest(data)]
    plan = dr.compile(str(file), mesh=3, shardings={"w": "S[1]"})
    # All of it was read.
    file.unlink()
    data.unlink()
    path = plan.save(tmp_path / "m.dist", backends=("torch",))
    found = provenance(path)
    assert [(found.model, found.model_checksum), *checkpoints(path)] == expected
    assert found.versions["onnx"] == onnx.__version__


def test_a_language_model_refers_to_its_files_or_names_them(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=12, intermediate_size=14, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    expected = digest(tmp_path / "llama" / "model.safetensors")
    plan = dr.compile_generation(tmp_path / "llama").plan
    refers, copies = (plan.save(tmp_path / kind, ("torch",), weights=kind) for kind in ("refer", "copy"))
    for path, own in ((refers, []), (copies, [expected])):
        manifest = read_bundle(path).manifest
        assert checkpoints(path) == own
        assert manifest.provenance.model == "transformers.models.llama.modeling_llama.LlamaForCausalLM"
        assert manifest.provenance.versions["transformers"] == transformers.__version__
        (shown,) = provenance_json(manifest)["checkpoints"]
        assert (Path(shown["name"]).name, shown["checksum"]) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("versions") and p.update(versions=["torch"]), "(provenance.versions): expected a table"),
        (lambda p: p["versions"].update(torch=2), "(provenance.versions.torch): expected text for 'torch'"),
        (lambda p: p["versions"].update(torch="2\n"), "(provenance): expected a text of printable characters"),
        (lambda p: p["versions"].update({str(n): "1" for n in range(70)}), "(provenance): expected at most 64 entries"),
        (lambda p: p.update(model=""), "(provenance): expected a text of printable characters"),
        (lambda p: p.update(model="x" * 2001), "(provenance): expected a text of printable characters"),
        (lambda p: p.update(model=["x"]), "(provenance.model): expected text"),
        (lambda p: p.update(model_checksum="ABC"), "(provenance): expected a SHA-256 in hex, found 'ABC'"),
        (lambda p: p.update(checkpoints=[{"name": "x"}]), "(provenance.checkpoints[0]): the field 'checksum' is"),
        (lambda p: p.update(checkpoints=[{"name": "x", "checksum": "G" * 64}]), "(provenance): expected a SHA-256"),
        (lambda p: p.pop("checkpoints"), "(provenance): the field 'checkpoints' is missing"),
    ],
)  # fmt: skip
def test_each_field_is_checked(change: Callable[[dict[str, Any]], object], message: str) -> None:
    plain = json.loads(files_of("tensor")[f"{ROOT}/manifest.json"])
    assert Manifest.from_json(plain).to_json()["provenance"] == plain["provenance"]
    change(plain["provenance"])
    with pytest.raises(BundleError) as raised:
        Manifest.from_json(plain)
    assert message in f"({raised.value.where}): {raised.value.message}"
