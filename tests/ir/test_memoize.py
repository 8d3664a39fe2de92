"""What is found of programs: kept for the last ones, which are known by their functions and by nothing else."""

from __future__ import annotations

from dataclasses import replace

from distir_relax.ir import Module, memoize, parse
from distir_relax.layout import DeviceMesh

TEXT = """
module @global {
  func @main(
    input %x: f64[127,5],
  ) {
    %h: f64[127,5] = nn.relu(%x)
    return "h": %h
  }
}
"""


def test_the_last_programs_are_known_by_their_functions() -> None:
    asked: list[tuple[Module, int]] = []

    @memoize(3)
    def size(module: Module, times: int = 1) -> list[int]:
        asked.append((module, times))
        return [times * len(module.main.ops)]

    first = parse(TEXT)
    found = size(first)
    assert found == [1]
    assert size(first) is found
    # Where it is to run is none of what it does.
    assert size(replace(first, meshes=(DeviceMesh((3,), ("dp",)),))) is found
    assert len(asked) == 1
    assert size(first, 7) == [7]
    assert size(first, times=7) == [7]
    assert len(asked) == 3

    # One that is equal to it is another, and so is one of more functions, the first of which are the same.
    equal = parse(TEXT)
    assert equal == first
    assert size(equal) == found
    assert size(equal) is not found
    more = replace(first, functions=(*first.functions, *first.functions))
    assert size(more) == [1]
    assert len(asked) == 5
    # So three others came since.
    assert size(first) == [1]
    assert len(asked) == 6
