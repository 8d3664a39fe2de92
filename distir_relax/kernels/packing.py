"""Linear layers whose weight is packed once for the processor's matrix kernels, those of oneDNN.

One core, microseconds for a product with a weight of (1536, 576), as `F.linear` and packed:

    processor             float32, 1 row   float32, 8 rows   bfloat16, 1 row   bfloat16, 16 rows
    EPYC with AVX-512        298, 205          435, 240          224, 124           337, 194
    Xeon with AMX            121, 150          350, 189

torch multiplies float32 by MKL, whose product of a matrix and a vector is slower on some: which is faster is measured.
Where oneDNN's form has panels of columns, `native.panel_product` computes the products that it is faster for: on that
EPYC those of up to 64 rows and more, of one row in 124 and 71.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import TYPE_CHECKING, Protocol

from distir_relax.kernels.measured import Choice, choose, measured_once
from distir_relax.kernels.native import PANEL, Kernel, panel_product, stored_name
from distir_relax.kernels.native.load import kernel_sources

if TYPE_CHECKING:
    import torch

_LEAST_ROWS = 16
"""A weight that is packed for fewer rows is slow for more of them; the other way round it is not."""
_MEASURED = (1536, 1024)
"""A weight on which both products are compared."""
_MEASURED_ROWS = (1, 4, 16, 64, 256)
"""More rows are computed by oneDNN."""
_LAYERS = 24


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
        import torch

        parts: Sequence[torch.Tensor] = torch.split_with_sizes(self._packed(x), self._sizes, -1)
        return parts


class Packed(Protocol):
    """A linear map whose weight is packed."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Return the map of `x`."""


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

    def by_onednn(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the packed weight by oneDNN."""
        return by_onednn(x, self.weight, self.bias)


def _can_pack(weight: torch.Tensor) -> bool:
    import torch

    if weight.device.type != "cpu" or 0 in weight.shape or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and can_pack_bfloat16())


def _is_faster_packed(weight: torch.Tensor, rows: int) -> bool:
    import torch

    return weight.dtype == torch.bfloat16 or rows > 1 or _is_row_faster_packed(torch.get_num_threads())


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """The native product with a weight (columns, inner) in panels, and perhaps a bias, which are at addresses."""

    kernel: Kernel
    weight: int
    bias: int
    columns: int
    inner: int
    panel: int

    def __call__(self, x: int, result: int, rows: int, threads: int) -> None:
        """Compute the result of `x`, both at addresses."""
        self.kernel(x, self.weight, self.bias, result, rows, self.columns, self.inner, self.panel, threads)


def _by_panels(packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> PanelProduct | None:
    """Return the native product with a weight and its bias, if there is one."""
    import torch

    panel = _panel_rows(packed, weight)
    dtype = stored_name(weight.dtype)
    if panel is None or dtype is None:
        return None
    if bias is not None and (bias.dtype != weight.dtype or not bias.is_contiguous()):
        return None
    addresses = torch.ops.mkldnn.data_ptr(packed), 0 if bias is None else bias.data_ptr()
    for dots in (True, False) if dtype == "bfloat16" else (False,):
        kernel = panel_product(dtype, bias is not None, dots)
        if kernel is not None:
            return PanelProduct(kernel, *addresses, weight.shape[0], weight.shape[1], panel)
    return None


def _panel_rows(packed: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Return the rows of each panel of `packed`, oneDNN's form of `weight` (out, in); None if it has no such panels."""
    import torch

    columns, inner = weight.shape
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    size, panels = torch.ops.mkldnn._nbytes(packed), -(-columns // PANEL)
    rows, rest = divmod(size, panels * PANEL * weight.element_size())
    if rest or rows < inner or rows % pair or inner % pair:
        return None
    content = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    found = torch.frombuffer(content, dtype=torch.uint8).view(weight.dtype).view(panels, rows // pair, PANEL, pair)
    for panel in {0, panels - 1}:
        given = weight[panel * PANEL : (panel + 1) * PANEL]
        expected = found.new_zeros(PANEL, rows)
        expected[: len(given), :inner] = given
        if not torch.equal(found[panel].permute(1, 0, 2).reshape(PANEL, rows), expected):
            return None
    return int(rows)


@cache
def _most_rows(dtype: torch.dtype, threads: int) -> int:
    """Return the number of rows up to which the native product is faster than oneDNN's."""
    name = f"rows-of-native-products-{stored_name(dtype)}-{threads}-threads"
    return int(measured_once(name, lambda: _measure_rows(name, dtype), kernel_sources()))


def _measure_rows(name: str, dtype: torch.dtype) -> Choice:
    import torch

    layers, most, seconds = _layers(dtype), 0, dict[str, float]()
    # Each form reads a weight that no form has read for half of the turns, so that it is in no cache.
    of_native, of_onednn = cycle(layers), cycle([*layers[_LAYERS // 2 :], *layers[: _LAYERS // 2]])
    threads = torch.get_num_threads()
    for rows in _MEASURED_ROWS:
        x = torch.ones(rows, _MEASURED[1], dtype=dtype)
        result = x.new_empty(rows, _MEASURED[0])

        def native(places: tuple[int, ...] = (x.data_ptr(), result.data_ptr(), rows, threads)) -> None:
            by_panels = next(of_native).by_panels
            assert by_panels is not None
            by_panels(*places)

        def onednn(x: torch.Tensor = x) -> None:
            next(of_onednn).by_onednn(x)

        # With times that differ by little, the native product has sums in the same order for any number of rows.
        found = choose(name, {f"native, {rows} rows": native, f"oneDNN, {rows} rows": onednn})
        seconds.update(found.seconds)
        if not str(found.chosen).startswith("native"):
            break
        most = rows
    return Choice(name, most, seconds)


@cache
def _is_row_faster_packed(threads: int) -> bool:
    """Return whether the product of one row of float32 is faster by oneDNN, with a packed weight, than by torch."""
    name = f"product-of-one-row-float32-{threads}-threads"
    return measured_once(name, lambda: _measure_row(name)) == "oneDNN"


def _measure_row(name: str) -> Choice:
    import torch

    weights = [torch.ones(_MEASURED, dtype=torch.float32) for _ in range(_LAYERS)]
    x = torch.ones(1, _MEASURED[1], dtype=torch.float32)
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, _LEAST_ROWS) for weight in weights]
    by_torch = _in_turn([partial(torch.nn.functional.linear, x, weight) for weight in weights])
    return choose(name, {"torch": by_torch, "oneDNN": _in_turn([partial(by_onednn, x, w, None) for w in packed])})


def measure_choices() -> None:
    """Make the choices between products with packed weights, unless they were made on this machine."""
    import torch

    if _can_pack(torch.ones(1, 1, dtype=torch.float32)):
        _is_row_faster_packed(torch.get_num_threads())
    for dtype in (torch.float32, torch.bfloat16):
        if PackedLinear(torch.ones(PANEL, PANEL, dtype=dtype), None, 1).by_panels is not None:
            _most_rows(dtype, torch.get_num_threads())


def _layers(dtype: torch.dtype) -> list[PackedLinear]:
    """Return layers whose weights together fit no cache."""
    import torch

    return [PackedLinear(torch.ones(_MEASURED, dtype=dtype), None, _LEAST_ROWS) for _ in range(_LAYERS)]


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that runs the next of `calls`: the weight of each is in no cache when its turn comes."""
    following = cycle(calls)
    return lambda: next(following)()


def by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` by oneDNN, of a weight that is packed or not."""
    import torch

    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
