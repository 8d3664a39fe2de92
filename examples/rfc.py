"""The pipeline example of the TVM RFC, as the Relax module that it is: 127 columns on 2 ranks are 64 and 63.

distir compile examples/rfc.py:build -o rfc.dist
distir show rfc.dist --stage ranked
distir launch -n 2 rfc.dist --input rfc.npz --output y.npz --backend tvm
"""

import numpy as np
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import distir_relax as dr


@I.ir_module(s_tir=True)
class LoweringDistIRExampleModule:
    """``gelu(x A) B * C``, with `A` annotated to be split by columns."""

    I.module_attrs({"device_num": 2})
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})

    @R.function
    def foo(
        x: R.Tensor((128, 128), "float32"),
        A: R.Tensor((128, 127), "float32"),
        B: R.Tensor((127, 128), "float32"),
        C: R.Tensor((128, 1), "float32"),
    ) -> R.Tensor((128, 128), "float32"):
        A_1 = R.dist.annotate_sharding(A, device_mesh="mesh[0]", placement="S[1]")
        lv0 = R.matmul(x, A_1)
        Y = R.nn.gelu(lv0)
        Z = R.matmul(Y, B)
        O = R.multiply(Z, C)
        return O


def inputs() -> dict[str, np.ndarray]:
    """Random inputs, by name."""
    rng = np.random.default_rng(0)
    shapes = {"x": (128, 128), "A": (128, 127), "B": (127, 128), "C": (128, 1)}
    return {name: rng.standard_normal(shape, dtype=np.float32) * 0.1 for name, shape in shapes.items()}


def build(ranks: int = 2, tail: str = "ragged") -> dr.Plan:
    """The plan for the module's own mesh of 2 devices, or for another number of them."""
    mesh = None if ranks == 2 else dr.DeviceMesh((ranks,), ("tp",))
    return dr.compile(LoweringDistIRExampleModule, mesh=mesh, tail=tail, name="rfc")


if __name__ == "__main__":
    np.savez("rfc.npz", **inputs())
    print(build().text("ranked"))
    print("wrote rfc.npz")
