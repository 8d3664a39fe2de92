"""Kernels written for TVM, which are compiled for this processor."""

from distir_relax.kernels.native.attention import NUMBERS_OF_BLOCK, attend_requests, rows_of_block
from distir_relax.kernels.native.attention_gradient import LEAST_SCORES, attention_grad, gradient_scratch
from distir_relax.kernels.native.elementwise import (
    GELU,
    GELU_GRAD,
    GELU_TANH,
    GELU_TANH_GRAD,
    RELU,
    SILU,
    SILU_GRAD,
    elementwise,
    times_next,
)
from distir_relax.kernels.native.floats import STORED, stored_name
from distir_relax.kernels.native.layer_norm import layer_norm
from distir_relax.kernels.native.load import MOST_ELEMENTS, Kernel, is_small, native, threads_for
from distir_relax.kernels.native.norm_gradients import norm_grad, norm_weight_grad
from distir_relax.kernels.native.panel_product import panel_product, panel_rows
from distir_relax.kernels.native.quantized_product import PANEL, quantized_product, scratch_bytes
from distir_relax.kernels.native.rms_norm import rms_norm
from distir_relax.kernels.native.rotary import rotary
from distir_relax.kernels.native.shared_sum import AREA, shared_sum
from distir_relax.kernels.native.target import Capability, host_target
from distir_relax.kernels.native.updates import adam_step, moving_square
from distir_relax.kernels.native.waits import NUMBERS_OF_WAITS, c_function
from distir_relax.kernels.native.weight_gradient import WEIGHT_GRAD_SCRATCH, weight_grad

__all__ = [
    "AREA",
    "GELU",
    "GELU_GRAD",
    "GELU_TANH",
    "GELU_TANH_GRAD",
    "LEAST_SCORES",
    "MOST_ELEMENTS",
    "NUMBERS_OF_BLOCK",
    "NUMBERS_OF_WAITS",
    "PANEL",
    "RELU",
    "SILU",
    "SILU_GRAD",
    "STORED",
    "WEIGHT_GRAD_SCRATCH",
    "Capability",
    "Kernel",
    "adam_step",
    "attend_requests",
    "attention_grad",
    "c_function",
    "elementwise",
    "gradient_scratch",
    "host_target",
    "is_small",
    "layer_norm",
    "moving_square",
    "native",
    "norm_grad",
    "norm_weight_grad",
    "panel_product",
    "panel_rows",
    "quantized_product",
    "rms_norm",
    "rotary",
    "rows_of_block",
    "scratch_bytes",
    "shared_sum",
    "stored_name",
    "threads_for",
    "times_next",
    "weight_grad",
]
