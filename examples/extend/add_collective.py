"""A collective added from outside: its entry, its method, and a distributed program that uses it.

``broadcast`` gives all devices along a mesh axis what one of them holds. The program below keeps each device's part of
a table, and looks numbers up in the part of device 1: it is verified, simulated, run by the reference executor and run
by three ranks. Run me::

    python examples/extend/add_collective.py
"""

from __future__ import annotations

from typing import Any

import torch

import distir_relax as dr
from distir_relax.compiler.compile import program_bundle
from distir_relax.interpret.distributed_executor import execute_program
from distir_relax.ir import parse, verify
from distir_relax.layout import Collective
from distir_relax.ops import Cost, Semantics, Trait, check, no_flops, same_type
from distir_relax.runtime.communicator import Communicator, collective
from distir_relax.runtime.session import Session

dr.define_op(
    "broadcast",
    Semantics(
        infer=same_type,
        torch="comm.broadcast({0}, {axis}, {root}, step={step})",  # a method of the rank's communicator
        # the reference: the result on each device along the axis, from the operands of all
        collective_semantics=lambda parts, attrs: [parts[attrs["root"]].clone() for _ in parts],
        attributes={"axis": "the mesh axis, by name", "root": "the index along it that the others get it from"},
    ),
    # As many bytes, and as long, as an all-reduce: both are a reduce-scatter's and an all-gather's worth.
    cost=Cost(flops=no_flops, collective=Collective.ALL_REDUCE),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES},
)


@collective
def broadcast(comm: Communicator, x: Any, axis: str, root: int, step: int = 0) -> Any:
    """What `x` is on the rank of index `root` along `axis`: all others give zeros to a sum."""
    return comm.all_reduce(x if comm.index(axis) == root else torch.zeros_like(x), axis, "sum", step=step)


PROGRAM = """
module @distributed {
  mesh[0] = device_mesh((3,), ("tp",))
  func @main(
    input %ids: i64[5] @ {0,1,2} as R.DTensor((5,), "int64", "mesh[0]", "R"),
    parameter %table: f32[4,2] @ {0,1,2} as R.DTensor((12, 2), "float32", "mesh[0]", "S[0: 4|4|4]"),
  ) {
    %part: f32[4,2] @ {0,1,2} = broadcast(%table) {axis="tp", root=1}
    %y: f32[5,2] @ {0,1,2} = take(%part, %ids) {axis=0}
    return "y": %y as R.DTensor((5, 2), "float32", "mesh[0]", "R")
  }
}
"""


def main() -> None:
    """Verify the program, simulate it, and run it twice: by the reference semantics, and on ranks that are threads."""
    module = parse(PROGRAM)
    verify(module, check)
    found = dr.simulate(module, profile="dgx-a100")
    print(f"on a DGX A100: {found.makespan * 1e6:.1f} microseconds, of which {found.communication:.0%} communicate")

    ids, table = torch.tensor([3, 0, 0, 2, 1]), torch.randn(12, 2)
    expected = table[4:8][ids]
    torch.testing.assert_close(execute_program(module, {"ids": ids, "table": table})["y"], expected)
    for backend in ("torch", "tvm"):
        bundle = program_bundle("lookup", module, {"table": table}, (backend,))
        torch.testing.assert_close(Session(bundle, backend)({"ids": ids})["y"], expected)
    print("three ranks agree with the reference, on both backends")


if __name__ == "__main__":
    main()
