"""Calls of the losses' ATen spellings (see `aten_calls`). An ignored label is one that is drawn, so that some are."""

from __future__ import annotations

from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


REDUCTIONS = (0, 1, 2)
X, Y, POSITIVE = "f32[3,4]", "f32[3,4]", "f32[3,4] > 0"
SHARE = "f64[5,7] > 0"
"""Not a distribution: torch asks for none."""
LOGITS, LABELS, WEIGHTS = "f64[5,7]", "i64[5] < 7", "f64[7] > 0"
MAPS, MAP_LABELS = "f64[2,5,3,2]", "i64[2,3,2] < 5"
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0])
PROBABILITIES = torch.tensor([0.0, 0.3, 1e-12, 1.0])
_NLL = [
    *(call(LOGITS, LABELS, None, how, 3) for how in REDUCTIONS),
    *(call(LOGITS, LABELS, WEIGHTS, how) for how in REDUCTIONS),
]

CALLS: dict[str, list[Call]] = {
    **{f"{name}.default": [call(X, Y, how) for how in REDUCTIONS] for name in ("mse_loss", "l1_loss")},
    "smooth_l1_loss.default": [call(X, Y), call(X, Y, 2, 0.5), call(X, Y, 0, 0.0)],
    "huber_loss.default": [call(X, Y), call(X, Y, 0, 0.5)],
    "soft_margin_loss.default": [call(X, Y), call(X, Y, 0)],
    "margin_ranking_loss.default": [call(X, Y, "f32[4]", 0.3), call(X, Y, Y, 0.0, 2)],
    "cosine_embedding_loss.default": [call("f64[4,5]", "f64[4,5]", SIGNS, -0.1, how) for how in REDUCTIONS],
    "hinge_embedding_loss.default": [call(X, SIGNS, 0.7, how) for how in REDUCTIONS],
    "poisson_nll_loss.default": [call(X, POSITIVE, True, True, 1e-8, 1), call(POSITIVE, Y, False, False, 1e-8, 0)],
    "kl_div.default": [call(X, POSITIVE), call(X, "f32[4] > 0", 2), call(X, Y, 0, log_target=True)],
    "binary_cross_entropy.default": [call(PROBABILITIES, PROBABILITIES.flip(0), "f32[4]", how) for how in REDUCTIONS],
    "binary_cross_entropy_with_logits.default": [call(X, POSITIVE), call(X, Y, "f32[4]", "f32[4]", 2)],
    "cross_entropy_loss.default": [
        *(call(LOGITS, LABELS, None, how, 3, 0.3) for how in REDUCTIONS),
        *(call(LOGITS, LABELS, WEIGHTS, how, 3, 0.3) for how in REDUCTIONS),
        *(call(LOGITS, SHARE, WEIGHTS, how, -100, 0.3) for how in REDUCTIONS),
        call(LOGITS, SHARE),
        call(LOGITS, "i64[5] < 1", None, 1, 0),
        call(MAPS, MAP_LABELS, "f64[5]", 1, 2, 0.1),
        call(MAPS, MAPS),
        call("f64[7]", "i64[] < 7"),
        call("f64[7]", "f64[7] > 0"),
        call("bf16[4099,5]", "i64[4099] < 5", "bf16[5]", 1, 2, 0.1),
    ],
    "nll_loss_nd.default": [
        *_NLL,
        call("f64[7]", "i64[] < 7"),
        call(MAPS, MAP_LABELS),
        call("f64[2,5,3]", "i64[2,3] < 5"),
    ],
    "nll_loss.default": [*_NLL, call("f16[4099,5]", "i64[4099] < 5")],
    "nll_loss2d.default": [call(MAPS, MAP_LABELS, "f64[5]", 1, 2)],
    "nll_loss_forward.default": [
        call(LOGITS, LABELS, None, 1, 3),
        call(LOGITS, LABELS, WEIGHTS, 2, 3),
        call(LOGITS, LABELS, None, 0, 3),
    ],
    "nll_loss2d_forward.default": [call(MAPS, MAP_LABELS, "f64[5]", 1, 2)],
}
