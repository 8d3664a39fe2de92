"""The verifier accepts good programs and names each broken rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distir_relax.errors import UnsupportedOpError, VerificationError
from distir_relax.ir import Module, Value, parse, verify
from distir_relax.ops import check

GLOBAL = """
module @global {
  func @main(
    input %x: f32[4,6],
    parameter %w: f32[6,3],
  ) {
    %y: f32[4,3] = matmul(%x, %w)  # model.py:7
    return "y": %y
  }
}
"""
SHARDED = """
module @sharded {
  mesh[0] = device_mesh((2, 3), ("dp", "tp"))
  func @main(
    input %x: R.DTensor((4, 6), "float32", "mesh[0]", "S[0: 3|1], R"),
  ) {
    %y: R.DTensor((4, 6), "float32", "mesh[0]", "S[0: 3|1], R") = nn.relu(%x)  # model.py:7
    return "y": %y
  }
}
"""
DISTRIBUTED = """
module @distributed {
  mesh[0] = device_mesh((2,), ("tp",))
  func @main(
    input %x: f32[3|1,6] @ {0,1},
  ) {
    %y: f32[3|1,6] @ {0,1} = nn.relu(%x)  # model.py:7
    return "y": %y
  }
}
"""
RANKED = """
module @ranked {
  mesh[0] = device_mesh((2,), ("tp",))
  ranks = (@main_0, @main_0,)
  func @main_0(
    input %x: f32[3,6],
  ) {
    %y: f32[3,6] = nn.relu(%x)
    return "y": %y
  }
}
"""


@pytest.mark.parametrize("text", [GLOBAL, SHARDED, DISTRIBUTED, RANKED], ids=lambda t: t.split()[1])
def test_good_programs_pass(text: str) -> None:
    verify(parse(text), check)


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (GLOBAL, "%y: f32[4,3] =", "%y: f32[4,4] =", r"model.py:7: matmul gives \(f32\[4,3\]\), but %y is"),
        (GLOBAL, "parameter %w: f32[6,3]", "parameter %w: f32[5,3]", r"matmul cannot take \(f32\[4,6\], f32\[5,3\]\)"),
        (GLOBAL, "f32[6,3]", "f32[6,3] @ {0}", "the global stage has TensorType values, found %w"),
        (SHARDED, "S[0: 3|1], R", "S[0: 3|2], R", "add up to 5, but dim 0 .* has 4"),
        (SHARDED, "S[0: 3|1], R", "S[0: 2|1|1], R", "lists 3 sizes, but the mesh axis has 2 devices"),
        (SHARDED, "S[0: 3|1], R", "S[0: 3|1]", "expected one placement for each of the 2 mesh axes"),
        (SHARDED, "S[0: 3|1], R", "S[2: 3|1], R", r"names dim 2, but a tensor of shape \(4, 6\) has dims 0 to 1"),
        (SHARDED, "S[0: 3|1], R", "S[0], R", "does not say how dim 0 is cut"),
        (SHARDED, "S[0: 3|1], R", "S[0: 3|1], S[0: 2|1|2]", "add up to 5, but dim 0 .* has 4"),
        (SHARDED, '"mesh[0]"', '"mesh[1]"', r"is on mesh\[1\], found 1 meshes"),
        (DISTRIBUTED, "%y: f32[3|1,6]", "%y: f32[2|2,6]", r"model.py:7: nn.relu gives \(f32\[3,6\]\)"),
        (DISTRIBUTED, "input %x: f32[3|1,6]", "input %x: f32[3|1|1,6]", "lists 3 sizes for 2 devices"),
        (DISTRIBUTED, "6] @ {0,1},", "6] @ {1,0},", "devices in ascending order"),
        (RANKED, "@main_0, @main_0", "@main_0, @main_1", r"found no \['main_1'\]"),
        (RANKED, "@main_0, @main_0,", "@main_0,", "each of its 2 ranks, found 1"),
    ],
)
def test_each_broken_rule_is_named(text: str, old: str, new: str, message: str) -> None:
    assert old in text
    with pytest.raises(VerificationError, match=message):
        verify(parse(text.replace(old, new)), check)


def test_rules_that_text_cannot_break() -> None:
    module = parse(GLOBAL)
    main = module.main
    (matmul,) = main.ops

    def broken(**changes: object) -> Module:
        return replace(module, functions=(replace(main, **changes),))  # type: ignore[arg-type]

    with pytest.raises(VerificationError, match="%y is used before it is defined"):
        verify(broken(ops=()))
    with pytest.raises(VerificationError, match="%y is defined twice"):
        verify(broken(ops=(matmul, matmul)))
    lying = replace(matmul, operands=(Value("x", main.inputs[1].value.type), matmul.operands[1]))
    with pytest.raises(VerificationError, match=r"%x is used as f32\[6,3\] but was defined as f32\[4,6\]"):
        verify(broken(ops=(lying,)))
    with pytest.raises(VerificationError, match="stages global"):
        verify(replace(module, stage="parallel"))
    with pytest.raises(VerificationError, match="at least one function"):
        verify(replace(module, functions=()))
    with pytest.raises(VerificationError, match="distinct names"):
        verify(replace(module, functions=(main, main)))


def test_an_unknown_op_has_near_misses() -> None:
    with pytest.raises(UnsupportedOpError, match=r"there is no op 'matmull'.*\n.*did you mean matmul"):
        verify(parse(GLOBAL.replace("= matmul", "= matmull")), check)
