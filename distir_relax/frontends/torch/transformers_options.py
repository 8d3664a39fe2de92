"""Options of transformers' `Trainer` that change the computation of a model: label smoothing, and noisy embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError

if TYPE_CHECKING:
    import torch


def smoothed_loss(model: torch.nn.Module, output: Any, labels: Any, factor: float) -> torch.Tensor:
    """Return the loss of a transformers model by transformers' `LabelSmoother`, which shifts labels of causal models.

    Raises `ImportModelError` for an output without logits.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import LabelSmoother

    logits = getattr(output, "logits", None)
    if logits is None or labels is None:
        raise ImportModelError(
            f"expected a model that returns logits, called with labels, found {type(output).__name__}",
            type(model).__name__, "label_smoothing is for transformers models: a loss of your own takes it itself",
        )  # fmt: skip
    # Models of peft have the original one inside.
    adapted: Any = model
    inner = adapted.base_model.model if hasattr(model, "peft_config") else model
    is_causal = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    loss: torch.Tensor = LabelSmoother(factor)({"logits": logits}, labels, shift_labels=is_causal)
    return loss


@contextmanager
def noisy_embeddings(model: torch.nn.Module, alpha: float) -> Iterator[None]:
    """Inside the context, uniform noise of at most ``alpha / sqrt(length * width)`` is added to a model's embeddings.

    Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, 2023. Raises `ImportModelError` for a model
    without `get_input_embeddings`.
    """
    import torch

    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if embeddings is None:
        raise ImportModelError(
            "expected a transformers model, whose get_input_embeddings returns its embeddings", type(model).__name__,
            "add the noise in forward: x + torch.empty_like(x).uniform_(-a, a)",
        )  # fmt: skip

    def add_noise(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        most = alpha / math.sqrt(output.shape[1] * output.shape[2])
        return output + torch.empty_like(output).uniform_(-most, most)

    hook = embeddings.register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()


def drawn_numbers_hint(model: torch.nn.Module) -> str:
    """Return how a model of transformers is made without draws from the generators of Python and NumPy."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    masks = ("mask_time_prob", "mask_feature_prob")
    if options := [f"{name}=0.0" for name in masks if any(getattr(config, name, 0.0) for config in configs)]:
        return f"features are masked at random: make the model with from_pretrained(..., {', '.join(options)})"
    return "the draw is in transformers: look for an option of the model's config that turns it off"


def control_flow_hint(model: torch.nn.Module) -> str:
    """Return how a model of transformers is made without control flow that depends on tensors; empty for another one.

    Layers that are dropped by drawn numbers, and losses that look at their labels, have such.
    """
    config, kind = getattr(model, "config", None), type(model).__name__
    dropped = [name for name in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop") if getattr(config, name, 0.0)]
    if dropped and model.training:
        options = ", ".join(f"{name}=0.0" for name in dropped)
        return f"layers are dropped by numbers that are drawn: make the model with from_pretrained(..., {options})"
    if kind.endswith("ForSequenceClassification") and getattr(config, "problem_type", "") is None:
        return 'its loss looks at the labels: model.config.problem_type = "single_label_classification"'
    if kind.endswith("ForCTC"):
        return "its loss looks at the labels: pass none, and loss=, a function of output.logits with F.ctc_loss"
    return ""


def image_hint(model: torch.nn.Module, inputs: Iterable[str]) -> str:
    """Return what to do about a call with images of a model that takes text, too; empty for another call."""
    config, names = getattr(model, "config", None), [*inputs]
    images = [name for name in names if name.startswith(("pixel_values", "image"))]
    if not images or not ("input_ids" in names or hasattr(config, "vision_config")):
        return ""
    return (
        f"models of text and images are imported for token ids alone: leave out {images[0]}, or compile the vision "
        "model and the language model by themselves"
    )
