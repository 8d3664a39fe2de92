"""Linear recurrences along a dim."""

from __future__ import annotations

import torch


def linear(factors: torch.Tensor, terms: torch.Tensor, axis: int) -> torch.Tensor:
    """Return y with ``y[t] = factors[t] * y[t - 1] + terms[t]`` along dim `axis`, and ``y[0] = terms[0]``."""
    if not terms.numel():
        return torch.empty_like(terms)
    steps = terms.unbind(axis)
    found = [steps[0]]
    for factor, term in zip(factors.unbind(axis)[1:], steps[1:], strict=True):
        found.append(torch.addcmul(term, factor, found[-1]))
    return torch.stack(found, axis)
