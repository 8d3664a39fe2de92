"""Private APIs of torch: all in one module, and all there; patches of torch reach the importing thread alone."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from distir_relax.errors import DistIRError
from distir_relax.frontends.torch.custom_autograd import custom_autograd
from distir_relax.support.torch_compat import PRIVATE, private

PACKAGE = Path(__file__).parent.parent.parent / "distir_relax"


@pytest.mark.parametrize("path", PRIVATE)
def test_this_torch_has_it(path: str) -> None:
    assert private(path) is not None, f"torch {torch.__version__} has no {path}: change support/torch_compat.py"


def test_what_is_missing_is_named() -> None:
    PRIVATE["torch.utils._pytree.tree_prune"] = "a test"
    try:
        with pytest.raises(DistIRError, match=r"has no torch.utils._pytree.tree_prune, used for a test"):
            private("torch.utils._pytree.tree_prune")
    finally:
        del PRIVATE["torch.utils._pytree.tree_prune"]


def test_no_other_module_uses_private_names_of_torch() -> None:
    """But kernels, which a rank runs: they use the operators listed."""
    uses = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "torch_compat.py":
            continue
        text = re.sub(r'private\("[^"]*"\)', "", path.read_text(encoding="utf-8"))
        for found in re.findall(r"\btorch(?:\.\w+)*\._[a-z]\w*|from (torch(?:\.\w+)*\._\w+) import", text):
            uses.append((path.name, found))
        of_kernels = re.findall(r"torch\.ops\.(?:mkldnn\.\w+|aten\._\w+)", text)
        for module, names in re.findall(r"from (torch\.utils\._\w+) import (.*)", text):
            of_kernels += [f"{module}.{name}" for name in names.split(", ")]
        assert set(of_kernels) <= PRIVATE.keys()
    kernels = ("attention_parts.py", "packing.py", "panel_product.py", "products.py", "recording.py", "recorded_ops.py")
    assert [use for use in uses if use[0] not in kernels] == []


class Double(torch.autograd.Function):
    """A function with its own gradient."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def test_other_threads_use_custom_autograd_while_a_model_is_imported() -> None:
    results: list[float] = []

    def work() -> None:
        x = torch.tensor(3.0, requires_grad=True)
        x.register_hook(lambda grad: grad + 1)
        Double.apply(x).backward()
        results.append(float(x.grad))  # type: ignore[arg-type]

    with custom_autograd(torch.nn.Linear(2, 2), True):
        assert "own_gradient" in str(Double.apply(torch.ones(2, requires_grad=True)).grad_fn)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results == [3.0]
