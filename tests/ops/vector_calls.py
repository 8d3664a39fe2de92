"""Calls of distances, diagonals, bags, ranks and scans: their ATen spellings (see `aten_calls`)."""

from __future__ import annotations

import math
from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


X, Y = "f32[3,4]", "f32[3,4]"
TABLE, IDS, SHARES = "f32[7,3]", "i64[12] < 7", "f32[12]"
EVEN, RAGGED, ENDS = torch.arange(0, 12, 4), torch.tensor([0, 0, 5, 6, 12]), torch.tensor([0, 5, 5, 12])
_BAGS = [
    *(call(TABLE, IDS, offsets, False, mode) for offsets in (EVEN, RAGGED) for mode in (0, 1, 2)),
    *(call(TABLE, IDS, offsets, False, 0, False, SHARES) for offsets in (EVEN, RAGGED)),
    *(call(TABLE, IDS, ENDS, False, mode, False, None, True) for mode in (0, 1)),
    call(TABLE, "i64[0]", torch.zeros(2, dtype=torch.int64), False, 1),
]
_PADDED = [
    *(
        call(TABLE, IDS, offsets, False, mode, False, None, False, 2)
        for offsets in (EVEN, RAGGED)
        for mode in (0, 1, 2)
    ),
    call(TABLE, IDS, RAGGED, False, 0, False, SHARES, False, 3),
]
_ORDERS = (0, 1, 2, 1.5, 3, math.inf)

CALLS: dict[str, list[Call]] = {
    "pairwise_distance.default": [call(X, Y), call(X, "f32[4]", 1, 1e-3, True), call(X, Y, 3), call(X, Y, math.inf)],
    "dist.default": [call(X, Y), call(X, "f32[4]", 1)],
    "cdist.default": [
        *(call("f32[2,5,3]", "f32[2,4,3]", order) for order in _ORDERS),
        call("f32[2,1,5,3]", "f32[7,4,3]", 2, 2),
        call("f32[27,3]", "f32[5,3]"),
        call("f32[2,5,3]", "f32[2,4,3]", 2, 1),
    ],
    "_cdist_forward.default": [call("f32[5,3]", "f32[4,3]", 2.0, None)],
    "_euclidean_dist.default": [call("f32[5,3]", "f32[4,3]")],
    "triplet_margin_loss.default": [
        call(X, X, Y),
        call(X, Y, X, 0.5, 1, 1e-6, True, 2),
        call("f32[1,4]", X, Y, 2.0, 3, 1e-6, False, 0),
    ],
    "bilinear.default": [call("f32[3,4]", "f32[3,5]", "f32[2,4,5]", "f32[2]"), call(X, "f32[3,5]", "f32[2,4,5]")],
    "embedding_bag.default": _BAGS,
    "embedding_bag.padding_idx": [*_PADDED, call(TABLE, IDS, EVEN, False, 1, False, None, False, None)],
    "_embedding_bag.default": [*_BAGS[:1], *_PADDED[:2]],
    "_embedding_bag_forward_only.default": [_BAGS[3]],
    "diagonal.default": [call(X), call("f32[2,3,4]", 1, -1, 0), call("f32[5,3]", -2), call(X, 9)],
    "diagonal_copy.default": [call(X, 1)],
    "linalg_diagonal.default": [call("f32[2,3,3]")],
    "diag.default": [call(X), call("f32[5,3]", -1), call("f32[3]"), call("f32[3]", 2)],
    "diag_embed.default": [call(X), call(X, -2, 0, 2), call("i64[2,3]", 1, 1, 0)],
    "diagflat.default": [call("f32[2,3]", 1)],
    "trace.default": [call(X), call("i64[5,3]")],
    "median.default": [call("f32[5,3]"), call("f32[4]"), call("i64[5]")],
    "median.dim": [call("f32[5,4]", 1), call("f32[5,3]", 0, True), call("f32[]", 0)],
    "nanmedian.default": [call("f32[5,3]")],
    "nanmedian.dim": [call("f32[5,4]", -1), call("f32[5,3]", 0, True)],
    "kthvalue.default": [call("f32[5,4]", 3), call("f32[5,3]", 2, 0, True)],
    "cummax.default": [call(X, 1), call("i64[5]", 0)],
    "cummin.default": [call(X, -2)],
    "logcumsumexp.default": [call(X, 1)],
    "aminmax.default": [call(X), call(X, dim=1), call(X, dim=0, keepdim=True)],
}
