"""Memory that a model names twice: one tensor as two arguments, constants and annotated tensors that are written to."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from distir_relax import DeviceMesh, annotate_sharding, compile
from distir_relax.errors import ImportModelError, RunError

MESH = DeviceMesh((3,), ("tp",))


def mark(x: torch.Tensor, placement: str = "S[0]") -> torch.Tensor:
    return annotate_sharding(x, MESH, placement)


class Call(torch.nn.Module):
    """A model whose forward is a plain function of it and its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.arange(5.0) / 7)
        self.register_buffer("rows", torch.arange(5.0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def agrees(function: Callable[..., Any], *args: torch.Tensor, example: Any = None, calls: int = 2) -> None:
    """Compiled and called with `args`, over and over, it gives what the model does, and leaves its inputs as that."""
    torch.manual_seed(0)
    model = Call(function)
    plan = compile(model, args if example is None else example, mesh=MESH)
    for _ in range(calls):
        ours, theirs = ([x.clone() for x in args] for _ in range(2))
        with torch.no_grad():
            expected = model(*theirs)
        found = plan(*ours)
        for a, b in zip(torch.utils._pytree.tree_leaves([found, ours]),
                        torch.utils._pytree.tree_leaves([expected, theirs]), strict=True):  # fmt: skip
            torch.testing.assert_close(a, b)


# Arguments that are one tensor


@pytest.mark.parametrize("other", [lambda x: x, lambda x: x.view(5), lambda x: x.detach()])
def test_a_tensor_given_twice_is_two_inputs(other: Any) -> None:
    x, y = torch.randn(5), torch.randn(5)
    agrees(lambda m, q, k: mark(q) + 10 * k, x, y, example=(x, other(x)))


def test_a_tensor_given_twice_in_structures() -> None:
    class Nested(torch.nn.Module):
        def forward(self, pair: Any, *, more: Any) -> Any:
            return mark(pair[0]) + 10 * pair[1]["k"] + 100 * more[0]

    x, y, z = torch.randn(3, 5).unbind()
    plan = compile(Nested(), ([x, {"k": x}],), {"more": (x,)})
    torch.testing.assert_close(plan([x, {"k": y}], more=(z,)), x + 10 * y + 100 * z)


def test_attention_of_one_tensor_is_attention_of_three() -> None:
    torch.manual_seed(0)
    layer, z, w = torch.nn.MultiheadAttention(6, 3, batch_first=True).eval(), torch.randn(2, 7, 6), torch.randn(2, 7, 6)
    plan = compile(layer, (z, z, z), shardings={"in_proj_weight": "S[0]"}, mesh=MESH)
    with torch.no_grad():
        for found, expected in zip(plan(z, w, w), layer(z, w, w), strict=True):
            torch.testing.assert_close(found, expected)


def test_a_weight_given_as_an_input_is_an_input() -> None:
    model = Call(lambda m, x: mark(x) + 10 * m.weight)
    plan, y = compile(model, (model.weight,)), torch.randn(5)
    torch.testing.assert_close(plan(y), (y + 10 * model.weight).detach())


def test_a_tensor_given_twice_on_the_meta_device() -> None:
    x = torch.empty(5, device="meta")
    plan = compile(Call(lambda m, q, k: mark(q) + 10 * k).to("meta"), (x, x))
    assert [i.value.name for i in plan.modules["global"].main.inputs if i.role == "input"] == ["args_0", "args_1"]


def accumulate(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    q.add_(1)
    return mark(q) + 10 * k


def test_an_input_that_is_written_to_may_not_be_another() -> None:
    x, data = torch.randn(5), np.zeros(9, np.float32)
    plan = compile(Call(accumulate), (x, x))
    agrees(accumulate, x, torch.randn(5), example=(x, x))
    for call in ((x, x), (x, x.view(5)), (data[:5], data[4:])):
        before = torch.as_tensor(call[0]).clone()
        with pytest.raises(RunError, match=r"writes to the input 'args_0', which shares its memory with .* 'args_1'"):
            plan(*call)
        torch.testing.assert_close(torch.as_tensor(call[0]), before)
    plan(data[:4].repeat(2)[:5], data[4:])
    parts = torch.randn(10)
    torch.testing.assert_close(plan(parts[:5], parts[5:]), parts[:5] + 10 * parts[5:])


# Constants that change after they were used


def added_to(m: Any, x: torch.Tensor) -> Any:
    a = torch.zeros(5)
    b = mark(x) + a
    a += 1
    return b


def an_element_set(m: Any, x: torch.Tensor) -> Any:
    a = torch.zeros(5)
    b = mark(x) + a
    a[2] = 100
    return b, a + x


def a_mask_filled(m: Any, x: torch.Tensor) -> Any:
    mask = torch.zeros(5)
    b = mark(x) + mask
    mask.fill_(-1e9)
    return b


def a_loop(m: Any, x: torch.Tensor) -> Any:
    position, y = torch.arange(5), mark(x)
    for _ in range(3):
        y = y * 2 + position
        position += 1
    return y


def in_a_graph_of_its_own(m: Any, x: torch.Tensor) -> Any:
    a = torch.zeros(5)
    with torch.no_grad():
        b = mark(x) + a
        v = a[1:]
    a += 1
    with torch.no_grad():
        a *= 3
    return b, v * x[1:]


def through_views(m: Any, x: torch.Tensor) -> Any:
    a = torch.zeros(5, 2)
    column = a.t()[1]
    b = mark(x) + column
    a[3].fill_(7)
    a.view(-1)[1::4] = 5
    return b, mark(x) + column, a * 1


def data_into_a_constant(m: Any, x: torch.Tensor) -> Any:
    a = torch.zeros(5)
    b = mark(x) + a
    a[1:3].copy_(x[:2])
    return b + a


def data_over_a_constant(m: Any, x: torch.Tensor) -> Any:
    a = torch.zeros(5)
    b = mark(x) + a
    a.copy_(x)
    c = torch.ones(5, dtype=torch.float64)
    c.mul_(x)
    return b + a, c


def out(m: Any, x: torch.Tensor) -> Any:
    a = torch.zeros(5)
    b = mark(x) + a
    torch.mul(torch.ones(5), 3, out=a)
    return b, x + a


def a_literal(m: Any, x: torch.Tensor) -> Any:
    a = torch.tensor([1.0, 2, 3, 4, 5])
    b = mark(x) * a
    a.neg_()
    return b, x * a


def a_copy_of_a_buffer(m: Any, x: torch.Tensor) -> Any:
    a = m.rows.clone()
    b = mark(x) + a
    a += 1
    return b + m.rows


CONSTANTS = [
    *(added_to, an_element_set, a_mask_filled, a_loop, in_a_graph_of_its_own, through_views),
    *(data_into_a_constant, data_over_a_constant, out, a_literal, a_copy_of_a_buffer),
]


@pytest.mark.parametrize("function", CONSTANTS)
def test_a_constant_is_what_it_was_when_it_was_used(function: Any) -> None:
    agrees(function, torch.randn(5))


def test_a_tensor_that_is_no_buffer_is_state_too() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        m.cache.add_(x)
        return mark(x) + m.cache

    model = Call(forward)
    model.cache = torch.zeros(5)
    plan = compile(model, (torch.randn(5),))
    assert not model.cache.any()
    for _ in range(2):
        x = torch.randn(5)
        torch.testing.assert_close(plan(x), model(x))


# What is annotated is the tensor itself


def relu_of_an_annotated_input(m: Any, x: torch.Tensor) -> Any:
    z = F.relu(mark(x), inplace=True)
    return z + x


def relu_of_an_annotated_value(m: Any, x: torch.Tensor) -> Any:
    y = x * 2
    z = F.relu(mark(y), inplace=True)
    return z + y


def written_after_the_mark(m: Any, x: torch.Tensor) -> Any:
    y = x * 2
    z = mark(y)
    y += 1
    return z * y


def written_and_dropped(m: Any, x: torch.Tensor) -> Any:
    y = x * 2
    mark(y).add_(1)
    return y * 2


def an_annotated_buffer(m: Any, x: torch.Tensor) -> Any:
    b = mark(m.rows)
    b += 1
    return b * x


def a_view_of_an_annotated_view(m: Any, x: torch.Tensor) -> Any:
    y = x.repeat(3).view(3, 5)
    z = mark(y.t(), "S[1]")
    z[2:].mul_(3)
    return z + 1, y * x


def without_gradients(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x * 2
        z = mark(y)
        z += 1
    return y * 3


def an_annotated_weight_read_by_a_write(m: Any, x: torch.Tensor) -> Any:
    y = x * 2
    v = y[1:]
    y.add_(mark(m.weight))
    return v * 2


def marked_twice(m: Any, x: torch.Tensor) -> Any:
    y = mark(mark(x * 2, "R"))
    z = y.view(5, 1)
    y.sub_(3)
    return z.squeeze(1) * y


MARKED = [
    *(relu_of_an_annotated_input, relu_of_an_annotated_value, written_after_the_mark, written_and_dropped),
    *(an_annotated_buffer, a_view_of_an_annotated_view, without_gradients, marked_twice),
    an_annotated_weight_read_by_a_write,
]


@pytest.mark.parametrize("function", MARKED)
def test_an_annotated_tensor_is_the_tensor_itself(function: Any) -> None:
    agrees(function, torch.randn(5))


def test_an_annotation_that_is_written_through_still_splits() -> None:
    plan = compile(Call(relu_of_an_annotated_value), (torch.randn(5),))
    assert all(o.value.dtensor.placements[0].dim == 0 for o in plan.modules["sharded"].main.outputs)


def test_a_weight_is_not_written_to_through_its_annotation() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        with torch.no_grad():
            mark(m.weight).mul_(2)
        return x + m.weight

    with pytest.raises(ImportModelError, match="changes 'weight', a parameter"):
        compile(Call(forward), (torch.randn(5),))


def test_a_write_that_torch_cannot_follow_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = x * 2
        wide = mark(y.expand(3, 5))
        y += 1
        return wide * 2

    with pytest.raises(ImportModelError, match="writes to memory in a way that torch cannot functionalize") as raised:
        compile(Call(forward), (torch.randn(5),))
    assert "annotate a copy" in raised.value.hint
    assert raised.value.where.startswith("test_aliases.py:")


# Programs drawn at random

_VIEWS = (lambda t: t[1:], lambda t: t.flip(0)[:3], lambda t: t.view(-1), lambda t: t[::2], lambda t: t.detach())
_WRITES = (
    *(lambda t, u: t.add_(1), lambda t, u: t.mul_(u.sum()), lambda t, u: t.fill_(3), lambda t, u: t[:2].copy_(u[:2])),
    *(lambda t, u: t[-1:].sub_(u[:1]), lambda t, u: F.relu(t, inplace=True)),
)


def drawn(m: Any, x: torch.Tensor, seed: int) -> Any:
    """Constants, values, their views and annotations, written to in any order."""
    draw = random.Random(seed)
    tensors, results = [torch.arange(5.0), x * 1, x, torch.ones(7)], []
    for _ in range(draw.randrange(4, 10)):
        with torch.no_grad() if draw.random() < 0.3 else nullcontext():
            t, u = draw.choice(tensors), draw.choice(tensors)
            match draw.randrange(4):
                case 0:
                    tensors.append(draw.choice(_VIEWS)(t))
                case 1:
                    tensors.append(mark(t))
                case 2:
                    draw.choice(_WRITES)(t, u)
                case _:
                    results.append(t * 2 + u[:1])
    return [*results, *(t * 1 for t in tensors)]


@pytest.mark.drawn(4)
@pytest.mark.filterwarnings("ignore::distir_relax.compiler.source.NothingSplit")
@pytest.mark.parametrize("seed", range(10))
def test_writes_drawn_at_random(seed: int) -> None:
    agrees(lambda m, x: drawn(m, x, seed), torch.randn(5), calls=1)
