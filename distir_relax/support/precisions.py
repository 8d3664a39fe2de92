"""Precisions of models, by name."""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.errors import ImportModelError

PRECISIONS = {"float32": "float32", "bf16": "bfloat16"}
"""The dtype of weights and activations, by the name of a precision."""
AUTOCAST_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
"""The dtype that training computes products in, as torch's autocast does; weights, and all else, are float32."""
TRAINING_PRECISIONS = ("float32", *AUTOCAST_PRECISIONS, "bf16-true")
"""All precisions of training. The last computes in bfloat16 alone, and updates copies of the weights in float32."""
PRECISION_NAMES = (*PRECISIONS, "int8", "int8-channel", "int4")
"""All precisions: those of `PRECISIONS`, and the formats of quantized weights."""


def check_precision(precision: str | None, keep: Sequence[str], where: str) -> None:
    """Raise `ImportModelError` for an unknown precision, and for patterns of `keep` that have no effect with it."""
    if precision is not None and precision not in PRECISION_NAMES:
        raise ImportModelError(
            f"expected a precision of {', '.join(PRECISION_NAMES)}, found {precision!r}", where, spelling(precision)
        )
    if isinstance(keep, str):
        raise ImportModelError(f"expected a list of patterns in `keep`, found {keep!r}", where, f"keep=[{keep!r}]")
    if keep and precision in (None, "float32"):
        raise ImportModelError(
            f"`keep` needs a precision that changes weights, found {precision or 'none'}", where,
            f"give one of {', '.join(name for name in PRECISION_NAMES if name != 'float32')}",
        )  # fmt: skip


def spelling(precision: object) -> str:
    """Return a hint for the dtype of a precision in place of its name; "" for anything else."""
    names = {dtype: name for name, dtype in {**PRECISIONS, **AUTOCAST_PRECISIONS}.items()}
    name = names.get(str(precision).removeprefix("torch."))
    return f"write precision={name!r}" if name else ""
