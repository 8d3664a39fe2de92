"""Keys and values that are views of growing states with their new elements, and look-alikes that are not."""

from __future__ import annotations

import pytest
import torch

from distir_relax.interpret import interpret
from distir_relax.ir import parse, verify
from distir_relax.ir.symbols import specialize
from distir_relax.lowering import AttendStates
from distir_relax.ops import check

TEXT = """
module @global {
  size new = 1..64 typically 5
  size past = 0..63 typically 8
  func @main(
    input %q: f32[1, 6, new, 4],
    input %k: f32[1, 6, new, 4],
    input %v: f32[1, new, 24],
    input %k.past: f32[1, 6, past, 4],
    input %v.past: f32[1, past, 24],
  ) {
    %k.all: f32[1, 6, new + past, 4] = append(%k.past, %k) {axis=2}
    %v.all: f32[1, new + past, 24] = append(%v.past, %v) {axis=1}
    %view: f32[1, new + past, 6, 4] = reshape(%v.all) {shape=(1, new + past, 6, 4)}
    %values: f32[1, 6, new + past, 4] = permute_dims(%view) {axes=(0, 2, 1, 3)}
    %y: f32[1, 6, new, 4] = nn.scaled_dot_product_attention(%q, %k.all, %values) {boolean=False, causal=False, dtype="float32", masked=False, scale=0.5}
    return "y": %y, "k.next": %k.all, "v.next": %v.all
  }
}
"""  # noqa: E501
PASS = AttendStates({"k.past": "k.next", "v.past": "v.next"})


def test_keys_by_head_and_values_by_token() -> None:
    module = parse(TEXT)
    changed = PASS.run(module)
    verify(changed, check)
    (op,) = changed.main.ops
    assert op.name == "nn.attention_of_states"
    assert [v.name for v in op.operands] == ["q", "k", "v", "k.past", "v.past"]
    assert [v.name for v in op.results] == ["y", "k.all", "v.all"]
    assert op.attrs["views"] == ((2, (), ()), (1, (1, -1, 6, 4), (0, 2, 1, 3)))


@pytest.mark.parametrize(("past", "new"), [(0, 3), (5, 1), (7, 4)])
def test_it_computes_the_same(past: int, new: int) -> None:
    module = specialize(parse(TEXT), {"past": past, "new": new})
    inputs = {i.value.name: torch.randn(i.value.tensor.shape) for i in module.main.inputs}
    expected, found = interpret(module, inputs), interpret(PASS.run(module), inputs)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # A mask that counts rows from the first.
        ("causal=False", "causal=True"),
        # The reshape takes elements of several tokens together.
        ("%view: f32[1, new + past, 6, 4] = reshape(%v.all) {shape=(1, new + past, 6, 4)}\n"
         "    %values: f32[1, 6, new + past, 4] = permute_dims(%view) {axes=(0, 2, 1, 3)}",
         "%values: f32[1, 6, new + past, 4] = reshape(%v.all) {shape=(1, 6, new + past, 4)}"),
        # Something else reads all keys, a view of the values, or the state.
        ('return "y": %y', "%u: f32[1, 6, new + past, 4] = nn.relu(%k.all)\n    return \"u\": %u, \"y\": %y"),
        ('return "y": %y', "%u: f32[1, new + past, 6, 4] = nn.relu(%view)\n    return \"u\": %u, \"y\": %y"),
        ('return "y": %y', "%u: f32[1, 6, past, 4] = nn.relu(%k.past)\n    return \"u\": %u, \"y\": %y"),
        # It is no state to which the keys are appended, and the result is none.
        ('%k.all: f32[1, 6, new + past, 4] = append(%k.past, %k)',
         "%p: f32[1, 6, past, 4] = nn.relu(%k.past)\n    %k.all: f32[1, 6, new + past, 4] = append(%p, %k)"),
        ('"k.next": %k.all', '"k.all": %k.past'),
        # The keys are not appended to the state as it was.
        ('"k.next": %k.all', '"k.next": %k.past'),
    ],
)  # fmt: skip
def test_look_alikes(before: str, after: str) -> None:
    assert before in TEXT
    module = parse(TEXT.replace(before, after))
    assert PASS.run(module) == module


def test_states_that_are_none() -> None:
    module = parse(TEXT)
    assert AttendStates({"k.past": "k.next"}).run(module) == module


def test_keys_whose_last_dim_is_that_of_the_tokens() -> None:
    text = TEXT.replace("%k: f32[1, 6, new, 4]", "%k: f32[1, 6, 4, new]").replace("[1, 6, past, 4]", "[1, 6, 4, past]")
    text = text.replace("%k.all: f32[1, 6, new + past, 4]", "%k.all: f32[1, 6, 4, new + past]").replace(
        "{axis=2}", "{axis=3}\n    %keys: f32[1, 6, new + past, 4] = permute_dims(%k.all) {axes=(0, 1, 3, 2)}"
    )
    text = text.replace("(%q, %k.all,", "(%q, %keys,")
    module = parse(text)
    assert PASS.run(module) == module
