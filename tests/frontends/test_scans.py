"""Linear recurrences: captured as one op from torch's scan, for any length, in both directions; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch._higher_order_ops.associative_scan import associative_scan

import distir_relax as dr
from distir_relax.errors import UnsupportedOpError
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.kernels.scans import linear
from tests.incremental.language_models import VOCABULARY, language_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Scan(torch.nn.Module):
    """A scan along dim 1 by a function, with factors of another shape."""

    def __init__(self, combine: Callable[[Any, Any], Any], reverse: bool = False) -> None:
        super().__init__()
        self.combine, self.reverse = combine, reverse

    def forward(self, x: torch.Tensor) -> Any:
        pairs = (x.sigmoid(), x * 2)
        return associative_scan(self.combine, pairs, 1, reverse=self.reverse, combine_mode="generic")


def recurrence(left: Any, right: Any) -> Any:
    return left[0] * right[0], left[1] * right[0] + right[1]


def by_steps(factors: torch.Tensor, terms: torch.Tensor, reverse: bool) -> torch.Tensor:
    if reverse:
        return by_steps(factors.flip(1), terms.flip(1), False).flip(1)
    state, found = torch.zeros_like(terms[:, 0]), []
    for t in range(terms.shape[1]):
        state = factors[:, t] * state + terms[:, t]
        found.append(state)
    return torch.stack(found, 1)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_is_one_op_at_any_length(reverse: bool) -> None:
    model, dims = Scan(recurrence, reverse), {"x": {0: "batch", 1: dr.Dim("sequence", max=64)}}
    imported = import_torch(model, (torch.randn(2, 9, 3),), check=False, dynamic_shapes=dims)
    assert [op.name for op in imported.module.main.ops].count("linear_scan") == 1
    assert not imported.module.guards
    for mesh, placement in ((1, "R"), (3, "S[0]"), (3, "S[2]")):
        plan = dr.compile(
            model, (torch.randn(2, 9, 5),), mesh=mesh, shardings={"x": placement}, check_import=False,
            dynamic_shapes=dims,
        )  # fmt: skip
        for length in (1, 2, 17):
            x = torch.randn(4, length, 5)
            products, found = plan(x)
            factors = x.sigmoid()
            expected = factors.flip(1).cumprod(1).flip(1) if reverse else factors.cumprod(1)
            torch.testing.assert_close(products, expected)
            torch.testing.assert_close(found, by_steps(factors, x * 2, reverse))


def test_the_kernel() -> None:
    for shape, axis in (((3, 5, 2), 1), ((0, 5), 1), ((5, 0), 1), ((7,), 0), ((1,), 0)):
        factors, terms = torch.randn(shape), torch.randn(shape)
        found = linear(factors, terms, axis)
        moved = by_steps(factors.movedim(axis, 0)[None], terms.movedim(axis, 0)[None], False) if found.numel() else None
        expected = terms if moved is None else moved[0].movedim(0, axis)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "combine",
    [
        lambda left, right: (left[0] + right[0], left[1] * right[1]),
        lambda left, right: (left[0] * right[0], torch.maximum(left[1], right[1])),
        lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1] + 1),
    ],
)
def test_other_scans_are_refused(combine: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(UnsupportedOpError, match="only linear recurrences are supported"):
        dr.compile(Scan(combine), (torch.randn(2, 5, 3),), mesh=1, check_import=False)


def test_a_model_of_transformers_trains() -> None:
    """Its loop over positions is a scan here; the gradients are those of the loop."""
    model = language_model("mamba").train()
    ids = torch.randint(0, VOCABULARY, (3, 7))

    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    step = dr.compile_training(
        model, loss, optimizer=dr.optim.SGD(lr=0.1), example_batch=(ids, ids), strategy="1/2/1/1"
    )
    functions = step.plan.modules["global"].functions
    assert any(op.name == "linear_scan" for function in functions for op in function.ops)
    found = step(ids, ids)
    config = transformers.MambaConfig(**model.config.to_dict())
    own = transformers.MambaForCausalLM(config).train()
    own.load_state_dict(model.state_dict())
    expected = loss(own(ids), ids)
    expected.backward()
    torch.testing.assert_close(torch.as_tensor(float(found)), expected.detach(), rtol=1e-5, atol=1e-6)
    after = step.parameters()
    for name, parameter in own.named_parameters():
        if parameter.grad is not None and name in after:
            torch.testing.assert_close(after[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-4, atol=1e-6)
