"""Ranks' programs built with a TVM pipeline of one's own, and run as a backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import tvm
from torch.utils.dlpack import from_dlpack
from tvm import relax

import distir_relax as dr
from distir_relax.bundle import Bundle
from distir_relax.runtime.backends import register_backend
from distir_relax.runtime.backends.tvm import rank_function
from distir_relax.runtime.backends.weights import load_weights
from distir_relax.runtime.communicator import Communicator


def pipeline() -> tvm.transform.Pass:
    """TVM's passes, in the order of one's choice; the last of them lower to the virtual machine."""
    return tvm.transform.Sequential(
        [relax.transform.LegalizeOps(), relax.transform.FoldConstant(), relax.get_pipeline("default_build")]
    )


class Built:
    """A `RankProgram`: from this rank's shards of the inputs to its shards of the outputs."""

    steps: Any = ()  # what the watchdog says of a rank that waits
    state: Mapping[str, torch.Tensor] = MappingProxyType({})  # the weights that it changes: none
    held: Collection[int] = ()  # memory of which its results may be parts: none

    def __init__(self, executable: Any, symbols: Sequence[str], bundle: Bundle, rank: int, comm: Communicator) -> None:
        program = bundle.manifest.program_of(rank)
        self.symbols = symbols
        self.names = [item.name for item in bundle.manifest.inputs if item.is_on(rank)]
        self.outputs = sum(item.is_on(rank) for item in bundle.manifest.outputs)
        self.arguments, self.weights = program.arguments, load_weights(bundle, rank)
        self.function = rank_function(executable, program.name, comm)

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Run once. TVM's code wants aligned memory, which a copy has."""
        values = {**self.weights, **dict(zip(self.names, inputs, strict=True))}
        shape = [tvm.runtime.ShapeTuple([sizes[name] for name in self.symbols])] if self.symbols else []
        results = self.function(*(tvm.runtime.tensor(values[name].numpy()) for name in self.arguments), *shape)
        return [from_dlpack(results[i]) for i in range(self.outputs)]


def register(plan: dr.Plan, name: str) -> None:
    """Make `name` a backend that runs this plan."""
    programs, ranks = plan.to_relax()
    built = {key: relax.build(module, "llvm", relax_pipeline=pipeline()) for key, module in programs.items()}

    def load(bundle: Bundle, rank: int, comm: Communicator, device: str) -> Built:
        name = ranks[rank]
        symbols = [str(symbol) for symbol in programs[name][name].attrs.get("distir.sizes", ())]
        return Built(built[name], symbols, bundle, rank, comm)

    register_backend(name, load)


def main() -> float:
    """A perceptron with 17 hidden units on 3 ranks; the largest difference from torch."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 17), torch.nn.Tanh(), torch.nn.Linear(17, 5))
    x = torch.randn(4, 6)
    plan = dr.compile(model, (x,), shardings={"0.weight": "S[0]"}, mesh=dr.DeviceMesh((3,), ("tp",)))
    register(plan, "mine")
    with torch.no_grad():
        return float((plan(x, backend="mine") - model(x)).abs().max())


if __name__ == "__main__":
    print(f"largest difference from torch: {main():.1e}")
