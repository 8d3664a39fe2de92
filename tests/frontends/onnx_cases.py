"""The test cases of the ONNX standard itself, which come with the onnx package."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx


@cache
def standard_cases() -> tuple[Any, ...]:
    """All of them, of single nodes and of functions written out.

    They are computed when they are collected, in many seconds: no module of tests asks for them when it is imported.
    """
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(collect_testcases())


def array(data: Any) -> np.ndarray[Any, Any]:
    """An input or an output of a case."""
    return onnx.numpy_helper.to_array(data) if isinstance(data, onnx.TensorProto) else np.asarray(data)
