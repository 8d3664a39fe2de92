"""Kernels that do not compile, or do not run well, in a module that a child process finds."""

from __future__ import annotations

from typing import Any

import torch

from distir_relax.kernels.native.load import Kernel, Pairs, Trial, native


@native()
def unused(width: int) -> None:
    """One without a file."""


@native()
def wrong(width: int) -> None:
    """One that does not compile."""


@native()
def aborting(width: int) -> None:
    """One that ends its process."""


@native()
def hanging(width: int) -> None:
    """One that does not end."""


@native()
def filling(value: int) -> None:
    """One that fills float32 numbers with a value."""


def run_nothing(kernel: Kernel, *_: Any) -> Pairs:
    kernel()
    yield from ()


def expect_threes(kernel: Kernel, value: int) -> Pairs:
    x = torch.empty(5)
    kernel(x.data_ptr(), 5)
    yield x, torch.full((5,), 3.0)


for _kernel in (aborting, hanging):
    _kernel.trial = Trial(_kernel, run_nothing, [(3,)])
filling.trial = Trial(filling, expect_threes, [(3,)])
