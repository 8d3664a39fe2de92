"""Sorts that are a means alone are left out; any use that depends on the order keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import transformers.integrations.moe
from torch import nn

from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret import interpret
from distir_relax.ir.symbols import specialize
from distir_relax.ops import lookup

ROWS, GROUPS, WIDTH = 11, 5, 8


def ends_of(ids: torch.Tensor) -> torch.Tensor:
    counts = torch.histc(ids.float(), bins=GROUPS, min=0, max=GROUPS - 1)
    return torch.cumsum(counts, 0, dtype=torch.int32)


def product(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


class Mixture(nn.Module):
    """Rows sorted by group, worked on by `use(x, ids, order, w)`."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.use = use
        self.gate = nn.Linear(WIDTH, GROUPS)
        self.w = nn.Parameter(torch.randn(GROUPS, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = self.gate(x).topk(2).indices.reshape(-1)
        return self.use(x, ids, torch.sort(ids, stable=True)[1], self.w)


def twice(x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As a mixture of experts does it; the inverse of the order is another sort."""
    y = product(torch.tanh(product(x[order // 2], w, ends_of(ids[order]))), w, ends_of(ids[order]))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return y[inverse].view(-1, 2, WIDTH).sum(1)


def summed(x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A sum over all rows is the same in any order."""
    return product(x[order // 2], w, ends_of(ids[order])).sum(0)


def biased(x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A bias of each row's group, and numbers of groups in other shapes."""
    here = ids[order]
    return (product(x[order // 2], w, ends_of(here)) + w[:, 0][here] * here.view(-1, 1)).sum(0)


def shares(x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Bounds made of the mean of what each row's group says: not of how many rows a group has."""
    one_hot = (ids[order][:, None] == torch.arange(GROUPS)).float()
    ends = torch.cumsum(one_hot.mean(0), 0).to(torch.int32)
    return product(x[order // 2], w, ends).sum(0)


def running(x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A running sum is not."""
    return product(x[order // 2], w, ends_of(ids[order])).cumsum(0)


def left_sorted(x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return product(x[order // 2], w, ends_of(ids[order]))


def other_bounds(x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Groups that begin one row later than those of the sorted numbers."""
    return product(x[order // 2], w, (ends_of(ids[order]) + 1).clamp(max=2 * ROWS).to(torch.int32)).sum(0)


def other_rows(x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Beside the sorted rows stand others that are not."""
    return (product(x[order // 2], w, ends_of(ids[order])) * x.repeat(2, 1)).sum(0)


def backwards(x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sorted the other way round: the bounds are those of other groups."""
    order = torch.argsort(ids, descending=True, stable=True)
    return product(x[order // 2], w, ends_of(ids[order])).sum(0)


def sorts(imported: Imported) -> int:
    orders = [lookup(op.name).split.order for op in imported.module.main.ops]
    return sum(order is not None and order.sorts is not None for order in orders)


@pytest.mark.drawn(9)
@pytest.mark.parametrize(
    ("use", "left"),
    [
        (twice, 0),
        (summed, 0),
        (biased, 0),
        (shares, 1),
        (running, 1),
        (left_sorted, 1),
        (other_bounds, 1),
        (other_rows, 1),
        (backwards, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("dims", [None, {"x": {0: "rows"}}], ids=["fixed", "symbolic"])
def test_a_sort_is_left_out_where_its_order_is_a_means(
    use: Callable[..., torch.Tensor], left: int, dims: dict[str, Any] | None
) -> None:
    torch.manual_seed(0)
    model, example = Mixture(use), torch.randn(ROWS, WIDTH)
    imported = import_torch(model, (example,), dynamic_shapes=dims)
    assert sorts(imported) == left
    for rows in (1, 2, ROWS) if dims else (ROWS,):
        x = example[:rows]
        module = specialize(imported.module, {"rows": rows} if dims else {})
        (found,) = interpret(module, {**imported.tensors, **imported.flatten((x,), {})}).values()
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)


def test_numbers_of_groups_that_may_be_any_keep_their_sort() -> None:
    """Of numbers that come in, one may be no group's, and all bounds behind it another's."""

    class Given(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            order = torch.argsort(ids)
            return product(x[order], w, ends_of(ids[order])).sum(0)

    torch.manual_seed(0)
    args = torch.randn(ROWS, WIDTH), torch.randint(0, GROUPS, (ROWS,)), torch.randn(GROUPS, WIDTH, WIDTH)
    assert sorts(import_torch(Given(), args)) == 1


QWEN2 = (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM, {"shared_expert_intermediate_size": 24})
QWEN3 = (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, {"head_dim": 8})
OLMOE = (transformers.OlmoeConfig, transformers.OlmoeForCausalLM, {})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", [QWEN2, QWEN3, OLMOE], ids=lambda kind: kind[1].__name__)
def test_mixtures_of_transformers_have_no_sort_left(kind: tuple[type, type, dict[str, int]]) -> None:
    config, model_of, more = kind
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_experts": 5,
             "num_key_value_heads": 2, "intermediate_size": 24, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
             "pad_token_id": 0}  # fmt: skip
    model = model_of(config(**sizes, **more)).eval()
    call = {"input_ids": torch.randint(1, 31, (3, 5)), "use_cache": False}
    imported = import_torch(model, (), call)
    assert sorts(imported) == 0
    products = [op for op in imported.module.main.ops if lookup(op.name).split.routing is not None]
    assert len(products) == 2 * 4  # two products a layer, between a dispatch and a combination
    found = imported.rebuild(interpret(imported.module, {**imported.tensors, **imported.flatten((), call)}))
    torch.testing.assert_close(found.logits, model(**call).logits, rtol=1e-5, atol=1e-5)
