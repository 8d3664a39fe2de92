"""Grouped-query attention: keys and values reach torch's kernel before they are repeated, if each head is in a row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.interpret import interpret
from distir_relax.ir import TensorType, parse, verify
from distir_relax.lowering import SkipRepeats
from distir_relax.ops import check, lookup


class Attention(nn.Module):
    """Six query heads, of which `groups` share a key head; in a row, or, if `tiled`, every `heads`-th."""

    def __init__(self, groups: int, tiled: bool = False) -> None:
        super().__init__()
        self.groups, self.tiled = groups, tiled

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        b, h, t, d = x.shape
        if h == 1:
            return x.expand(b, self.groups, t, d)
        if self.tiled:
            return x[:, None].expand(b, self.groups, h, t, d).reshape(b, h * self.groups, t, d)
        return x[:, :, None].expand(b, h, self.groups, t, d).reshape(b, h * self.groups, t, d)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, self.repeated(k), self.repeated(v))


@pytest.mark.parametrize(
    ("groups", "tiled", "ranks", "is_grouped"),
    [(3, False, 1, True), (2, False, 3, True), (3, True, 1, False), (6, False, 1, True), (1, False, 1, False)],
)
def test_attention_of_groups(groups: int, tiled: bool, ranks: int, is_grouped: bool) -> None:
    heads = 6 // groups
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, heads, 7, 4), torch.randn(2, heads, 7, 4)
    model = Attention(groups, tiled)
    shardings = {"k": "S[1]"} if ranks > 1 else {}
    plan = dr.compile(model, (q, k, v), mesh=ranks, shardings=shardings)
    torch.testing.assert_close(plan(q, k, v), model(q, k, v), rtol=1e-5, atol=1e-6)
    programs = [text for name, text in plan.bundle(("torch",)).programs.items() if name.endswith(".py")]
    assert all(("attention.attend(q, k, v" in text) == is_grouped for text in programs)
    assert all(("expand" in text) != is_grouped or groups == 1 for text in programs)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("counts", [(3, 3), (1, 5), (4, 2)])
def test_the_pass_gives_a_valid_program_that_computes_the_same(counts: tuple[int, int], masked: bool) -> None:
    mask = ", %mask" if masked else ""
    module = parse(f"""
module @ranked {{
  mesh[0] = device_mesh((1,), ("x",))
  ranks = (@main_0,)
  func @main_0(
    input %q: f32[2,6,5,4],
    input %k: f32[2,2,7,4],
    input %v: f32[2,2,7,3],
    input %mask: bool[5,7],
  ) {{
    %keys: f32[2,6,7,4] = repeat_elements(%k) {{axis=1, repeats={counts}}}
    %values: f32[2,6,7,3] = repeat_elements(%v) {{axis=1, repeats={counts}}}
    %y: f32[2,6,5,3] = nn.scaled_dot_product_attention(%q, %keys, %values{mask}) {{boolean={masked}, causal=False, dtype="float32", masked={masked}, scale=0.5}}
    return "y": %y
  }}
}}
""")  # noqa: E501
    changed = SkipRepeats().run(module)
    verify(changed, check)
    (op,) = changed.functions[0].ops
    assert op.attrs["grouped"]
    assert op.operands[1].name == "k"
    inputs = {i.value.name: torch.randn(i.value.tensor.shape) for i in module.functions[0].inputs}
    inputs["mask"] = torch.ones(5, 7, dtype=torch.bool).tril(2)
    expected, found = (interpret(m.functions[0], inputs)["y"] for m in (module, changed))
    torch.testing.assert_close(found, expected)


def test_keys_of_another_number_of_heads_are_refused() -> None:
    types = [TensorType((2, 6, 5, 4), "float32"), *[TensorType((2, 2, 7, 4), "float32")] * 2]
    attrs = {"scale": 0.5, "causal": False, "masked": False, "boolean": False, "dtype": "float32"}
    for more in ({}, {"grouped": True, "repeats": (3, 2)}, {"grouped": True, "repeats": (2, 2, 2)}):
        with pytest.raises(ValueError, match="expected query"):
            lookup("nn.scaled_dot_product_attention").semantics.infer(types, {**attrs, **more})
