"""Linear layers with quantized weights, whose inputs are rounded to 8 bits at each call.

Native kernels (`native.quantized_product`) compute those of float32 and bfloat16 on the processor. Elsewhere the weight
is dequantized once, and the product is that of any layer.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from distir_relax.kernels.native import (
    QUANTIZED_PANEL,
    Kernel,
    quantized_product,
    scratch_bytes,
    stored_name,
)
from distir_relax.kernels.packing import Packed, pack_linear
from distir_relax.kernels.quantized.weights import GROUP, dequantize
from distir_relax.kernels.recording import recording

if TYPE_CHECKING:
    import torch

_MOST_INPUTS = 1 << 16
"""The sum of more products of two numbers of 8 bits may be too large for int32."""


def pack_quantized(
    values: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    rows: int,
) -> Packed:
    """Return the map ``x -> x @ weight.T + bias`` for inputs of `dtype` and typically `rows` rows.

    The weight (n, k) has one of the formats of `quantized.weights`; of several weights of one input, the tensors are
    joined along n. Raises `ValueError` if they have no such format.
    """
    kernel, grouped = None, values.dim() == 3
    if values.numel():
        _check(values, scales, minimums)
    if values.is_cpu and values.numel() and (grouped or values.shape[1] <= _MOST_INPUTS):
        kernel = _kernel(stored_name(dtype), 8 if minimums is None else 4, grouped)
    if kernel is None:
        weight = dequantize(values, scales, minimums, dtype)
        return pack_linear(weight, None if bias is None else bias.to(dtype), rows=rows)
    return QuantizedLinear(kernel, values, scales, minimums, bias)


class QuantizedLinear:
    """See `pack_quantized`; the products are those of native kernels."""

    def __init__(
        self,
        kernel: Kernel,
        values: torch.Tensor,
        scales: torch.Tensor,
        minimums: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        import torch

        grouped = values.dim() == 3
        self.columns, self.inner = len(values), values.shape[1] * (GROUP if grouped else 1)
        self.weight = _panels(values, scales, minimums)
        # Those of groups are in the panels.
        self.scales = _padded(torch.zeros(self.columns, 1, dtype=torch.float32) if grouped else scales)
        self.bias = _padded(torch.zeros(self.columns, dtype=torch.float32) if bias is None else bias.float())
        addresses = self.weight.data_ptr(), self.scales.data_ptr(), self.bias.data_ptr()
        self.kernel = kernel.after(*addresses, self.columns, self.inner)
        self.scratch_per_row = scratch_bytes(1, self.inner, grouped)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        rows = x.numel() // self.inner
        x = x.contiguous()
        result = x.new_empty(*x.shape[:-1], self.columns)
        if rows:
            size = rows * self.scratch_per_row
            # That of a recorded step is its own.
            own = x.new_empty(size, dtype=torch.uint8) if recording() else None
            scratch = _scratch.address_of(size) if own is None else own.data_ptr()
            self.kernel(x.data_ptr(), result.data_ptr(), scratch, rows, torch.get_num_threads())
        return result


class _Scratch(threading.local):
    """Memory of a thread that its calls share, since an allocation takes as long as a small product."""

    memory: torch.Tensor | None = None
    size, address = 0, 0

    def address_of(self, size: int) -> int:
        """Return the address of at least `size` bytes, which the next call uses again."""
        import torch

        if size > self.size:
            self.memory = torch.empty(size, dtype=torch.uint8)
            self.size, self.address = size, self.memory.data_ptr()
        return self.address


_scratch = _Scratch()


def _check(values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> None:
    import torch

    numbers = [scales] if minimums is None else [scales, minimums]
    found = f"found {', '.join(f'{tensor.dtype} {tuple(tensor.shape)}' for tensor in (values, *numbers))}"
    size = GROUP if minimums is None else GROUP // 2
    if values.dtype != (torch.int8 if minimums is None else torch.uint8):
        raise ValueError(f"expected int8 values, or uint8 values with minimums, {found}")
    if values.dim() == 2 and minimums is None and values.shape[1] and not values.shape[1] % GROUP:
        expected, dtype = (len(values), 1), torch.float32
    elif values.dim() == 3 and values.shape[1] and values.shape[2] == size:
        expected, dtype = (*values.shape[:2], 1), torch.float16
    else:
        raise ValueError(f"expected values (n, k) with k a multiple of {GROUP}, or (n, k / {GROUP}, {size}), {found}")
    if any(tensor.shape != expected or tensor.dtype != dtype for tensor in numbers):
        raise ValueError(f"expected {dtype} scales and minimums of the shape {expected}, {found}")


def _kernel(dtype: str | None, bits: int, grouped: bool) -> Kernel | None:
    if dtype is None:
        return None
    return quantized_product(dtype, bits, grouped, True) or quantized_product(dtype, bits, grouped, False)


def _panels(values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> torch.Tensor:
    """Return a weight as `native.quantized_product` takes it, as bytes."""
    import torch

    if minimums is None:
        values = values.view(torch.uint8) ^ 128  # plus 128
    values = _padded(values)
    panels, bytes_of_group = len(values) // QUANTIZED_PANEL, values.shape[-1]
    # Words of four bytes, and then the columns of a panel, become neighbours.
    words = values.view(panels, QUANTIZED_PANEL, -1, bytes_of_group // 4, 4).permute(0, 2, 3, 1, 4)
    if values.dim() == 2:
        return words.contiguous()
    numbers = [
        _padded(tensor[..., 0]).view(panels, QUANTIZED_PANEL, -1).transpose(1, 2).contiguous().view(torch.uint8)
        for tensor in (scales, *([] if minimums is None else [minimums]))
    ]
    groups, size = words.shape[1], QUANTIZED_PANEL * bytes_of_group
    result = torch.empty(panels, groups, size + sum(tensor.shape[2] for tensor in numbers), dtype=torch.uint8)
    torch.cat(numbers, 2, out=result[:, :, size:])
    result[:, :, :size].view(words.shape).copy_(words)
    return result


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with zeros after them, as many as whole panels have."""
    if not len(rows) % QUANTIZED_PANEL:
        return rows.contiguous()
    padded = rows.new_zeros(-(-len(rows) // QUANTIZED_PANEL) * QUANTIZED_PANEL, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
