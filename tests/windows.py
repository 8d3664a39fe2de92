"""Random convolutions, poolings, resizings, repetitions and appended elements, split along their dims."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from distir_relax.compiler.pass_manager import Verify
from distir_relax.ir import Input, Module, TensorType, Value
from distir_relax.kernels.sampling import CROP, Resizing
from distir_relax.layout import DeviceMesh
from distir_relax.ops import Builder
from distir_relax.ops.spatial.onnx_resize import PLACES
from distir_relax.ops.spatial.resample import sampling_attrs
from tests.compiled import check_results, compiled
from tests.drawn_placements import draw_placements

MESHES = (*(DeviceMesh((n,), ("x",)) for n in (2, 3, 4, 5, 6, 7)), DeviceMesh((2, 3), ("x", "y")), DeviceMesh((3, 2)))
STRIDED = ("conv", "conv", "conv", "transposed", "max", "average", "upsample", "pad")
SAMPLED = (
    "resize", "resize", "adaptive_avg", "adaptive_max", "adaptive_places", "places", "resample", "resample", "repeat",
)  # fmt: skip
ROUNDINGS = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
FAMILIES = STRIDED + SAMPLED


@dataclass
class Case:
    """A global module of one windowed op on random data, with random annotations."""

    module: Module
    tensors: dict[str, torch.Tensor]
    text: str


def case(number: int) -> Case:
    """The case of that number: always the same."""
    while (found := _attempt(number)) is None:
        number += 1 << 20
    return found


def check_case(number: int, tail: str) -> None:
    """Fail unless the sharded program computes what the op does, to 1e-9 in float64."""
    found = case(number)
    check_results(compiled(found.module, tail, observers=[Verify()]), found.tensors, f"case {number} {found.text}:")


def _attempt(number: int) -> Case | None:
    draw = random.Random(number)
    mesh = draw.choice(MESHES)
    family = draw.choice(FAMILIES) if number % 25 else "append"
    count = draw.choice((1, 2, 2, 2, 2, 3))
    kernel = tuple(draw.randint(1, 5) for _ in range(count))
    strides = tuple(draw.randint(1, 3) for _ in range(count))
    dilation = tuple(draw.randint(1, 2) for _ in range(count))
    low = tuple(draw.randint(0, 2) for _ in range(count))
    high = low if draw.random() < 0.5 else tuple(draw.randint(0, 2) for _ in range(count))
    groups = draw.choice((1, 1, 2, 3))
    spatial = tuple(draw.randint(1, 13 if count < 3 else 7) for _ in range(count))
    batch, inner, outer = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 3)
    attrs: dict[str, Any] = {"strides": strides, "padding": (*low, *high)}
    data = TensorType((batch, groups * inner, *spatial), "float64")
    builder = Builder()
    x = builder.input("x", data)
    if family in ("conv", "transposed"):
        name = f"nn.conv{count}d" + ("_transpose" if family == "transposed" else "")
        shape = (groups * outer, inner) if family == "conv" else (groups * inner, outer)
        operands = [x, builder.input("w", TensorType((*shape, *kernel), "float64"), "parameter")]
        attrs.update(dilation=dilation, groups=groups)
    elif family == "upsample":
        name, operands, attrs["padding"] = "nn.upsample_nearest", [x], (0,) * 2 * count
    elif family in SAMPLED:
        operands, (name, attrs) = [x], sampled(draw, family, kernel, strides, dilation, low, spatial)
    elif family in ("pad", "append"):
        name, operands, attrs = family, *_extended(draw, family, builder, x, low, high)
    else:
        name, operands = f"nn.{'max' if family == 'max' else 'avg'}_pool{count}d", [x]
        # A window of padding alone has no maximum and no average.
        low, high = tuple(min(n, k // 2) for n, k in zip(low, kernel, strict=True)), ()
        high = tuple(draw.randint(0, n) for n in low)
        attrs.update(padding=(*low, *high), pool_size=kernel)
        if family == "max":
            attrs["dilation"] = dilation
        else:
            attrs["counted"] = draw.choice(((*low, *high), (0,) * 2 * count, (*low, *(0 for _ in high))))
    annotated, sized = {v.name: v for v in operands}, False
    for value in draw.sample(list(annotated.values()), draw.randint(1, len(operands))):
        builder.location = f"windows.py:{value.name}"
        placements = _placements(draw, value.tensor.shape, mesh, value.name == "x")
        sized = sized or ":" in placements
        annotated[value.name] = builder.emit("annotate_sharding", value, placements=placements)
    try:
        y = builder.emit(name, *annotated.values(), **attrs)
    except Exception:
        return None
    if y.tensor.elements == 0:
        return None
    if draw.random() < 0.4:
        # Where the window is none, the dims are one and have one cut.
        placements = _placements(draw, y.tensor.shape, mesh, True, not sized)
        y = builder.emit("annotate_sharding", y, placements=placements)
    tensors = _data(builder.inputs, number, "places" in name)
    function = builder.function("main", [("y", y)])
    text = f"{name} {attrs} of {[v.tensor.shape for v in operands]} on {mesh.shape}"
    return Case(Module("global", (function,), (mesh,)), tensors, text)


def _extended(
    draw: random.Random, family: str, builder: Builder, x: Value, low: tuple[int, ...], high: tuple[int, ...]
) -> tuple[list[Value], dict[str, Any]]:
    """Operands and attributes of an op that adds padding, or elements, to spatial dims of `x`."""
    if family == "pad":
        return [x], {"low": (0, 0, *low), "high": (0, 0, *high), "value": 0.5}
    axis = draw.randrange(2, len(x.tensor.shape))
    shape = (*x.tensor.shape[:axis], draw.randint(1, 5), *x.tensor.shape[axis + 1 :])
    return [x, builder.input("w", TensorType(shape, "float64"))], {"axis": axis}


def _data(inputs: Iterable[Input], seed: int, rounded: bool) -> dict[str, torch.Tensor]:
    """Random data; rounded, there are windows with several largest elements."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        i.value.name: torch.randn(i.value.tensor.shape, generator=generator, dtype=torch.float64) for i in inputs
    }
    return {name: data.round() for name, data in tensors.items()} if rounded else tensors


def sampled(
    draw: random.Random,
    family: str,
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilation: tuple[int, ...],
    low: tuple[int, ...],
    spatial: tuple[int, ...],
) -> tuple[str, dict[str, Any]]:
    """An op whose windows follow a formula, over data of the spatial sizes: its name and attributes."""
    count = len(spatial)
    size = tuple(draw.choice((n, draw.randint(1, 17 if count < 3 else 7))) for n in spatial)
    plane = tuple(math.prod(spatial[i + 1 :]) for i in range(count))
    if family == "resize":
        modes = [("nearest_neighbor", "asymmetric"), ("linear", "half_pixel"), ("linear", "align_corners")]
        modes += [("cubic", "half_pixel"), ("cubic", "align_corners")] if count == 2 else []
        method, place = draw.choice(modes)
        name = f"image.resize{count}d"
        return name, {"size": size, "method": method, "coordinate_transformation_mode": place}
    if family == "resample":
        axis, scale = draw.randrange(count), draw.choice((0.4, 0.75, 1.3, 2.0, 2.7))
        method = draw.choice(("nearest_neighbor", "linear", "cubic"))
        place = draw.choice(sorted(PLACES))
        sampling = Resizing(
            method, place, scale, draw.choice(ROUNDINGS), (0.1, 0.7) if draw.random() < 0.5 else (0.9, -0.2),
            -0.5, draw.random() < 0.5, draw.random() < 0.5 and place != CROP,
        )  # fmt: skip
        wanted = math.floor(spatial[axis] * scale)
        return "resample", {"axis": axis + 2, "size": wanted, **sampling_attrs(sampling)}
    if family == "repeat":
        axis = draw.randrange(count)
        return "repeat_elements", {"axis": axis + 2, "repeats": tuple(draw.randint(1, 4) for _ in range(spatial[axis]))}
    if family == "places":
        low = tuple(min(n, k // 2) for n, k in zip(low, kernel, strict=True))
        windows = {"pool_size": kernel, "strides": strides, "dilation": dilation, "padding": (*low, *low)}
        numbers = zip(spatial, low, kernel, dilation, strides, strict=True)
        size = tuple((n + 2 * p - (k - 1) * d - 1) // s + 1 for n, p, k, d, s in numbers)
        return f"nn.max_pool{count}d_places", {**windows, "output_size": size, "plane": plane}
    if family == "adaptive_places":
        return f"nn.adaptive_max_pool{count}d_places", {"output_size": size, "plane": plane}
    return f"nn.{family}_pool{count}d", {"output_size": size}


def _placements(
    draw: random.Random, shape: tuple[int, ...], mesh: DeviceMesh, spatial: bool, sized: bool = True
) -> str:
    """A random placement, mostly along spatial dims, sometimes with sizes of its own."""
    dims = [d for d in range(len(shape)) if shape[d] > 1 and (spatial or d < 2)]
    draw.shuffle(dims)
    if spatial and draw.random() < 0.8:
        dims.sort(key=lambda d: d < 2)

    def how(dim: int) -> str:
        return "" if dim < 2 or not sized or draw.random() < 0.6 else "sizes"

    return draw_placements(draw, shape, dims, mesh, how, whole=0.1)
