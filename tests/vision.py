"""Unmodified transformers models of pictures: one to be tensor-parallel, the convolutional ones split in space.

Each gives the model, an example call and shardings.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

Made = tuple[Any, dict[str, Any], dict[str, str]]


def vit() -> Made:
    """Five heads; a picture of nine patches."""
    config = transformers.ViTConfig(
        hidden_size=40, num_hidden_layers=2, num_attention_heads=5, intermediate_size=67, image_size=24, patch_size=8,
        num_labels=7,
    )  # fmt: skip
    shardings = {"*.attention.[qkv]_proj.weight": "S[0]", "*.mlp.fc1.weight": "S[0]"}
    model = transformers.ViTForImageClassification(config)
    for parameter in model.parameters():
        # Exporters make equal tensors one: fresh biases, all zero, would tie layers that have nothing in common.
        torch.nn.init.normal_(parameter, std=0.1)
    return model, {"pixel_values": _pictures(24, 24)}, shardings


def resnet50() -> Made:
    """ResNet-50's 53 convolutions, narrow."""
    config = transformers.ResNetConfig(
        depths=[3, 4, 6, 3], hidden_sizes=[8, 16, 24, 32], embedding_size=8, layer_type="bottleneck", num_labels=5
    )
    return _split_in_space(transformers.ResNetForImageClassification(config), _pictures(70, 46), "S[2]")


def mobilenet_v2() -> Made:
    """MobileNet-v2's 52 convolutions, narrow, each with TensorFlow's padding: more at the high end where it is odd."""
    config = transformers.MobileNetV2Config(depth_multiplier=0.25, num_labels=5)
    return _split_in_space(transformers.MobileNetV2ForImageClassification(config), _pictures(46, 70), "S[3]")


def convnext() -> Made:
    """Depthwise kernels of 7, layer norms over channels."""
    config = transformers.ConvNextConfig(hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 2, 1], num_labels=5)
    return _split_in_space(transformers.ConvNextForImageClassification(config), _pictures(64, 96), "S[2]")


def _pictures(height: int, width: int) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def _split_in_space(model: Any, picture: torch.Tensor, placement: str) -> Made:
    """The model with batch norms that have seen the picture: fresh ones let a deep model fade to zero or burst."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(pixel_values=picture)
    return model, {"pixel_values": picture}, {"pixel_values": placement}
