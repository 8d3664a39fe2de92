"""Native kernels beside the ops of torch that compute the same, on one thread: ``python benchmarks/kernels.py``.

Times are the least of several runs, in turns. With ``--compiler ziglang`` kernels are those of that compiler.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from distir_relax.kernels import attention, attention_gradients, elementwise, norms, positions, products, updates
from distir_relax.kernels.native import compiler, load
from distir_relax.kernels.packing import pack_linear
from distir_relax.kernels.quantized import quantize_int4
from distir_relax.kernels.quantized.linear import pack_quantized

Case = tuple[str, Callable[[], object], Callable[[], object]]
"""A name, the kernel, and torch's ops."""

_RUNS, _SECONDS = 15, 0.02


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Iterate over kernels with the sizes of a small language model."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32).to(dtype)

    for rows in (1, 512):
        x, y, weight, bias = drawn(rows, 576), drawn(rows, 576), drawn(576), drawn(576)
        yield (
            f"rms_norm, {rows}",
            lambda x=x, w=weight: norms.rms_norm(x, w, 1e-5),
            lambda x=x, w=weight: F.rms_norm(x, (576,), w, 1e-5),
        )
        yield f"silu_multiply, {rows}", lambda x=x, y=y: elementwise.silu_multiply(x, y), lambda x=x, y=y: F.silu(x) * y
    yield "gelu", lambda: elementwise.gelu(x), lambda: F.gelu(x)
    yield "gelu_grad", lambda: elementwise.gelu_grad(x, y), lambda: torch.ops.aten.gelu_backward(y, x)
    mean, scale = x.float().mean(1, keepdim=True), x.float().var(1, keepdim=True).rsqrt()
    yield (
        "layer_norm_grad", lambda: norms.layer_norm_grad(x, weight, y, 1e-5),
        lambda: torch.ops.aten.native_layer_norm_backward(
            y, x, (576,), mean.to(dtype), scale.to(dtype), weight, bias, (True, False, False)
        ),
    )  # fmt: skip
    heads, cos, sin = drawn(1, 9, 64, 64), drawn(1, 1, 64, 64), drawn(1, 1, 64, 64)
    turned = lambda: torch.cat([-heads[..., 32:], heads[..., :32]], -1)  # noqa: E731
    yield "rotary", lambda: positions.rotary(heads, cos, sin), lambda: heads * cos + turned() * sin
    for rows in (1, 16):
        x, weight = drawn(rows, 1024), drawn(1536, 1024)
        packed = pack_linear(weight, rows=rows)
        narrow = pack_quantized(*quantize_int4(weight.float()), dtype=dtype, rows=rows)
        of_torch = lambda x=x, w=weight: F.linear(x, w)  # noqa: E731
        yield f"product, {rows}", lambda x=x, p=packed: p(x), of_torch
        yield f"product, 4 bits, {rows}", lambda x=x, p=narrow: p(x), of_torch
    for rows in (128, 512):
        q, k, v, grad = (drawn(2, rows, 9, 64).transpose(1, 2).requires_grad_() for _ in range(4))
        scores = lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        result, plain = scores(), [t.detach() for t in (q, k, v, grad)]
        yield f"attention, {rows}", lambda t=plain: attention.attend(*t[:3], None, 0.125, causal=True), scores
        yield (
            f"attention_grad, {rows}",
            lambda t=plain: attention_gradients.attention_grads(*t, None, 0.125, True),
            lambda y=result, t=(q, k, v), g=grad: torch.autograd.grad(y, t, g, retain_graph=True),
        )
    if dtype == torch.float32:
        a, b, w, m, s = drawn(1560, 192), drawn(1560, 768), drawn(1 << 20), drawn(1 << 20), drawn(1 << 20).square()
        yield "weight_grad", lambda: products.linear_weight_grad(a, b), lambda: a.t() @ b
        rate, size, floor = torch.tensor(0.1), torch.tensor(1e-3), torch.tensor(1e-8)
        yield (
            "adam_step", lambda: updates.adam_step(w, m, s, rate, size, floor, 0.0),
            lambda: w.addcdiv_(m, s.sqrt().add_(1e-8), value=-1e-3),
        )  # fmt: skip


def least(*functions: Callable[[], object]) -> list[float]:
    """Return the least seconds of each function, run in turns."""
    times = [float("inf")] * len(functions)
    for function in functions:
        function()
    for _ in range(_RUNS):
        for number, function in enumerate(functions):
            count, start = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - start) < _SECONDS / 4:
                function()
                count += 1
            times[number] = min(times[number], elapsed / max(count, 1))
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", choices=["system", "ziglang"], default="system")
    if parser.parse_args().compiler == "ziglang":
        load.host_compiler = compiler.zig
        load.compiled_folder = lambda: None
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        print(f"{str(dtype).removeprefix('torch.'):24} {'ours, us':>10} {'torch, us':>10} {'ratio':>6}")
        for name, ours, theirs in cases(dtype):
            mine, other = least(ours, theirs)
            print(f"{name:24} {mine * 1e6:10.1f} {other * 1e6:10.1f} {mine / other:6.2f}", flush=True)


if __name__ == "__main__":
    main()
