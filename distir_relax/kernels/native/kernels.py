"""The native kernels: each function declares that of the C++ file with its name, whose head describes its arguments.

Its parameters are constants of the file. Dtypes are ``float32`` and ``bfloat16``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.target import Capability

if TYPE_CHECKING:
    import torch

LANES = 16
"""Elements of a vector."""
STORED = ("float32", "bfloat16")
"""The dtypes of tensors that kernels take; all compute in float32."""


@cache
def stored_name(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype, None for one that kernels do not take."""
    name = str(dtype).removeprefix("torch.")
    return name if name in STORED else None


@native()
def rms_norm(dtype: str, weight_dtype: str, rounded: bool) -> None:
    """Rows normalized by their root mean square; with `rounded` they are rounded before they are weighted."""


@native()
def layer_norm(dtype: str, weight_dtype: str) -> None:
    """Rows normalized by mean and variance."""


@native()
def norm_grad(dtype: str, weight_dtype: str, is_centred: bool) -> None:
    """The gradient of rows of a layer norm if `is_centred`, or of an RMS norm."""


@native()
def norm_weight_grad(dtype: str, weight_dtype: str, is_centred: bool) -> None:
    """The gradients of the weight and the bias of a norm."""


@native()
def rotary(dtype: str) -> None:
    """The halves of vectors, rotated by the angles of their positions."""


@native()
def elementwise(function: str, operands: int, number: int, gated: bool, dtype: str) -> None:
    """A function of the elements of one or two operands, of which that of a `number` is no tensor, -1 for none."""


@native()
def adam_step() -> None:
    """A step of Adam, in place."""


@native()
def moving_square() -> None:
    """A moving average of squares, in place."""


# ------------------------------------------------------------------------------------------------------- products

PANEL = 64
"""Columns of a panel of a packed weight: those of oneDNN."""


@native(lambda dtype, biased, dots: (Capability.BFLOAT16_DOT,) if dots else (), PANEL=PANEL)
def panel_product(dtype: str, biased: bool, dots: bool) -> None:
    """A product with a packed weight; with `dots`, by the processor's instruction for bfloat16."""


QUANTIZED_PANEL = 32
"""Columns of a panel of a quantized weight."""
GROUP = 32
"""Rows of a quantized weight that share a scale, if it is in groups."""


@native(lambda dtype, bits, grouped, instruction: (Capability.INT8_DOT,) if instruction else (),
        PANEL=QUANTIZED_PANEL, GROUP=GROUP)  # fmt: skip
def quantized_product(dtype: str, bits: int, grouped: bool, instruction: bool) -> None:
    """A product with a weight of 8 or 4 bits; with `instruction`, by the processor's for 8-bit integers.

    If it is `grouped`, the scales are in the records; otherwise columns have scales, and `bits` is 8.
    """


def scratch_bytes(rows: int, inner: int, grouped: bool) -> int:
    """Return the bytes that `quantized_product` takes for the rounded input, its scales and its sums."""
    return rows * (inner + 8 * (inner // GROUP if grouped else 1))


def record_bytes(bits: int) -> int:
    """Return the bytes of a group of a panel, with its scales, and minimums of 4 bits."""
    return QUANTIZED_PANEL * (GROUP * bits // 8 + 2 * (2 if bits == 4 else 1))


_ROWS, _COLUMNS, _BLOCK, _PANELS, _TILES = 8, 2 * LANES, 256, 16, 32
"""A tile of the result, most rows of a block, and the panels and tiles that are copied at a time.

A panel of columns is 32 KB, and they stay in the second cache: 768 KB.
"""
WEIGHT_GRAD_SCRATCH = _BLOCK * (_PANELS * _COLUMNS + _TILES * _ROWS)
"""The float32 elements that each thread of `weight_grad` needs."""


@native(ROWS=_ROWS, COLUMNS=_COLUMNS, BLOCK=_BLOCK, PANELS=_PANELS, TILES=_TILES)
def weight_grad() -> None:
    """The sum of the outer products of rows of two float32 matrices."""


# ------------------------------------------------------------------------------------------------------ attention

NUMBERS_OF_BLOCK = 5
"""Numbers that describe a block of rows to `attend_requests`."""
_MOST_ROWS = 96


def rows_of_block(repeats: Sequence[int]) -> int:
    """Return the number of positions of a block, if `repeats` query heads share the heads of keys."""
    return max(1, _MOST_ROWS // max(1, *repeats))


@native(lambda repeats, width, value_width, dtype, dots, appends: (Capability.BFLOAT16_DOT,) if dots else (),
        MOST_ROWS=_MOST_ROWS)  # fmt: skip
def attend_requests(
    repeats: tuple[int, ...], width: int, value_width: int, dtype: str, dots: bool, appends: bool
) -> None:
    """Attention of requests to their own keys and values; with `appends`, new ones are written to their caches.

    `repeats` has the number of query heads of each head of keys and values, of `width` and `value_width` elements. With
    `dots`, it uses the processor's instruction for bfloat16, and rounds weights to bfloat16.
    """


LEAST_SCORES = 1 << 15
"""Scores from which `attention_grad` is worth its compilation."""
_KEYS, _MOST_VECTORS = 8, 6
"""Keys of a tile, and vectors of rows of a block: the weights of 512 keys are 200 KB, and stay in the second cache."""


def gradient_scratch(rows: int, tokens: int, width: int, value_width: int) -> int:
    """Return the float32 elements that a thread of `attention_grad` needs."""
    vectors = -(-rows // LANES)
    lanes = -(-vectors // max(1, -(-vectors // _MOST_VECTORS))) * LANES
    columns = sum(-(-size // LANES) * LANES for size in (width, value_width))
    keys = -(-tokens // _KEYS) * _KEYS
    return 2 * keys * columns + 2 * keys * lanes + 3 * lanes * columns


@native(KEYS=_KEYS, MOST_VECTORS=_MOST_VECTORS)
def attention_grad(width: int, value_width: int, dtype: str, masked: bool) -> None:
    """The gradients of attention to keys of `width` and values of `value_width` elements."""


# -------------------------------------------------------------------------------------------------- ranks and lists

SMALL, _PIECE = 1 << 14, 1 << 19
"""Bytes of a tensor that each rank adds as a whole, and of a piece of a larger one."""
AREA = 128 + 2 * SMALL + 2 * _PIECE
"""Bytes of a rank's area."""
NUMBERS_OF_WAITS = 5
"""Numbers of 64 bits that a rank which waits for others writes: `Waits` of the file."""


@native(SMALL=SMALL, PIECE=_PIECE)
def shared_sum(dtype: str, ranks: int) -> None:
    """The sum over ranks of one machine, through memory that they share."""


@native()
def run_calls() -> None:
    """A loop over calls of kernels (`native.call_list`)."""


@native()
def use_openmp() -> None:
    """Parallel loops of TVM's modules on the threads of torch."""
