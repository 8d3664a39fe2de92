"""Keys and values that are views of growing states with their new elements, and look-alikes that are not."""

from __future__ import annotations

import pytest

from distir_relax.ir import parse
from distir_relax.lowering.emit.cached_operands import cached_operands

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
STATES, GROWING = {"k.past": "k.next", "v.past": "v.next"}, {"k.past": 2, "v.past": 1}


def test_keys_by_head_and_values_by_token() -> None:
    found = cached_operands(parse(TEXT).main, STATES, GROWING)
    keys, values = found["y"]
    assert keys.arguments == ("k.past", 2, None, None)
    assert values.arguments == ("v.past", 1, (1, -1, 6, 4), (0, 2, 1, 3))
    assert (keys.new.name, values.new.name) == ("k", "v")
    assert [op.results[0].name for op in values.replaced] == ["v.all", "view", "values"]


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
        # The keys are not appended to the state as it was.
        ('"k.next": %k.all', '"k.next": %k.past'),
    ],
)  # fmt: skip
def test_look_alikes(before: str, after: str) -> None:
    assert before in TEXT
    assert not cached_operands(parse(TEXT.replace(before, after)).main, STATES, GROWING)


def test_states_that_do_not_grow() -> None:
    assert not cached_operands(parse(TEXT).main, STATES, {"k.past": 2})


def test_keys_whose_last_dim_is_that_of_the_tokens() -> None:
    text = TEXT.replace("%k: f32[1, 6, new, 4]", "%k: f32[1, 6, 4, new]").replace("[1, 6, past, 4]", "[1, 6, 4, past]")
    text = text.replace("%k.all: f32[1, 6, new + past, 4]", "%k.all: f32[1, 6, 4, new + past]").replace(
        "{axis=2}", "{axis=3}\n    %keys: f32[1, 6, new + past, 4] = permute_dims(%k.all) {axes=(0, 1, 3, 2)}"
    )
    text = text.replace("(%q, %k.all,", "(%q, %keys,")
    assert not cached_operands(parse(text).main, STATES, {"k.past": 3, "v.past": 1})
