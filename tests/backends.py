"""Programs run by a backend, ranks as threads of this process, against the program that was given."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distir_relax.interpret import interpret
from distir_relax.ir import Module
from distir_relax.lowering.emit.bundle import to_bundle
from distir_relax.runtime.execute import run_bundle


def check_backend(stages: Mapping[str, Module], tensors: Mapping[str, torch.Tensor], tail: str, backend: str) -> None:
    """Fail unless the ranks, run by `backend`, give what the global program does, to 1e-9 in float64.

    `stages` are the program at the end of each stage (`tests.compiled`).
    """
    expected = interpret(stages["global"].main, tensors)
    bundle = to_bundle("program", stages["sharded"], stages["distributed"], stages["ranked"], tensors, tail, (backend,))
    inputs = {item.name: tensors[item.name] for item in bundle.manifest.inputs}
    found = run_bundle(bundle, inputs, backend=backend)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{backend} %{name}: {text}"
        )
