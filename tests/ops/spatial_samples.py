"""Sample instances of the spatial ops (see `samples`): operand types and attributes."""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.sampling import Resizing
from distir_relax.ops.spatial.resample import sampling_attrs

Row = tuple[tuple[str, ...], dict[str, Any]]


def of(*operands: str, **attrs: Any) -> Row:
    return operands, attrs


SAMPLES: dict[str, list[Row]] = {
    "nn.conv1d": [
        of("f64[2,4,9]", "f64[6,4,3]", strides=(2,), padding=(1, 0), dilation=(2,), groups=1),
        of("f64[2,4,9]", "f64[6,4,1]", strides=(1,), padding=(0, 0), dilation=(1,), groups=1),
        of("f64[1,2,127]", "f64[3,2,5]", strides=(3,), padding=(2, 1), dilation=(1,), groups=1),
    ],
    "nn.conv2d": [
        of("f64[2,4,7,6]", "f64[6,4,3,2]", strides=(1, 2), padding=(1, 0, 1, 0), dilation=(1, 2), groups=1),
        of("f64[2,4,7,6]", "f64[6,2,3,3]", strides=(1, 1), padding=(1, 2, 0, 1), dilation=(1, 1), groups=2),
        of("f64[2,4,7,6]", "f64[8,1,1,1]", strides=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=4),
    ],
    "nn.conv3d": [
        of("f64[2,4,3,4,5]", "f64[3,4,2,1,3]", strides=(1,) * 3, padding=(0, 0, 1) * 2, dilation=(1,) * 3, groups=1)
    ],
    "nn.conv1d_transpose": [of("f64[2,4,5]", "f64[4,3,3]", strides=(2,), padding=(1, 0), dilation=(1,), groups=1)],
    "nn.conv2d_transpose": [
        of("f64[2,4,3,5]", "f64[4,3,3,2]", strides=(2, 1), padding=(1, 0, 1, 0), dilation=(1, 2), groups=1),
        of("f64[2,6,3,5]", "f64[6,2,2,2]", strides=(3, 1), padding=(0, 1, -1, 0), dilation=(1, 1), groups=3),
    ],
    "nn.conv3d_transpose": [
        of("f64[2,4,2,3,2]", "f64[4,3,2,2,1]", strides=(2,) * 3, padding=(0,) * 6, dilation=(1,) * 3, groups=1)
    ],
    "nn.conv1d_weight_grad": [
        of("f64[4,4,9]", "f64[4,6,3]", kernel=(3,), strides=(2,), padding=(1, 0), dilation=(2,), channels=4),
    ],
    "nn.conv2d_weight_grad": [
        of(
            *("f64[3,4,7,6]", "f64[3,6,4,6]"),
            **{"kernel": (3, 2), "strides": (2, 1), "padding": (1, 0, 2, 1), "dilation": (1, 1), "channels": 2},
        ),
    ],
    "nn.conv3d_weight_grad": [
        of(
            *("f64[2,4,3,4,5]", "f64[2,3,2,4,5]"),
            **{"kernel": (2, 1, 3), "strides": (1,) * 3, "padding": (0, 0, 1) * 2, "dilation": (1,) * 3, "channels": 4},
        ),
    ],
    "nn.max_pool1d": [of("f64[2,4,9]", pool_size=(3,), strides=(2,), padding=(1, 2), dilation=(1,))],
    "nn.max_pool2d": [of("f64[2,4,9,6]", pool_size=(3, 1), strides=(2, 1), padding=(1, 0, 1, 0), dilation=(2, 1))],
    "nn.max_pool3d": [of("f64[2,4,4,3,5]", pool_size=(2,) * 3, strides=(2,) * 3, padding=(0,) * 6, dilation=(1,) * 3)],
    "nn.avg_pool1d": [of("f64[2,4,9]", pool_size=(3,), strides=(2,), padding=(1, 1), counted=(1, 0))],
    "nn.avg_pool2d": [
        of("f64[2,4,9,6]", pool_size=(3, 1), strides=(2, 1), padding=(1, 0, 1, 0), counted=(0, 0, 0, 0)),
        of("f64[2,4,9,6]", pool_size=(3, 2), strides=(2, 1), padding=(1, 0, 1, 1), counted=(1, 0, 1, 1)),
    ],
    "nn.avg_pool3d": [
        of("f64[2,3,5,3,4]", pool_size=(2,) * 3, strides=(1, 2, 3), padding=(0,) * 6, counted=(0,) * 6),
        of("f64[2,4,4,3,5]", pool_size=(2,) * 3, strides=(2,) * 3, padding=(0,) * 6, counted=(0,) * 6),
    ],
    "nn.adaptive_avg_pool1d": [of("f64[2,4,9]", output_size=(4,))],
    "nn.adaptive_avg_pool2d": [of("f64[2,4,9,6]", output_size=(4, 6))],
    "nn.adaptive_avg_pool3d": [of("f64[2,4,3,5,2]", output_size=(2, 3, 2))],
    "nn.adaptive_max_pool1d": [of("f64[2,4,9]", output_size=(4,))],
    "nn.adaptive_max_pool2d": [of("f64[2,4,9,6]", output_size=(4, 6))],
    "nn.adaptive_max_pool3d": [of("f64[2,4,3,5,2]", output_size=(2, 3, 2))],
    "nn.adaptive_max_pool1d_places": [of("f64[2,4,9]", output_size=(4,), plane=(1,))],
    "nn.adaptive_max_pool2d_places": [of("f64[2,4,9,6]", output_size=(4, 6), plane=(6, 1))],
    "nn.adaptive_max_pool3d_places": [of("f64[2,4,3,5,2]", output_size=(2, 3, 2), plane=(10, 2, 1))],
    "nn.max_pool1d_places": [
        of("f64[2,4,9]", pool_size=(3,), strides=(2,), padding=(1, 1), dilation=(1,), output_size=(5,), plane=(1,))
    ],
    "nn.max_pool2d_places": [
        of(
            "f64[2,4,9,6]",
            pool_size=(3, 1),
            strides=(2, 1),
            padding=(1, 0, 1, 0),
            dilation=(1, 1),
            output_size=(5, 6),
            plane=(1, 9),
        ),
    ],
    "nn.max_pool3d_places": [
        of(
            "f64[2,4,4,3,5]",
            pool_size=(2,) * 3,
            strides=(2,) * 3,
            padding=(0,) * 6,
            dilation=(1,) * 3,
            output_size=(2, 1, 2),
            plane=(15, 5, 1),
        ),
    ],
    "nn.upsample_nearest": [
        of("f64[2,4,3,5]", strides=(2, 3), padding=(0, 0, 0, 0)),
        of("f64[2,4,3,5]", strides=(2, 1), padding=(1, 0, 0, 0)),
    ],
    "image.resize2d": [
        of("f64[2,4,3,5]", size=(5, 5), method="linear", coordinate_transformation_mode="half_pixel"),
        of("f64[2,4,3,5]", size=(3, 7), method="cubic", coordinate_transformation_mode="align_corners"),
    ],
    "image.grid_sample": [
        of("f64[2,3,4,5]", "f64[2,7,3,2] < 1", method="bilinear", padding_mode="zeros", align_corners=False),
        of("f64[2,3,4,5]", "f64[2,7,3,2] < 3", method="bilinear", padding_mode="border", align_corners=True),
        of("f64[2,3,4,1]", "f64[2,7,3,2] < 3", method="bilinear", padding_mode="reflection", align_corners=True),
        of("f64[2,3,4,5]", "f64[2,7,3,2] < 7", method="nearest", padding_mode="reflection", align_corners=False),
    ],
    "image.resize3d": [
        of("f64[2,4,2,3,5]", size=(3, 3, 4), method="nearest_neighbor", coordinate_transformation_mode="asymmetric"),
    ],
    "resample": [
        of("f64[2,9,5]", axis=1, size=5, **sampling_attrs(Resizing("linear", "half_pixel", 0.6, antialias=True))),
        of("f64[2,5,3]", axis=2, size=7, **sampling_attrs(Resizing("cubic", "asymmetric", 2.4))),
        of("i64[5,4]", axis=0, size=7, **sampling_attrs(Resizing("nearest_neighbor", "half_pixel", 1.5))),
    ],
}
