"""The command line, on a rank 1 whose memory flips a bit of ``down.weight[2, 4]`` in step 5."""

from __future__ import annotations

import torch

from distir_relax.cli import main
from distir_relax.runtime.training.executor import Executor

if __name__ == "__main__":
    real = Executor.step
    steps: list[int] = []

    def step(self: Executor, *arguments: object) -> dict[str, torch.Tensor]:
        """Run, and flip a bit."""
        found = real(self, *arguments)  # type: ignore[arg-type]
        steps.append(1)
        if self.index == 1 and len(steps) == 5:
            self._session.programs[0].state["down.weight"].view(torch.int32)[2, 4] ^= 1 << 22
        return found

    Executor.step = step  # type: ignore[method-assign, assignment]
    main()
