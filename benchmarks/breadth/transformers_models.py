"""A small model of every family of transformers, and a call of it that runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from .shrink import VOCABULARY, small
from .trial import Example
from .vision_models import import_torchvision

# What stays of a default configuration, and how wide it becomes, tried in turn: rotations and image patches of some
# models need heads of a certain width.
_VARIANTS: tuple[tuple[tuple[str, ...], int], ...] = (
    ((), 48),
    ((r".*image_size|img_size|input_size",), 48),
    ((r".*head_dim|d_kv|v_head_dim|attention_head_size",), 48),
    ((), 256),
    ((), 512),
    ((r"(?!.*(layers|blocks|depths?|vocab_size)$).*",), 48),
)
_LENGTH = 13
_MOST = 120_000_000


def transformers_families() -> Iterator[tuple[str, Callable[[], Example]]]:
    """Every model class that `AutoModel` knows, once, under the first of its names."""
    import_torchvision()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    seen: set[str] = set()
    for family, names in MODEL_MAPPING_NAMES.items():
        name = names if isinstance(names, str) else names[0]
        if name not in seen:
            seen.add(name)
            yield family, lambda family=family, name=name: _example(family, name)  # type: ignore[misc]


def families_with_plans() -> Iterator[tuple[str, Callable[[], Example]]]:
    """Those of `transformers_families` that have a ``tp_plan``, to be sharded by it."""
    for family, build in transformers_families():

        def planned(build: Callable[[], Example] = build) -> Example:
            example = build()
            if not getattr(example.model, "tp_plan", None):
                raise ValueError("the model has no tp_plan")
            return replace(example, shardings="tp_plan")

        yield family, planned


def _example(family: str, name: str) -> Example:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = getattr(transformers, name)
    problems: list[str] = []
    for keep, width in _VARIANTS:
        try:
            config = small(CONFIG_MAPPING[family], keep, width)
            _check_size(kind, config)
            model = _randomised(kind(config).eval().float())
        except Exception as problem:
            problems.append(f"{type(problem).__name__}: {problem}")
            continue
        for kwargs in _calls(model, config):
            try:
                with torch.no_grad():
                    result = model(**kwargs)
            except Exception as problem:
                problems.append(f"{type(problem).__name__}: {problem}")
                continue
            if any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(result)):
                return Example(model, (), kwargs)
            problems.append("the model returns no tensor")
    raise ValueError(problems[0] if problems else "no call is known for its arguments")


def _check_size(kind: Any, config: Any) -> None:
    """Raise ValueError for a model of too many parameters to try; they are counted without making them."""
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > _MOST:
        raise ValueError(f"{count / 1e6:.0f} million parameters are not a small configuration")


def _calls(model: torch.nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Calls to try: what the forward function names, fewest kinds of input first."""
    parameters = inspect.signature(model.forward).parameters
    names = list(parameters)
    common: dict[str, Any] = {}
    # A model of text and images passes it to its language model.
    passes = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    has_cache = any(hasattr(c, "use_cache") for c in (config, getattr(config, "text_config", None)))
    if "use_cache" in names or (passes and has_cache):
        common["use_cache"] = False
    if "bbox" in names:
        corners = torch.randint(0, 500, (2, _LENGTH, 2))
        common["bbox"] = torch.cat([corners, corners + torch.randint(1, 400, (2, _LENGTH, 2))], -1)
    text = {"input_ids": torch.randint(10, VOCABULARY // 2, (2, _LENGTH))} if "input_ids" in names else {}
    if "decoder_input_ids" in names:
        common["decoder_input_ids"] = torch.randint(10, VOCABULARY // 2, (2, 7))
    if text:
        yield text | common
    for other in ("pixel_values", "input_values", "input_features", "audio_values"):
        if other in names:
            for value in _data(other, config):
                yield {other: value} | common
                if text:
                    yield text | {other: value} | common
    if "inputs_embeds" in names and not text:
        yield {"inputs_embeds": torch.randn(2, _LENGTH, config.hidden_size)} | common


def _data(kind: str, config: Any) -> Iterator[torch.Tensor]:
    inner = [
        config,
        *(getattr(config, n, None) for n in ("vision_config", "backbone_config", "audio_config", "encoder")),
    ]
    inner = [c for c in inner if c is not None]

    def read(name: str, default: Any) -> Any:
        return next((getattr(c, name) for c in inner if getattr(c, name, None) is not None), default)

    if kind == "pixel_values":
        size = read("image_size", 64)
        channels = read("num_channels", read("in_channels", 3))
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        yield torch.randn(2, channels, height, width)
        for frames in (read("num_frames", 4), read("tubelet_size", 2)):
            if isinstance(frames, int):
                yield torch.randn(2, frames, channels, height, width)
        yield torch.randn(1, channels, 224, 224)
    elif kind == "input_features":
        bins = read("num_mel_bins", read("feature_size", 80))
        for length in (2 * read("max_source_positions", 50), 96):
            yield torch.randn(2, bins, length)
            yield torch.randn(2, length, bins)
    else:
        yield torch.randn(2, 4000)
        yield torch.randn(2, 1, 4000)
        yield torch.randn(2, read("max_length", 128), read("num_mel_bins", 64))


def _randomised(model: torch.nn.Module) -> torch.nn.Module:
    """What was initialised to one number (norms, biases, scales) is no longer even."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dim() <= 1:
                parameter.add_(torch.rand_like(parameter) * 0.1)
    return model
