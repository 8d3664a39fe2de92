"""Models of text, images and ONNX files, compiled once with symbolic dims: they give what torch gives at each size.

``python -m tests.symbolic_acceptance [WORD ...]`` takes all models, or those whose name has one of the words, in all
layouts at all sizes, and prints a table. It exits 1 if a result differs, and if a model or a layout is refused, or
taken, against `Subject.refused`. `tests/test_symbolic_acceptance.py` takes one layout of each model.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch.utils._pytree import tree_leaves

import distir_relax as dr
from distir_relax.compiler.compile import compile_source, read_model
from distir_relax.compiler.options import complete
from distir_relax.compiler.source import Source
from distir_relax.errors import DistIRError
from distir_relax.frontends.imported_model import Imported
from tests import test_models_breadth as breadth
from tests import vision, zoo
from tests.frontends import test_onnx_models as exported
from tests.frontends import test_torch_models as imported

transformers.logging.set_verbosity_error()

Made = tuple[Any, dict[str, Any], dict[str, str]]
Dims = dict[str, dict[int, str]]
Sizes = Mapping[str, int]

LARGEST = {"batch": 11, "sequence": 64, "target": 64, "height": 128, "width": 128}
LEAST = {"height": 64, "width": 64}
TEXT: tuple[Sizes, ...] = tuple(
    {"batch": batch, "sequence": sequence, "target": target}
    for batch, sequence, target in ((1, 1, 1), (2, 13, 7), (7, 1, 2), (11, 64, 64), (1, 37, 11), (3, 2, 64))
)
IMAGES: tuple[Sizes, ...] = tuple(
    {"batch": batch, "height": height, "width": width}
    for batch, height, width in ((1, 67, 71), (2, 64, 101), (7, 65, 79), (11, 128, 128), (3, 96, 64), (5, 73, 127))
)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with its example call and shardings, the names of its inputs' dims, and the sizes that it runs at."""

    make: Callable[[], Made]
    dims: Dims
    sizes: tuple[Sizes, ...] = TEXT
    tolerance: float = 1e-5
    along: dict[str, str] = field(default_factory=dict)
    """A split of its inputs in another dim than the batch."""
    onnx: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    """Errors by layout, as patterns; that of the import by the name ``import``."""

    @property
    def layouts(self) -> dict[str, dict[str, Any]]:
        """Options of `compile` by name: strategies, the model's own shardings, and the split in another dim."""
        found: dict[str, dict[str, Any]] = {strategy: {"strategy": strategy} for strategy in STRATEGIES}
        mesh = dr.DeviceMesh((5,), ("tp",))
        _, _, shardings = made(self)
        found["shardings"] = {"shardings": shardings, "mesh": mesh, "tail": "pad"}
        if self.along:
            found["along"] = {"shardings": self.along, "mesh": dr.DeviceMesh((3,), ("sp",))}
        return found


STRATEGIES = ("2/1/1/1", "1/3/1/1", "5/1/1/1", "2/3/1/1", "1/1/2/3")


def of_case(make: Callable[[], zoo.Case]) -> Made:
    case = make()
    names = inspect.signature(case.model.forward).parameters
    return case.model, {**dict(zip(names, case.args, strict=False)), **case.kwargs}, case.shardings


def in_text(*names: str) -> Dims:
    return {name: {0: "batch", 1: "target" if "decoder" in name else "sequence"} for name in names}


def text(make: Callable[[], Made], *names: str, **more: Any) -> Subject:
    names = names or ("input_ids",)
    return Subject(make, in_text(*names), along=dict.fromkeys(names, "S[1]"), **more)


def images(make: Callable[[], Made], name: str = "pixel_values", **more: Any) -> Subject:
    return Subject(make, {name: {0: "batch"}}, **{"tolerance": 1e-4, **more})


def of_any_extent(make: Callable[[], Made], name: str = "pixel_values", **more: Any) -> Subject:
    """A model of images of any height and width."""

    def make_larger() -> Made:
        model, call, shardings = make()
        return model, {**call, name: torch.randn(2, 3, 80, 72)}, shardings

    dims = {name: {0: "batch", 2: "height", 3: "width"}}
    refused = {"shardings": r"^[^\n]*:\d+: nn\.(conv|max_pool)2d cannot be split for every size: .*along dim [23]"}
    return Subject(make_larger, dims, IMAGES, **{"tolerance": 1e-4, "refused": refused, **more})


def with_mask() -> Made:
    return *imported.gpt2_with_a_mask(), {"*.c_attn.weight": "S[1]"}


def lstm() -> Made:
    torch.manual_seed(0)
    return torch.nn.LSTM(5, 7, 2, batch_first=True), {"input": torch.randn(3, 4, 5)}, {"weight_ih_l0": "S[0]"}


def mamba() -> Made:
    """Its scan is a loop over the tokens."""
    config = transformers.MambaConfig(
        hidden_size=12, state_size=4, num_hidden_layers=1, vocab_size=97, time_step_rank=3
    )
    call = {"input_ids": breadth.tokens(), "use_cache": False}
    return transformers.MambaForCausalLM(config), call, {"*.in_proj.weight": "S[0]"}


def convolutional() -> Made:
    return exported.Convolutional(), {"x": torch.randn(2, 3, 20, 24)}, {"x": "S[2]"}


def of_images(make: Callable[[], Made], shardings: dict[str, str] | None = None) -> Made:
    model, call, in_space = make()
    return exported.OfPictures(model), call, shardings or in_space


VIT = {"*/[qkv]_proj/MatMul.B": "S[1]", "*/fc1/MatMul.B": "S[1]"}
CALL = ("input_ids", "attention_mask", "position_ids")

SUBJECTS: dict[str, Subject] = {
    "mlp": Subject(partial(of_case, zoo.mlp), {"input": {0: "batch"}}),
    "gpt2": text(partial(of_case, zoo.gpt2)),
    "gpt2 with a mask": text(with_mask, "input_ids", "attention_mask"),
    "minilm": text(partial(of_case, zoo.minilm), "input_ids", "attention_mask"),
    "llama": text(breadth.llama),
    "qwen2": text(breadth.qwen2),
    "bert": text(breadth.bert),
    "t5": text(breadth.t5, "input_ids", "decoder_input_ids"),
    "mixtral": text(breadth.mixtral_by_experts),
    "mixtral, batched": text(breadth.mixtral_batched_by_width),
    "lstm": Subject(lstm, {"input": {0: "batch"}}),
    "mamba": text(mamba, refused={"import": r"modeling_mamba\.py:\d+.*: the model works for sequence = 9 only"}),
    "vit": images(vision.vit),
    "resnet50": images(vision.resnet50),
    "resnet50 of any extent": of_any_extent(vision.resnet50),
    "mobilenet_v2": images(vision.mobilenet_v2),
    "mobilenet_v2 of any extent": of_any_extent(
        vision.mobilenet_v2, refused={"import": r"modeling_mobilenet_v2\.py:\d+.*the model works for height = 80 only"}
    ),
    "convnext": images(vision.convnext),
    "convnext of any extent": of_any_extent(vision.convnext),
    "resnet": images(partial(of_case, zoo.resnet), "picture"),
    "resnet of any extent": of_any_extent(partial(of_case, zoo.resnet), "picture"),
    "mobilenet": images(partial(of_case, zoo.mobilenet), "picture"),
    "mobilenet of any extent": of_any_extent(partial(of_case, zoo.mobilenet), "picture"),
    "unet": images(partial(of_case, zoo.unet), "picture"),
    "unet of any extent": of_any_extent(
        partial(of_case, zoo.unet),
        "picture",
        refused={"import": r"zoo\.py:\d+.*: the model does not work for every height: .*\n.*height = 4\*_height"},
    ),
    "uneven unet": images(partial(of_case, zoo.uneven_unet), "picture"),
    "uneven unet of any extent": of_any_extent(partial(of_case, zoo.uneven_unet), "picture"),
    "onnx mlp": Subject(exported.mlp, {"input": {0: "batch"}}, onnx=True),
    "onnx gpt2": text(exported.gpt2, *CALL[:2], onnx=True),
    "onnx bert": text(exported.bert, *CALL[:2], onnx=True),
    "onnx llama": text(exported.llama, *CALL, onnx=True),
    "onnx t5": text(exported.t5, "input_ids", "decoder_input_ids", onnx=True),
    "onnx mixtral": text(exported.mixtral, *CALL, onnx=True),
    "onnx convolutional": images(convolutional, "x", onnx=True),
    "onnx resnet50": images(partial(of_images, vision.resnet50), onnx=True),
    "onnx mobilenet_v2": images(partial(of_images, vision.mobilenet_v2), onnx=True),
    "onnx vit": images(partial(of_images, vision.vit, VIT), onnx=True),
}


@cache
def made(subject: Subject) -> Made:
    """The model, with random weights; each dim of its example has at least two elements."""
    torch.manual_seed(0)
    model, call, shardings = subject.make()
    if subject.onnx and not isinstance(model, torch.nn.Sequential):
        # The exporter makes equal tensors one: fresh biases, all zero, would tie layers that have nothing in common.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model = exported.Positional(model, list(call)) if "input_ids" in call else model
    return model.eval(), {name: _of_two(x) for name, x in call.items()}, shardings


@cache
def source(subject: Subject) -> Imported:
    """The imported model. Raises `DistIRError` if it fixes a dim."""
    model, call, _ = made(subject)
    names = {name for dims in subject.dims.values() for name in dims.values()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if not subject.onnx:
            dims = {
                key: {dim: dr.Dim(name, min=LEAST.get(name, 1), max=LARGEST[name]) for dim, name in of.items()}
                for key, of in subject.dims.items()
            }
            return read_model(model, (), call, dynamic_shapes=dims)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            torch.onnx.export(
                model, tuple(call.values()), str(path), input_names=list(call), opset_version=18, dynamo=False,
                dynamic_axes=subject.dims,
            )  # fmt: skip
            return read_model(path, dims={name: (LEAST.get(name, 1), LARGEST[name]) for name in names})


def compiled(subject: Subject, layout: str) -> dr.Plan:
    """Compile a model in one of its layouts. Raises `DistIRError` if it is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_source(Source(source(subject), complete(subject.layouts.get(layout, {}), "model")))


def check_layout(subject: Subject, layout: str, saved: Path | None = None) -> str:
    """Compile a model in a layout, and run it at all of its sizes; return its error if that is the expected one.

    With `saved` it runs from a bundle in that folder. Raises AssertionError for other results than torch's.
    """
    try:
        plan = compiled(subject, layout)
    except DistIRError as error:
        wanted = subject.refused.get(layout) or subject.refused.get("import")
        if wanted is None or not re.search(wanted, str(error)):
            raise
        return str(error)
    assert not subject.refused.keys() & {layout, "import"}, "it is refused no more"
    assert not plan.modules["global"].guards, "all sizes within the bounds are taken"
    run: Callable[..., Any] = plan
    if saved is not None:
        plan.save(saved, backends=("torch",))
        run = dr.load(saved)
    for sizes in subject.sizes:
        _check_size(subject, run, sizes)
    return ""


def _check_size(subject: Subject, run: Callable[..., Any], sizes: Sizes) -> None:
    model, example, _ = made(subject)
    call = {name: _input(name, x, subject.dims.get(name, {}), sizes) for name, x in example.items()}
    with torch.no_grad():
        expected = model(*call.values()) if subject.onnx else model(**call)
    found = run(**{name: x for name, x in call.items() if not subject.onnx or isinstance(x, torch.Tensor)})
    expected, found = _tensors(expected), _tensors(found)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=subject.tolerance, rtol=subject.tolerance, msg=lambda m: f"{sizes}: {m}")


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


def _of_two(x: Any) -> Any:
    return torch.cat([x, x]) if isinstance(x, torch.Tensor) and x.shape[0] == 1 else x


def _input(name: str, example: Any, dims: Mapping[int, str], sizes: Sizes) -> Any:
    """An input of these sizes, of the kind of the example's."""
    if not isinstance(example, torch.Tensor):
        return example
    shape = [sizes[dims[dim]] if dim in dims else size for dim, size in enumerate(example.shape)]
    generator = torch.Generator().manual_seed(sum(shape))
    if example.is_floating_point():
        return torch.randn(shape, generator=generator)
    if "position" in name:
        return torch.arange(shape[1]).expand(shape)
    if "mask" not in name:
        return torch.randint(0, 97, shape, generator=generator)
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, max(1, shape[1] - 2) :] = 0
    return mask


def main(words: list[str]) -> int:
    """Check all models, or those with one of the words, and print how each layout of them ends."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for name, subject in SUBJECTS.items():
        if words and not any(word in name for word in words):
            continue
        start = time.perf_counter()
        layouts = ["import"] if "import" in subject.refused else list(subject.layouts)
        for layout in layouts:
            try:
                refused = check_layout(subject, layout)
                verdict, reason = ("refused", refused) if refused else ("right", f"at {len(subject.sizes)} sizes")
            except Exception as error:
                verdict, reason = "failed", "".join(traceback.format_exception(error, limit=-3))
            counts[verdict] += 1
            print(f"{name}, {layout}: {verdict} {reason} ({time.perf_counter() - start:.1f} s)", flush=True)
            start = time.perf_counter()
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
