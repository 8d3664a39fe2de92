"""Symbolic sizes in programs: text, specialization, guards, records."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.errors import DistIRError, ParseError, VerificationError
from distir_relax.ir import BatchDim, OutputAssembly, parse, parse_records, print_module, print_records, verify
from distir_relax.ir.symbols import at_sizes, module_symbols, specialize
from distir_relax.layout import Guard, Symbol, size_of
from distir_relax.ops import check

STAGES = ("global", "sharded", "distributed", "ranked")
B, N = Symbol("batch", 1, None, 3), Symbol("length", 1, 512, 9)
TEXT = """module @distributed {
  mesh[0] = device_mesh((3,), ("data",))
  size length = 1..512 typically 9
  func @main(
    input %x: f32[(length + 2) // 3 | (length + 1) // 3 | length // 3, 4] @ {0,1,2},
  ) {
    %y: f32[length, 4] @ {0,1,2} = all_gather(%x) {axis="data", dim=0, sizes=((length + 2) // 3, (length + 1) // 3, length // 3)}
    return "y": %y
  }
}
"""  # noqa: E501


class Scaled(nn.Module):
    """A perceptron whose result depends on positions, and on the mean over all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x))) + torch.arange(x.shape[1])[:, None]
        return (y - y.mean(0)).reshape(x.shape[0] * x.shape[1], 6)


def compiled(strategy: str, tail: str = "ragged") -> dr.Plan:
    torch.manual_seed(0)
    dynamic = {"x": {0: "batch", 1: dr.Dim("length", max=512)}}
    return dr.compile(
        Scaled().eval(), (torch.randn(3, 9, 6),), dynamic_shapes=dynamic, strategy=strategy, tail=tail, verify=True
    )


def test_the_text_of_sizes() -> None:
    module = parse(TEXT)
    assert print_module(module) == TEXT
    assert module_symbols(module) == {"length": N}
    verify(module, check)


@pytest.mark.parametrize("strategy", ["3/1/1/1", "2/3/1/1", "1/1/2/3"])
def test_every_stage_is_parsed_specialized_and_verified(strategy: str) -> None:
    plan = compiled(strategy)
    for stage in STAGES:
        module = plan.modules[stage]
        assert parse(print_module(module)) == module
        for sizes in ({"batch": 1, "length": 1}, {"batch": 2, "length": 5}, {"length": 512}):
            fixed = specialize(module, sizes)
            verify(fixed, check)
            assert not sizes.keys() & module_symbols(fixed).keys()
        assert module_symbols(at_sizes(module, {})) == {}


@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_a_bound_plan_gives_what_the_model_gives(tail: str) -> None:
    plan = compiled("2/1/1/2", tail)
    torch.manual_seed(0)
    model = Scaled().eval()
    with torch.no_grad():
        for bound, shape in ((plan, (5, 7)), (dr.bind(plan, length=4), (1, 4)), (plan.at(length=1, batch=3), (3, 1))):
            x = torch.randn(*shape, 6)
            torch.testing.assert_close(bound(x), model(x))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"length": 0}, "expected length of at least 1 and at most 512, found 0"),
        ({"lenght": 4}, "no size 'lenght'"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        compiled("1/1/1/1").at(**sizes)


def test_a_guard_is_met_violated_or_kept() -> None:
    guard = Guard(size_of(B), "<", size_of(N), True, "model.py:3")
    plan = compiled("1/1/1/1")
    module = plan.modules["global"]
    guarded = type(module)(module.stage, module.functions, module.meshes, records=(guard,))
    assert specialize(guarded, {"batch": 2, "length": 3}).records == ()
    assert [str(g) for g in specialize(guarded, {"length": 3}).records] == ["batch < 3"]
    with pytest.raises(DistIRError, match="expected batch < length, found batch = 3, length = 3") as caught:
        specialize(guarded, {"batch": 3, "length": 3})
    assert caught.value.where == "model.py:3"


def test_records_with_sizes() -> None:
    records = (
        BatchDim("x", 0, 2 * size_of(B)),
        OutputAssembly("y", 24 * size_of(B) * size_of(N), (size_of(N) + 1) // 2),
        Guard(size_of(B), "==", 4, False, "model.py:1"),
    )
    assert parse_records(print_records(records), "", {"batch": B, "length": N}) == records
    with pytest.raises(ParseError, match="size"):
        parse_records(print_records(records))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("size length = 1..512", "size length = 5..3", "expected bounds 0 <= low <= high"),
        ("size length = 1..512 typically 9", "", "there is no size 'length'"),
        ("typically 9", "typically 900", "typical size"),
        ("f32[length, 4]", "f32[length, 4 +]", "expected a size"),
        ("f32[length, 4]", "f32[width, 4]", "there is no size 'width'"),
        ("size length", "size if", "identifier"),
    ],
)
def test_texts_that_are_none(old: str, new: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse(TEXT.replace(old, new, 1))


def test_shards_that_do_not_add_up() -> None:
    module = parse(TEXT.replace("sizes=((length + 2) // 3, ", "sizes=(", 1))
    with pytest.raises(VerificationError):
        verify(module, check)


@pytest.mark.parametrize(
    "size", ["(n + 1) // 4 - min(2*((n + 3) // 4), n)", "(n + 1) // 2", "min(n, 3)", "max(1, n) + 2"]
)
def test_a_size_is_an_attribute_although_it_has_commas(size: str) -> None:
    text = (
        "module @ranked {\n  size n = 1..64\n  func @main(\n    input %x: f32[n],\n  ) {\n"
        f"    %y: f32[n] = made_up(%x) {{size={size}, shape=({size}, 3), both=(n, {size})}}\n"
        '    return "y": %y\n  }\n}\n'
    )
    module = parse(text)
    attrs = module.main.ops[0].attrs
    assert attrs["shape"] == (attrs["size"], 3)
    assert attrs["both"][1] == attrs["size"]  # type: ignore[index]
    assert parse(print_module(module)) == module
