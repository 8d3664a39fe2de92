"""Calls of ATen ops over spatial dims, and of batch norm, for `aten_calls`."""

from __future__ import annotations

from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


CALLS: dict[str, list[Call]] = {
    "conv1d.default": [
        call("f32[2,4,9]", "f32[6,2,3]", "f32[6]", [2], [1], [2], 2),
        call("f32[4,9]", "f32[6,4,3]"),
    ],
    "conv2d.default": [
        call("f32[2,4,9,7]", "f32[6,2,3,2]", "f32[6]", [2, 1], [1, 0], [2, 1], 2),
        call("f32[2,4,9,7]", "f32[6,4,3,2]", None, [2], [1]),
    ],
    "conv3d.default": [call("f32[2,4,3,4,5]", "f32[6,4,2,1,3]", "f32[6]", [1, 1, 2], [1, 0, 1])],
    "conv1d.padding": [call("f32[2,4,9]", "f32[6,4,4]", "f32[6]", [1], "same")],
    "conv2d.padding": [
        call("f32[2,4,9,7]", "f32[6,4,3,2]", "f32[6]", [1, 1], "same", [2, 1]),
        call("f32[2,4,9,7]", "f32[6,4,3,2]", None, [2, 1], "valid"),
    ],
    "conv3d.padding": [call("f32[2,4,3,4,5]", "f32[6,4,2,1,3]", None, [1, 1, 1], "same")],
    "convolution.default": [
        call("f32[2,4,9,7]", "f32[6,4,3,2]", "f32[6]", [1, 1], [1, 0], [1, 1], False, [0, 0], 1),
        call("f32[2,4,5,7]", "f32[4,3,3,2]", None, [2, 1], [1, 0], [1, 1], True, [1, 0], 2),
    ],
    "conv_transpose1d.default": [call("f32[2,4,5]", "f32[4,3,3]", "f32[3]", [2], [1], [1])],
    "conv_transpose2d.input": [
        call("f32[2,4,5,3]", "f32[4,3,3,2]", "f32[6]", [2, 3], [1, 0], [1, 2], 2, [1, 1]),
        call("f32[4,5,3]", "f32[4,3,2,2]", None, [2, 2], [0, 0], [0, 0], 1, [2, 1]),
    ],
    "conv_transpose3d.input": [call("f32[2,4,2,3,2]", "f32[4,3,2,2,1]", None, [2, 1, 1])],
    "max_pool1d.default": [call("f32[2,4,9]", [3], [2], [1])],
    "max_pool2d.default": [
        call("f32[2,4,9,8]", [3, 2], [2, 2], [1, 0], [2, 1], True),
        call("f32[4,9,8]", [3]),
        call("f32[2,4,8,8]", [3, 3], [2, 2], [1, 1], [1, 1], True),
    ],
    "max_pool3d.default": [call("f32[2,4,4,5,6]", [2, 2, 3], [2, 1, 2])],
    "avg_pool1d.default": [call("f32[2,4,9]", [3], [2], [1], True, False)],
    "avg_pool2d.default": [
        call("f32[2,4,9,8]", [3, 3], [2, 2], [1, 1], True, True),
        call("f32[2,4,9,8]", [3, 2], [2, 1], [1, 0], True, False),
        call("f32[2,4,9,8]", [40, 40], [40, 40], [0, 0], True),
        call("f32[2,4,9,8]", [3, 2], [2, 1], [1, 0], False, True, 5),
        call("f32[4,9,8]", [2, 2]),
    ],
    "avg_pool3d.default": [call("f32[2,4,4,5,6]", [2, 2, 3], [2, 1, 2], [1, 0, 1], False, False)],
    "adaptive_avg_pool1d.default": [call("f32[2,4,9]", [3]), call("f32[4,9]", [5])],
    "adaptive_avg_pool2d.default": [
        call("f32[2,4,9,8]", [1, 1]),
        call("f32[2,4,9,8]", [3, 2]),
        call("f32[2,4,7,5]", [3, 7]),
        call("f32[2,4,7,5]", [1, 3]),
    ],
    "adaptive_avg_pool3d.default": [call("f32[2,4,4,3,6]", [2, 3, 1]), call("f32[2,4,4,3,6]", [3, 2, 6])],
    "adaptive_max_pool1d.default": [call("f32[2,4,9]", [3]), call("f32[4,9]", [5])],
    "adaptive_max_pool2d.default": [
        call("f32[2,4,9,8]", [3, 2]),
        call("f32[2,4,7,5]", [3, 7]),
        call("f32[2,4,7,5]", [1, 3]),
    ],
    "adaptive_max_pool3d.default": [call("f32[2,4,4,3,6]", [3, 2, 6])],
    "max_pool1d_with_indices.default": [call("f32[4,9]", [3], [2], [1])],
    "max_pool2d_with_indices.default": [
        call("f32[2,4,9,8]", [3, 2], [2, 1], [1, 0], [2, 1], True),
        call("f32[4,9,8]", [3]),
    ],
    "max_pool3d_with_indices.default": [call("f32[2,4,4,5,6]", [2, 2, 3], [2, 1, 2], [1, 0, 1])],
    "max_unpool2d.default": [
        call("f32[2,3,2,2]", torch.arange(0, 24, 2).reshape(1, 3, 2, 2).expand(2, 3, 2, 2) % 35, [5, 7])
    ],
    "max_unpool3d.default": [
        call(
            "f32[3,1,2,2]",
            torch.tensor([0, 9, 23, 11]).expand(3, 4).reshape(3, 1, 2, 2),
            [2, 3, 4],
            [2, 1, 2],
            [0, 0, 0],
        )
    ],
    "batch_norm.default": [
        call("f32[2,3,4,5]", "f32[3]", "f32[3]", "f32[3]", "f32[3] > 0", False, 0.1, 1e-5, False),
        call("f32[2,3,4]", None, None, "f32[3]", "f32[3] > 0", False, 0.1, 1e-3, False),
        call("f32[2,3,4,5]", "f32[3]", "f32[3]", None, None, True, 0.1, 1e-5, False),
    ],
    "_native_batch_norm_legit_functional.default": [
        call("f32[2,3,4,5]", "f32[3]", "f32[3]", "f32[3]", "f32[3] > 0", True, 0.3, 1e-5),
    ],
    "_native_batch_norm_legit.no_stats": [
        call("f32[2,3,4,5]", "f32[3]", "f32[3]", True, 0.3, 1e-5),
        call("f32[2,3,4]", None, None, True, 0.1, 1e-3),
    ],
    "upsample_nearest1d.vec": [call("f32[2,3,5]", None, [2.0]), call("f32[2,3,5]", None, [1.5])],
    "_upsample_nearest_exact1d.vec": [call("f32[2,3,5]", [7], None)],
    "_upsample_nearest_exact2d.vec": [call("f32[2,3,4,5]", [7, 3], None), call("f32[2,3,4,5]", None, [1.5, 2.0])],
    "_upsample_nearest_exact3d.vec": [call("f32[2,3,2,4,5]", [3, 4, 7], None)],
    "_upsample_bilinear2d_aa.vec": [
        call("f32[2,3,9,7]", [4, 3], False, None),
        call("f32[2,3,4,5]", [7, 9], False, None),
        call("f32[2,3,9,7]", [4, 10], True, None),
    ],
    "_upsample_bicubic2d_aa.vec": [
        call("f32[2,3,9,7]", [4, 3], False, None),
        call("f32[2,3,4,5]", [7, 9], False, None),
    ],
    "grid_sampler.default": [
        call("f32[2,3,5,4]", "f32[2,3,7,2] < 2", mode, padding, aligned)
        for mode, padding, aligned in ((0, 0, False), (1, 1, False), (0, 2, True))
    ],
    "grid_sampler_2d.default": [call("f32[2,3,5,4]", "f32[2,3,7,2] < 2", 2, 0, True)],
    "im2col.default": [
        call("f32[2,3,7,6]", [3, 2], [2, 1], [1, 0], [1, 2]),
        call("f32[3,7,6]", [2, 2], [1, 1], [0, 0], [2, 2]),
    ],
    "col2im.default": [
        call("f32[2,12,30]", [7, 11], [2, 2], [1, 1], [0, 0], [1, 2]),
        call("f32[2,18,45]", [9, 10], [3, 2], [2, 1], [2, 0], [1, 2]),
        call("f32[12,12]", [6, 8], [2, 2], [1, 1], [0, 0], [2, 2]),
    ],
    "upsample_nearest2d.vec": [
        call("f32[2,3,4,5]", [7, 3], None),
        call("f32[2,3,4,5]", [8, 15], None),
        call("f32[2,3,4,5]", None, [2.0, 2.0]),
    ],
    "upsample_nearest3d.vec": [call("f32[2,3,2,2,3]", None, [1.0, 2.0, 3.0])],
    "upsample_linear1d.vec": [call("f32[2,3,5]", [7], False, None), call("f32[2,3,5]", None, True, [2.0])],
    "upsample_bilinear2d.vec": [
        call("f32[2,3,4,5]", [7, 3], False, None),
        call("f32[2,3,4,5]", [7, 1], True, None),
        call("f32[2,3,4,5]", None, False, [2.0, 3.0]),
        call("f32[2,3,5,7]", None, False, [1.5, 0.6]),
    ],
    "upsample_bicubic2d.vec": [call("f32[2,3,4,5]", [7, 3], False, None), call("f32[2,3,4,5]", [7, 3], True, None)],
    "upsample_trilinear3d.vec": [call("f32[2,3,2,4,5]", [3, 4, 7], False, None)],
}
