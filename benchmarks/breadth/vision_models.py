"""One small model of each family of torchvision and of timm."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .trial import Example

_VIDEO = ("mc3", "r3d", "r2plus1d", "s3d", "swin3d", "mvit")


def torchvision_families() -> Iterator[tuple[str, Callable[[], Example]]]:
    """The first model of each file of `torchvision.models`; needs the library (`make coverage` installs it)."""
    import_torchvision()
    from torchvision.models import get_model_builder, list_models

    seen: set[str] = set()
    for name in sorted(list_models(), key=lambda n: (re.sub(r"\d+", "", n), len(n), n)):
        module = get_model_builder(name).__module__.removeprefix("torchvision.models.")
        family = f"{module}.{re.match('[a-z]+', name)[0]}" if module == "video.resnet" else module  # type: ignore[index]
        if family not in seen:
            seen.add(family)
            yield family, lambda name=name: _torchvision_example(name)  # type: ignore[misc]


def _torchvision_example(name: str) -> Example:
    from torchvision.models import get_model, list_models

    detects = name in list_models(module=_submodule("detection"))
    optional: dict[str, Any] = {"weights": None}
    if detects or name in list_models(module=_submodule("segmentation")):
        optional["weights_backbone"] = None
    if name.startswith(("googlenet", "inception")):
        optional["init_weights"] = False
    if name.startswith("quantized"):
        optional["quantize"] = False
    model = _randomised(get_model(name, **optional))
    if name.startswith("raft"):
        return Example(model, (torch.randn(1, 3, 128, 136), torch.randn(1, 3, 128, 136)), {"num_flow_updates": 2})
    if name.startswith(_VIDEO):
        size = (16, 224, 224) if name.startswith(("mvit", "s3d")) else (16, 64, 64)
        return Example(model, (torch.randn(1, 3, *size),))
    if detects:
        return Example(model, ([torch.rand(3, 96, 128)],))
    size = {"vit": 224, "maxvit": 224, "inception": 299, "quantized_inception": 299}.get(
        name.split("_v3")[0].split("_t")[0]
    )
    size = size or (224 if name.startswith("vit") else 96)
    return Example(model, (torch.randn(1, 3, size, size),))


def _submodule(name: str) -> Any:
    import importlib

    return importlib.import_module(f"torchvision.models.{name}")


def import_torchvision() -> None:
    """torchvision's wheel looks for operators of its CUDA build; declared first, the rest of it is plain Python."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEEP.append(library)
    import torchvision  # noqa: F401


_KEEP: list[Any] = []


def timm_families() -> Iterator[tuple[str, Callable[[], Example]]]:
    """The smallest model, by its name, of each file of `timm.models`; needs the library (`make coverage`)."""
    import_torchvision()
    from timm.models import _registry

    for family, names in _registry._module_to_models.items():
        yield family, lambda names=names: _timm_example(sorted(names))  # type: ignore[misc]


_SMALL = (
    "test_",
    "pico",
    "femto",
    "atto",
    "nano",
    "tiny",
    "_xxs",
    "_xs",
    "_xxt",
    "_s0",
    "_b0",
    "small",
    "_s",
    "18",
    "50",
    "88m",
    "167m",
)


def _timm_example(names: list[str]) -> Example:
    import timm

    ranked = sorted(names, key=lambda n: next((i for i, mark in enumerate(_SMALL) if mark in n), len(_SMALL)))
    model = timm.create_model(ranked[0], pretrained=False)
    given = model.pretrained_cfg["input_size"][-1]
    size = min(given, 160)
    if "img_size" in inspect.signature(type(model).__init__).parameters:
        # Windows and patches divide what the model was made for; plain transformers take other sizes too.
        plain = ranked[0].startswith(("vit", "eva", "deit")) or given > 256
        size = (96 if "patch16" in ranked[0] or given > 256 else 112) if plain else given
        model = timm.create_model(ranked[0], pretrained=False, img_size=size) if plain else model
    elif model.pretrained_cfg.get("fixed_input_size"):
        size = given
    return Example(_randomised(model), (torch.randn(1, 3, size, size),))


def _randomised(model: torch.nn.Module) -> torch.nn.Module:
    """The model in evaluation mode; what was initialised to one number (norms, scales) is no longer even."""
    model.eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.numel() > 1 and tensor.dim() == 1:
                tensor.add_(torch.rand_like(tensor) * 0.1)
    return model
