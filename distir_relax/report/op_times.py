"""The times of ops beside their limits, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.report.text_table import align_columns

if TYPE_CHECKING:
    from distir_relax.calibration.op_times import OpTime, OpTimes, StepTimes

_HEADER = ("op", "number", "ms", "limit", "ratio", "share", "operands")
_MOST = 16
_WIDTH = 72


def op_times_text(times: OpTimes, most: int = _MOST) -> str:
    """Return the limits of the device, and a table for each step with the ops that take the longest."""
    limits = times.limits
    products = ", ".join(f"{1e-9 * rate:.0f} {dtype}" for dtype, rate in limits.products.items())
    lines = [
        f"limits: products of {products} Gop/s, memory {1e-9 * limits.bandwidth:.1f} GB/s, "
        f"caches {1e-9 * limits.cache_bandwidth:.0f} GB/s"
    ]
    for step in times.steps:
        lines += ["", *_step(step, most)]
    return "\n".join(lines)


def op_times_json(times: OpTimes) -> dict[str, Any]:
    """Return the same for programs, with all ops; times are in seconds."""
    limits = times.limits
    return {
        "limits": {
            "products": dict(limits.products), "bandwidth": limits.bandwidth,
            "cache_bandwidth": limits.cache_bandwidth, "cache": limits.cache,
        },
        "steps": [
            {
                "step": step.what, "seconds": step.seconds, "limit": step.limit,
                "ops": [
                    {"op": o.op, "operands": o.operands, "number": o.count, "seconds": o.seconds, "limit": o.limit,
                     "location": o.location}
                    for o in step.ops
                ],
            }
            for step in times.steps
        ],
    }  # fmt: skip


def _step(step: StepTimes, most: int) -> list[str]:
    total = sum(op.seconds for op in step.ops)
    ratio = f"{step.seconds / step.limit:.2f} times" if step.limit else "without"
    title = f"{step.what}: {1e3 * step.seconds:.2f} ms, {ratio} the limit of {1e3 * step.limit:.2f} ms"
    rows = [_row(op.op, [op], total, op.operands) for op in step.ops[:most]]
    if len(step.ops) > most:
        rows.append(_row("others", step.ops[most:], total))
    return [title, *align_columns([_HEADER, *rows], left=(0, 6))]


def _row(name: str, ops: Sequence[OpTime], total: float, operands: str = "") -> tuple[str, ...]:
    seconds, limits = sum(op.seconds for op in ops), [op.limit for op in ops if op.limit is not None]
    limit = sum(limits)
    return (
        name,
        str(sum(op.count for op in ops)),
        f"{1e3 * seconds:.3f}",
        f"{1e3 * limit:.3f}" if limits else "",
        f"{seconds / limit:.1f}" if limit else "",
        f"{seconds / total:.1%}",
        operands if len(operands) <= _WIDTH else f"{operands[: _WIDTH - 3]}...",
    )
