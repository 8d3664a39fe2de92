"""Ops of programs rather than of models: function calls, streams, states, and dynamic shapes.

``call @f(x, …) on {4,5}``   runs function `f`, whose devices 0 and 1 are 4 and 5
``wait(x)``                  the same tensor; the device waits until the stream has produced `x`
``shape_of(x)``              the shape of `x`, a vector of int64
``dynamic_reshape(x, s)``    `x` in the shape given by the vector `s`, where -1 stands for the remaining size
``shape_ops(x) {count}``     `x`; the model's own program runs so many ops on shapes here
``own_gradient(y, g, x, d)`` `y`, and `x`, whose gradient is `d`, computed from that of `y`, `g`, by ops before it
``pack(w, …) {of}``          weights in the layout of a kernel of the op `of`; in executable programs
``rows_of_each(x) {axis}``  of rows of all requests, those of each; ``join_rows`` is the inverse; in executable programs
``keep(s, x)``              `x`; the state `s` is the `x` of the first call, and equal in each
``call_tir(x, …)``           the result of a TVM `PrimFunc`; ``call_dps_packed(x, …)`` that of a registered function
"""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.program import calls, keep, own_gradient, pack, requests, shape_ops, shapes, tvm_extern  # noqa: F401
