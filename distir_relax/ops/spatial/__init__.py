"""Ops over the spatial dims of ``N C spatial`` data. Their windows cause halo exchanges.

=========================  ==========================================================================
`convolution`              convolutions, plain and transposed
`convolution_gradients`    gradients of both, and the weight gradient op
`convolution_workspace`    workspace of torch's CPU kernels
`pooling`                  max and average pooling with strides
`pooling_gradients`        gradients of pooling
`adaptive_pooling`         adaptive max and average pooling
`max_pool_indices`         indices of the maxima
`resize`                   resizing to any size, in the forms of torch and Relax: ``image.resize2d``
`resample`                 resizing of one dim to any size, in all forms of ONNX
`onnx_resize`              ONNX's Resize, lowered to one of these three
`interpolate`              nearest upsampling by integer factors, and torch's interpolation
`separable_gradients`      gradients of resizing and of average pooling with any windows
`grid_sample`              sampling of an image at given positions
`grid_sample_gradient`     its gradient
`im2col`                   patches as columns, and back
=========================  ==========================================================================

Shared parts of their entries are in `window_ops`. The attributes of windows with strides are in `strides`, those of
windows that follow a formula in `computed_windows`.
"""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.spatial import (  # noqa: F401
    adaptive_pooling,
    computed_windows,
    convolution,
    convolution_gradients,
    grid_sample,
    grid_sample_gradient,
    im2col,
    interpolate,
    max_pool_indices,
    onnx_resize,
    pooling,
    pooling_gradients,
    resample,
    resize,
    separable_gradients,
    strides,
    window_ops,
)
