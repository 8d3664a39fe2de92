"""Every program is what its text says: printing and parsing round-trip, at all four stages."""

from __future__ import annotations

import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from distir_relax.errors import ParseError, PlacementError
from distir_relax.ir import (
    STAGES,
    DTensorType,
    Function,
    Input,
    Module,
    Op,
    Output,
    PerRank,
    PlacedType,
    TensorType,
    Value,
    parse,
    print_module,
)
from distir_relax.ir.program import ROLES
from distir_relax.layout import (
    DTYPES,
    REDUCTIONS,
    Cut,
    DeviceMesh,
    Partial,
    R,
    Segment,
    Shard,
    parse_placement,
    parse_placements,
    print_placements,
)

words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}(\.[A-Za-z0-9_]{1,4}){0,2}", fullmatch=True)
numbers = st.integers(0, 2**40)
places = st.sampled_from(["", "model.py:12", 'shardings["layers.*"]', "a # b", "(x) {y} %z"])
per_ranks = st.lists(st.integers(-5, 2**40), min_size=2, max_size=20).map(lambda n: PerRank(tuple(n)))
attributes = st.recursive(
    st.one_of(
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.booleans(),
        st.none(),
        st.text(),
        per_ranks,
    ),
    lambda items: st.lists(items, max_size=4).map(tuple),
    max_leaves=8,
)
dtypes = st.sampled_from(sorted(DTYPES))
shapes = st.lists(numbers, max_size=4).map(tuple)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    ranks = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 500), min_size=ranks, max_size=ranks).map(tuple)
    segments = draw(st.lists(st.builds(Segment, st.integers(1, 5), sizes), min_size=1, max_size=3))
    return Cut(tuple(segments))


placements = st.one_of(
    st.just(R),
    st.builds(Partial, st.sampled_from(REDUCTIONS)),
    st.builds(Shard, st.integers(0, 5), st.one_of(st.none(), cuts())),
    st.builds(Shard, st.integers(0, 5), st.none(), st.just(True)),
)


@st.composite
def types(draw: st.DrawFn, stage: str) -> TensorType | DTensorType | PlacedType:
    if stage == "sharded":
        laid_out = draw(st.lists(placements, min_size=1, max_size=3))
        return DTensorType(draw(shapes), draw(dtypes), tuple(laid_out), draw(st.integers(0, 3)))
    if stage == "distributed":
        devices = tuple(sorted(draw(st.sets(st.integers(0, 20), min_size=2, max_size=12))))
        sizes = st.lists(numbers, min_size=len(devices), max_size=len(devices)).map(lambda n: PerRank(tuple(n)))
        return PlacedType(tuple(draw(st.lists(st.one_of(numbers, sizes), max_size=3))), draw(dtypes), devices)
    return TensorType(draw(shapes), draw(dtypes))


@st.composite
def functions(draw: st.DrawFn, stage: str, name: str) -> Function:
    names = iter(draw(st.lists(words, min_size=12, max_size=12, unique=True)))
    inputs = tuple(
        Input(Value(next(names), draw(types(stage))), draw(st.sampled_from(ROLES)), draw(places))
        for _ in range(draw(st.integers(0, 3)))
    )
    known = [item.value for item in inputs]
    ops = []
    for _ in range(draw(st.integers(0, 3))):
        operands = tuple(draw(st.lists(st.sampled_from(known), max_size=3))) if known else ()
        results = tuple(Value(next(names), draw(types(stage))) for _ in range(draw(st.integers(1, 3))))
        attrs = draw(st.dictionaries(words, attributes, max_size=3))
        ops.append(Op(draw(words), operands, results, attrs, draw(places)))
        known += results
    outputs = draw(st.lists(st.builds(Output, st.text(), st.sampled_from(known)), max_size=2)) if known else []
    return Function(name, inputs, tuple(ops), tuple(outputs))


@st.composite
def modules(draw: st.DrawFn, stage: str) -> Module:
    names = draw(st.lists(words, min_size=1, max_size=2, unique=True))
    axes = st.lists(st.text(min_size=1, max_size=3), min_size=2, max_size=2, unique=True).map(tuple)
    meshes = st.builds(DeviceMesh, st.tuples(st.integers(1, 9), st.integers(1, 9)), axes)
    return Module(
        stage,
        tuple(draw(functions(stage, name)) for name in names),
        tuple(draw(st.lists(meshes, max_size=2))),
        tuple(draw(st.lists(st.sampled_from(names), max_size=3))) if stage == "ranked" else (),
    )


@pytest.mark.parametrize("stage", STAGES)
@given(data=st.data())
# Shrinking a whole program takes minutes, and the drawn ones are small.
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_a_program_is_what_its_text_says(stage: str, data: st.DataObject) -> None:
    module = data.draw(modules(stage))
    assert parse(print_module(module)) == module


def program(*lines: str) -> str:
    return "\n".join(["module @global {", "  func @main(", "    input %x: f32[4],", "  ) {", *lines, "  }", "}"])


def attribute(text: str) -> object:
    module = parse(program(f"    %y: f32[4] = op(%x) {{a={text}}}", '    return "y": %y'))
    return module.main.ops[0].attrs["a"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-inf", -math.inf),
        ("1e-05", 1e-5),
        ("-3", -3),
        ("-0.5", -0.5),
        ("(1, (2,), ())", (1, (2,), ())),
        ("[1|2]", PerRank((1, 2))),
        ("[7*3|0]", PerRank((7, 7, 7, 0))),
        ("([1|2], None, True)", (PerRank((1, 2)), None, True)),
        ('"a \\" # b"', 'a " # b'),
    ],
)
def test_spellings_of_attributes(text: str, value: object) -> None:
    assert attribute(text) == value
    assert type(attribute(text)) is type(value)


def test_nan_is_read() -> None:
    found = attribute("nan")
    assert isinstance(found, float)
    assert math.isnan(found)


def test_remarks_are_not_part_of_the_program() -> None:
    value = Value("x", TensorType((4,), "float32"))
    module = Module("global", (Function("main", (Input(value, location="model.py:3"),), (), (Output("y", value),)),))
    noted = print_module(module, note=lambda function, v: f"note on {v} of @{function}")
    assert "# model.py:3 ; note on %x of @main" in noted
    assert parse(noted) == module


def test_the_text_of_each_kind_of_type() -> None:
    cut = Cut((Segment(3, (4, 2)),))
    assert str(DTensorType((8, 18), "float32", (R, Shard(1, cut)), 1)) == (
        'R.DTensor((8, 18), "float32", "mesh[1]", "R, S[1: 3*(4|2)]")'
    )
    assert str(PlacedType((PerRank((4, 2)), 8), "bfloat16", (0, 1))) == "bf16[4|2,8] @ {0,1}"
    assert str(PlacedType((PerRank((2,) * 9 + (1,)),), "int64", tuple(range(10)))) == "i64[2*9|1*1] @ {0..9}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module @nowhere {}", "t.ir:1: expected one of the stages global, .*, found 'nowhere'"),
        (program('    return "y": %z'), "t.ir:5: expected a value defined above, found '%z'"),
        (program("    %x: f32[4] = op(%x)", "    return"), "t.ir:5: expected each value to be defined once"),
        (program("    %y: f33[4] = op(%x)", "    return"), "t.ir:5: expected a dtype, one of f64, .* found 'f33'"),
        (program("    %y: f32[4] = op(%x) {a=?}", "    return"), r"t.ir:5: cannot read '\?"),
        (program("    %y: f32[4] = op(%x) {a=)}", "    return"), "t.ir:5: expected an attribute"),
        (program("    return") + "\nmore", "t.ir:8: expected nothing after the module, found 'more'"),
        ("module @global {", "t.ir:1: expected 'func', found 'the end of the text'"),
        (program("    return").replace("input", "guest"), "t.ir:3: expected one of the roles input, .*, found 'guest'"),
    ],
)
def test_bad_text_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse(text, "t.ir")


@given(st.lists(placements, min_size=1, max_size=4).map(tuple))
def test_placements_round_trip(laid_out: tuple[object, ...]) -> None:
    assert parse_placements(print_placements(laid_out)) == laid_out  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("R", R),
        ("Replicate()", R),
        ("S[1]", Shard(1)),
        ("S(1)", Shard(1)),
        ("Shard(dim=1)", Shard(1)),
        ("S[-1]", Shard(-1)),
        ("S[1: 64 | 63]", Shard(1, Cut.of(64, 63))),
        ("S[0: chunk]", Shard(0, chunk=True)),
        ("S[1: 3*(2|1) + 4|0]", Shard(1, Cut((Segment(3, (2, 1)), Segment(1, (4, 0)))))),
        ("I[sum]", Partial()),
        ("I_SUM", Partial()),
        ("P(max)", Partial("max")),
        ("Partial(sum)", Partial()),
        ("Partial('min')", Partial("min")),
    ],
)
def test_spellings_of_placements(text: str, placement: object) -> None:
    assert parse_placement(text) == placement


@pytest.mark.parametrize("text", ["", "S", "S[]", "S[a]", "S[1: a|b]", "S[1: 2|3 + 4]", "I[product]", "R, R", "X[0]"])
def test_bad_placements_are_refused(text: str) -> None:
    with pytest.raises(PlacementError):
        parse_placement(text)
