"""Reference executor of the ranked stage: the ranks' programs op by op, each in a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from distir_relax.analysis.distributed_executor import LocalTensors
from distir_relax.errors import RunError
from distir_relax.ir import Function, Module
from distir_relax.ops import evaluate
from distir_relax.runtime.transports.threads import RankReleased, RankThreads, ThreadCommunicator, ThreadWorld

if TYPE_CHECKING:
    import torch

_GRACE = 5.0
"""Seconds that ranks have to return after an interrupt."""
_TIMEOUT = 60.0
"""Seconds that a run may take: programs that match cannot deadlock, but another process may have the processor."""


class RankExecutor:
    """Runs the programs of a ranked module, inlined and verified, on local tensors."""

    def __init__(self, ranked: Module) -> None:
        self._programs = [ranked.function(name) for name in ranked.ranks]
        self._world = ThreadWorld(ranked.meshes[0])
        self._communicators = [self._world.communicator(rank) for rank in range(len(ranked.ranks))]

    def run(self, locals_: Mapping[str, LocalTensors]) -> dict[str, dict[int, torch.Tensor]]:
        """Return local outputs by output name, given local inputs by value name.

        Raises `RunError` for an op that cannot run on its operands, and if the ranks do not end.
        """
        found: dict[str, dict[int, torch.Tensor]] = {}
        works = [self._work(rank, program, locals_, found) for rank, program in enumerate(self._programs)]
        threads = RankThreads(works)
        try:
            threads.start()
            if not threads.wait(_TIMEOUT):
                self._world.abort(RunError(f"the ranks have not ended within {_TIMEOUT:.0f} s"))
                threads.wait()
        except BaseException as interrupt:
            # Python must not end while threads compute.
            self._world.abort(interrupt)
            threads.wait(_GRACE)
            raise
        if (error := self._world.error) is not None:
            self._world.reset()
            for communicator in self._communicators:
                communicator.forget_started()
            raise error
        return found

    def _work(
        self,
        rank: int,
        program: Function,
        locals_: Mapping[str, LocalTensors],
        found: dict[str, dict[int, torch.Tensor]],
    ) -> Callable[[], None]:
        def work() -> None:
            import torch

            try:
                with torch.inference_mode():
                    results = _run(program, rank, locals_, self._communicators[rank])
                    for name, tensor in results.items():
                        found.setdefault(name, {})[rank] = tensor
            except RankReleased:
                pass
            except BaseException as error:
                self._world.abort(error)

        return work


def _run(
    program: Function, rank: int, locals_: Mapping[str, LocalTensors], comm: ThreadCommunicator
) -> dict[str, torch.Tensor]:  # fmt: skip
    values = {item.value.name: locals_[item.value.name][rank] for item in program.inputs}
    comm.start_counting()
    for op in program.ops:
        results = evaluate(op, [values[v.name] for v in op.operands], comm)
        values.update(zip((v.name for v in op.results), results, strict=False))
    return {output.name: values[output.value.name] for output in program.outputs}
