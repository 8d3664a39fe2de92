"""Ops of programs rather than of models: function calls, streams, and shapes that are numbers of the program itself.

``call @f(x, …) on {4,5}``   runs function `f`, whose devices 0 and 1 are 4 and 5
``wait(x)``                  the same tensor; the device goes on when the stream on which `x` was made has come so far
``shape_of(x)``              the shape of `x`, a vector of int64
``dynamic_reshape(x, s)``    `x` in the shape that the numbers `s` say, -1 standing for what is left
``call_tir(x, …)``           what a `PrimFunc` of TVM's gives, ``call_dps_packed(x, …)`` what a registered function does
"""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.program import calls, shapes, tvm_extern  # noqa: F401
