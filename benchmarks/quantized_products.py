"""Time of products with weights of 8 and 4 bits: ``python benchmarks/quantized_products.py [--rows 1 4]``.

For the seven products of each of the 30 layers of SmolLM2-135M together, and for its classifier, prints milliseconds of
our products, of torch's, and of reading the weights (in brackets, at the bandwidth that sums of a large tensor reach).
No cache holds the weights of all layers. The time of a product is the least of several rounds, in which the contenders
take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from distir_relax.kernels.packing import pack_linear
from distir_relax.kernels.quantized import GROUP
from distir_relax.kernels.quantized.linear import pack_quantized

LAYER = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
LAYERS = 30
CLASSIFIER = (49152, 576)
ROUNDS, MANY_ROWS, ROUNDS_OF_MANY = 15, 16, 5
Product = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    """Print one table for each number of threads, dtype of the inputs and set of weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 128])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--only", nargs="*", help="Names of products, by default all.")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for title, shapes in (("layers", LAYER * LAYERS), ("classifier", [CLASSIFIER] * 3)):
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                products = {
                    name: (size, [make(n, k, dtype) for n, k in shapes])
                    for name, (size, make) in contenders(dtype)
                    if not arguments.only or name in arguments.only
                }
                bandwidth = read_bandwidth()
                print(f"\n{title}, {threads} threads, inputs of {dtype}, reading at {bandwidth / 1e9:.1f} GB/s")
                print(f"{'rows':24}" + "".join(f"{rows:>9}" for rows in arguments.rows) + "  (reading)", flush=True)
                table = {rows: seconds(products, shapes, rows, dtype) for rows in arguments.rows}
                count = 3 if title == "classifier" else 1
                elements = sum(n * k for n, k in shapes) / count
                for name, (size, _) in products.items():
                    times = "".join(f"{table[rows][name] / count * 1e3:9.2f}" for rows in arguments.rows)
                    print(f"{name:24}{times}  ({size * elements / bandwidth * 1e3:.2f})", flush=True)


def contenders(dtype: torch.dtype) -> Iterator[tuple[str, tuple[float, Callable[[int, int, torch.dtype], Product]]]]:
    """Yield names of products with the bytes that they read for an element, and their makers."""
    yield "ours, no quantization", (dtype.itemsize, lambda n, k, dtype: pack_linear(drawn(n, k, dtype), rows=1))
    yield "ours, int8", (1, ours_int8)
    yield "ours, int8 in groups", (1 + 2 / GROUP, ours_int8_in_groups)
    yield "ours, int4", (0.5 + 4 / GROUP, ours_int4)
    if dtype == torch.float32:
        yield "torch, linear_dynamic", (1, linear_dynamic)
    else:
        yield "torch, int8pack", (1, int8pack)
        yield "torch, int4pack", (0.5 + 4 / GROUP, int4pack)


def drawn(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight."""
    return torch.randn(n, k).to(dtype)


def ours_int8(n: int, k: int, dtype: torch.dtype) -> Product:
    """Return our product with a scale for each output."""
    values = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return pack_quantized(values, torch.rand(n, 1), dtype=dtype, rows=1)


def ours_int8_in_groups(n: int, k: int, dtype: torch.dtype) -> Product:
    """Return our product with a scale for each group."""
    values = torch.randint(-127, 128, (n, k // GROUP, GROUP), dtype=torch.int8)
    return pack_quantized(values, scales(n, k), dtype=dtype, rows=1)


def ours_int4(n: int, k: int, dtype: torch.dtype) -> Product:
    """Return our product with 4 bits."""
    values = torch.randint(0, 256, (n, k // GROUP, GROUP // 2), dtype=torch.uint8)
    return pack_quantized(values, scales(n, k), -scales(n, k), dtype=dtype, rows=1)


def scales(n: int, k: int) -> torch.Tensor:
    """Return scales of groups."""
    return torch.rand(n, k // GROUP, 1).half()


def linear_dynamic(n: int, k: int, _: torch.dtype) -> Product:
    """Return torch's product that quantizes its input."""
    weight = torch.quantize_per_channel(
        torch.randn(n, k), torch.full((n,), 0.03).double(), torch.zeros(n).long(), 0, torch.qint8
    )
    packed = torch.ops.quantized.linear_prepack(weight, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, True)


def int8pack(n: int, k: int, dtype: torch.dtype) -> Product:
    """Return torch's product that widens a weight of 8 bits."""
    values, scales = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n).to(dtype)
    return lambda x: torch._weight_int8pack_mm(x, values, scales)


def int4pack(n: int, k: int, dtype: torch.dtype) -> Product:
    """Return torch's product that widens a weight of 4 bits."""
    values = torch.randint(0, 16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    scales = torch.rand(k // GROUP, n, 2).to(dtype)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)


def seconds(
    products: dict[str, tuple[float, list[Product]]], shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return the time of each contender's products for inputs of `rows` rows: the sum of the least of each product."""
    inputs = {k: torch.randn(rows, k).to(dtype) for _, k in shapes}
    best = {name: [float("inf")] * len(shapes) for name in products}
    for _ in range(ROUNDS if rows < MANY_ROWS else ROUNDS_OF_MANY):
        for name, (_, made) in products.items():
            for i, (product, (_, k)) in enumerate(zip(made, shapes, strict=True)):
                start = time.perf_counter()
                product(inputs[k])
                best[name][i] = min(best[name][i], time.perf_counter() - start)
    return {name: sum(times) for name, times in best.items()}


def read_bandwidth() -> float:
    """Return the bytes in a second that a sum of a large tensor reads."""
    data = torch.ones(64 << 20)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


if __name__ == "__main__":
    with torch.inference_mode():
        main()
