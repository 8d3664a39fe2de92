"""Linear layers whose weight is packed once for the processor's matrix kernels, those of oneDNN.

One core, microseconds for a product with a weight of (1536, 576), as `F.linear` and packed:

    processor             float32, 1 row   float32, 8 rows   bfloat16, 1 row   bfloat16, 16 rows
    EPYC with AVX-512        298, 205          435, 240          224, 124           337, 194
    Xeon with AMX            121, 150          350, 189

torch multiplies float32 by MKL, whose product of a matrix and a vector is fast on the processors of its vendor alone.
Where oneDNN's form has panels of columns, `native.panel_product` computes the products that it is faster for: on that
EPYC those of up to 64 rows and more, of one row in 124 and 71.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from distir_relax.kernels.native import Kernel, has_dot, measured_once, panel_product, panel_rows, stored_name
from distir_relax.kernels.processor import processor_field

if TYPE_CHECKING:
    import torch

    from distir_relax.kernels.bound_step import BoundStep

_LEAST_ROWS = 16
"""A weight that is packed for fewer rows is slow for more of them; the other way round it is not."""
_MEASURED = (1536, 1024)
"""A weight on which both products are compared."""
_MEASURED_ROWS = (1, 4, 16, 64, 256)
"""More rows are computed by oneDNN."""
_LAYERS, _ROUNDS = 24, 5
_TOLERANCE = 1.05
"""Of times that differ by less, the native product has sums in the same order for any number of rows."""


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, rows: int) -> PackedLinear:
    """Return the map ``x -> x @ weight.T + bias`` for inputs of typically `rows` rows; `weight` is (out, in)."""
    return PackedLinear(weight, bias, rows)


def pack_joined(weights: Sequence[torch.Tensor], *, transposed: bool, biased: bool, rows: int) -> JoinedLinear:
    """Return the maps of one input by several weights, computed as one: their results are views of one tensor.

    `weights` are (out, in), or (in, out) if `transposed`; if `biased`, each is followed by its bias.
    """
    import torch

    step = 2 if biased else 1
    matrices = [w.t() if transposed else w for w in weights[::step]]
    packed = PackedLinear(torch.cat(matrices), torch.cat(list(weights[1::2])) if biased else None, rows)
    return JoinedLinear(packed, [w.shape[0] for w in matrices])


class JoinedLinear:
    """Maps of one input, computed as one that is `packed`. Their results, of these sizes, are views of one tensor."""

    def __init__(self, packed: Packed, sizes: Sequence[int]) -> None:
        self._packed, self._sizes = packed, list(sizes)

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._parts(self._packed(x))

    def bind(self, step: BoundStep, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Add the maps of `x` to a step; return their results."""
        return self._parts(self._packed.bind(step, x))

    def _parts(self, results: torch.Tensor) -> Sequence[torch.Tensor]:
        import torch

        parts: Sequence[torch.Tensor] = torch.split_with_sizes(results, self._sizes, -1)
        return parts


class Packed(Protocol):
    """A linear map whose weight is packed."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Return the map of `x`."""

    def bind(self, step: BoundStep, x: torch.Tensor) -> torch.Tensor:
        """Add the map of `x` to a step; return its result."""


def can_pack_bfloat16() -> bool:
    """Return whether this processor has kernels for products of bfloat16."""
    import torch

    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


class PackedLinear:
    """See `pack_linear`. Weights that are not faster when packed are used by `F.linear` unchanged."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
        import torch

        self.bias = bias
        self.shape = tuple(weight.shape)
        self.weight = weight
        self.by_panels: PanelProduct | None = None
        """The native product, if it can be used."""
        self.packed = _can_pack(weight)
        if self.packed:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), max(rows, _LEAST_ROWS))
            self.by_panels = _by_panels(packed, weight, bias)
            self.packed = self.by_panels is not None or _is_faster_packed(weight, rows)
            self.weight = packed if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        if not self.packed:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        rows = x.numel() // max(self.shape[1], 1)
        if not rows:
            return x.new_zeros((*x.shape[:-1], self.shape[0]))
        if self.by_panels is not None and rows <= _most_rows(x.dtype, threads := torch.get_num_threads()):
            x = x.contiguous()
            result = x.new_empty((*x.shape[:-1], self.shape[0]))
            self.by_panels(x.data_ptr(), result.data_ptr(), rows, threads)
            return result
        return self.by_onednn(x)

    def bind(self, step: BoundStep, x: torch.Tensor) -> torch.Tensor:
        """Add the product with `x` to a step; return its result."""
        import torch

        rows, threads = x.numel() // max(self.shape[1], 1), torch.get_num_threads()
        shape = (*x.shape[:-1], self.shape[0])
        if not rows or self.by_panels is None or not x.is_contiguous() or rows > _most_rows(x.dtype, threads):
            return step.python(self, (x,), (shape, x.dtype))
        result = step.empty(shape, x.dtype)
        arguments = self.by_panels.arguments(x.data_ptr(), result.data_ptr(), rows, threads)
        step.add(self.by_panels.kernel(threads), *arguments)
        return result

    def by_onednn(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the packed weight by oneDNN."""
        import torch

        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


def _can_pack(weight: torch.Tensor) -> bool:
    import torch

    if weight.device.type != "cpu" or 0 in weight.shape or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and can_pack_bfloat16())


def _is_faster_packed(weight: torch.Tensor, rows: int) -> bool:
    import torch

    return weight.dtype == torch.bfloat16 or rows > 1 or _vendor() == "AuthenticAMD"


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """The native product with a weight (columns, inner) in panels, and perhaps a bias, which are at addresses.

    `kernels` are that of one thread and that of several.
    """

    kernels: tuple[Kernel, Kernel]
    weight: int
    bias: int
    columns: int
    inner: int
    panel: int

    def __call__(self, x: int, result: int, rows: int, threads: int) -> None:
        """Compute the result of `x`, both at addresses."""
        self.kernel(threads)(*self.arguments(x, result, rows, threads))

    def kernel(self, threads: int) -> Kernel:
        """Return the kernel for so many threads."""
        return self.kernels[threads > 1]

    def arguments(self, x: int, result: int, rows: int, threads: int) -> tuple[int, ...]:
        """Return the arguments of the kernel."""
        return x, self.weight, self.bias, result, rows, self.columns, self.inner, self.panel, threads


def _by_panels(packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> PanelProduct | None:
    """Return the native product with a weight and its bias, if there is one."""
    import torch

    panel = panel_rows(packed, weight)
    dtype = stored_name(weight.dtype)
    if panel is None or dtype is None:
        return None
    if bias is not None and (bias.dtype != weight.dtype or not bias.is_contiguous()):
        return None
    alone, together = (panel_product(dtype, bias is not None, parallel, has_dot()) for parallel in (False, True))
    if alone is None or together is None:
        return None
    addresses = torch.ops.mkldnn.data_ptr(packed), 0 if bias is None else bias.data_ptr()
    return PanelProduct((alone, together), *addresses, weight.shape[0], weight.shape[1], panel)


@cache
def _most_rows(dtype: torch.dtype, threads: int) -> int:
    """Return the number of rows up to which the native product is faster than oneDNN's."""
    return measured_once(f"rows-{stored_name(dtype)}-{threads}-threads", lambda: _measure(dtype))


def _measure(dtype: torch.dtype) -> int:
    """Compare both on weights that no cache holds, by the least time of several."""
    import torch

    layers = [PackedLinear(torch.ones(_MEASURED, dtype=dtype), None, 1) for _ in range(_LAYERS)]
    most = 0
    for rows in _MEASURED_ROWS:
        if not _are_panels_faster(layers, torch.ones(rows, _MEASURED[1], dtype=dtype)):
            break
        most = rows
    return most


def _are_panels_faster(layers: Sequence[PackedLinear], x: torch.Tensor) -> bool:
    import torch

    result, threads = x.new_empty(len(x), _MEASURED[0]), torch.get_num_threads()

    def panels(layer: PackedLinear) -> None:
        assert layer.by_panels is not None
        layer.by_panels(x.data_ptr(), result.data_ptr(), len(x), threads)

    def onednn(layer: PackedLinear) -> None:
        layer.by_onednn(x)

    rounds = [[_seconds(run, layers) for run in (panels, onednn)] for _ in range(_ROUNDS)]
    by_panels, by_onednn = (min(times) for times in zip(*rounds, strict=True))
    return bool(by_panels <= _TOLERANCE * by_onednn)


def _seconds(run: Callable[[PackedLinear], object], layers: Sequence[PackedLinear]) -> float:
    """Return the time of a layer: the least of all, since other work of the machine makes some of them slower."""
    least = math.inf
    for layer in layers:
        start = time.perf_counter()
        run(layer)
        least = min(least, time.perf_counter() - start)
    return least


def _vendor() -> str:
    """Return the vendor of the processor as Linux names it, ``GenuineIntel``; empty if unknown."""
    return processor_field("vendor_id")
