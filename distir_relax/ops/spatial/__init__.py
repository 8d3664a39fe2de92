"""Ops over the spatial dims of ``N C spatial`` data. Their windows make halos.

=======================  ==========================================================================
`convolution`            sums over windows with strides, plain and transposed
`convolution_gradients`  how both are differentiated, and what sums the gradient of weights
`pooling`                maxima and averages of windows with strides
`pooling_gradients`      how these are differentiated
`adaptive_pooling`       maxima and averages of windows that follow from the sizes
`max_pool_places`        where those maxima stand
`upsample`               each element repeated a whole number of times
`resize`                 to any size, in the forms that torch and Relax have: ``image.resize2d``
`resample`               one dim to any size, in all forms that ONNX has
`onnx_resize`            ONNX's Resize, which chooses among the three
`interpolate`            torch's interpolation, which does so too
`grid_sample`            an image read at given positions
`separable`              how resizing and averages of any windows are differentiated
`grid_sample_gradient`   how it is differentiated
`patches`                patches as columns, and back
=======================  ==========================================================================

What their entries have in common is in `windowed`. The attributes of windows with strides are in `strides`, those of
windows that follow a formula in `parts`.
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
    upsample,
    window_ops,
)
