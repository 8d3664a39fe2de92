"""Machine profiles: what ships can be read, what is written reads back, and what is wrong is said."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from distir_relax.cost.profile import Level, Line, Matrix, load_profile, read_profile
from distir_relax.cost.profile_writer import print_profile
from distir_relax.cost.roofline import cache_of, op_seconds, op_work, uncached_share, work_seconds
from distir_relax.errors import ProfileError
from distir_relax.ir import TensorType
from distir_relax.ops import lookup
from tests.machines import machine

SHIPPED = sorted(
    f.name.removesuffix(".toml")
    for f in resources.files("distir_relax.cost.profiles").iterdir()
    if f.name.endswith(".toml")
)
SMALL = """
name = "small"
devices = 3

[device]
memory = 1e9
bandwidth = 1e10
overhead = 0

[device.matrix.float32]
flops = 1e12
half_rows = 3

[device.vector]
float32 = 1e11

[[level]]
name = "bus"
size = 4
latency = 1e-6
bandwidth = 1e9
"""


@pytest.mark.parametrize("name", SHIPPED)
def test_every_profile_that_ships_is_read_and_written(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.devices >= 1
    assert [level.size for level in profile.levels] == sorted(level.size for level in profile.levels)
    assert read_profile(print_profile(profile)) == profile


def test_machines_of_the_paper_and_of_today_ship() -> None:
    assert {"dgx2-v100", "dgx-a100", "dgx-h100"} <= set(SHIPPED)


def test_all_that_a_profile_has_is_written() -> None:
    profile = replace(
        machine(
            7, (Level("a", 2, 1e-6, 3e9, overlaps=False), Level("b", 8, 2e-6, 1e9)), bandwidth=1.5e9, overhead=1e-6
        ),
        matrix={"float32": Matrix(1e12, 3.0, 5.0, 7.0, tile=64.0), "int8": Matrix(2e12)},
        products={"float32": {"nn.scaled_dot_product_attention": Matrix(3e11, 5.0, 7.0, call=3e-5)}},
        calls={"float32": {"nn.gelu": 7e-6, "add": 0.0}},
        call=2e-6,
        lines=(
            Line("all_reduce", 3, 1e-5, 2.5e-10),
            Line("all_reduce", 3, 1e-6, 2e-10, ((4.0, 1e-6), (700.0, 3e-6)), recorded=True),
            Line("send", 2, 1e-6, 1e-10),
            Line("send", 2, 1e-6, 1e-10, level="b"),
        ),
        overlap=2.5,
        dispatch=8e-6,
        view=1e-6,
        shape_op=2e-5,
        waits=frozenset({"send", "shape_op"}),
        in_place=False,
        caching_allocator=True,
        cache=4e6,
        cache_bandwidth=9e9,
        collective_overhead=3e-6,
        beside=0.25,
    )
    text = print_profile(profile, "two\n\nlines")
    assert text.startswith("# two\n#\n# lines\nname = ")
    assert read_profile(text) == profile
    assert read_profile(print_profile(replace(profile, overlap=math.inf))).overlap == math.inf


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(SMALL)
    profile = load_profile(tmp_path / "own.toml")
    assert (profile.name, profile.devices, profile.matrix["float32"].half_rows) == ("small", 3, 3.0)
    assert load_profile(str(tmp_path / "own.toml")) == profile
    (tmp_path / "own.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match=r"own.toml:1: not UTF-8"):
        load_profile(tmp_path / "own.toml")


def test_a_number_of_nodes() -> None:
    assert load_profile("dgx-h100").devices == 8
    assert load_profile("dgx-h100:5").devices == 40
    assert load_profile("dgx-a100:1") == load_profile("dgx-a100")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dgx-h1000", "there is no profile 'dgx-h1000'"),
        ("none/own.toml", "none/own.toml: there is no such file"),
        ("dgx-h100:0", "expected a number of nodes after the colon, found '0'"),
        ("dgx-h100:two", "expected a number of nodes after the colon, found 'two'"),
        ("dgx-h100:" + "9" * 5000, "expected a number of nodes after the colon, found '999"),
        ("dgx-h100:\N{SUPERSCRIPT TWO}", "expected a number of nodes after the colon"),
        ("dgx-h100:", "expected a number of nodes after the colon, found ''"),
        ("", "there is no profile ''"),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    with pytest.raises(ProfileError) as raised:
        load_profile(name)
    assert message in str(raised.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError) as raised:
        load_profile("dgx3")
    assert raised.value.hint == f"profiles are {', '.join(SHIPPED)}, or give a .toml file"


def test_a_line_of_an_unknown_level_is_refused() -> None:
    line = '[[collective]]\nname = "send"\nranks = 2\nlatency = 1e-6\nseconds_per_byte = 1e-9\nlevel = "rack"\n'
    with pytest.raises(ProfileError, match=r"expected the name of a \[\[level\]\], found 'rack'"):
        read_profile(SMALL + line)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices = 3", "devices =", "own: not TOML: "),
        ("devices = 3", "", "expected a positive number 'devices' in []"),
        ("devices = 3", "devices = 0", "expected a positive number 'devices' in [], found 0"),
        ("devices = 3", "devices = inf", "expected a positive number 'devices' in [], found inf"),
        ("devices = 3", "devices = 2.5", "expected a whole number 'devices' in [] of at most 1,048,576, found 2.5"),
        ("devices = 3", "devices = 3\nbeside = 1.5", "expected a number from 0 to 1 'beside', found 1.5"),
        ("bandwidth = 1e9", "bandwidth = 1e9\noverlaps = 0", "expected true or false as 'overlaps', found 0"),
        ("devices = 3", "devices = 3\nbeside = nan", "expected a number from 0 to 1 'beside', found nan"),
        ("devices = 3", "devices = 3\nbeside = 'no'", "expected a number from 0 to 1 'beside', found 'no'"),
        ("memory = 1e9", "", "expected a positive number 'memory' in [device], found None"),
        ("memory = 1e9", "memory = -1", "expected a positive number 'memory' in [device], found -1"),
        ("memory = 1e9", "memory = true", "expected a positive number 'memory' in [device], found True"),
        ("devices = 3", "devices = 1" + "0" * 400, "'devices' in [], found 1000"),
        ("devices = 3", "devices = 0x1" + "0" * 5000, "'devices' in [], found a number of 20001 bits"),
        ("devices = 3", "devices = 1" + "0" * 5000, "own: not TOML: Exceeds the limit"),
        ("devices = 3", "devices = 99999999", "of at most 1,048,576, found 99999999.0"),
        ("devices = 3", "devices = " + "[" * 5000 + "]" * 5000, "own:3: nested deeper than 64"),
        ("devices = 3", ".".join("d" * 9999) + " = 3", "own:3: expected keys of at most 64 parts"),
        ("devices = 3", "devices = [[[[[[[[1]]]]]]]]", "'devices' in [], found [[["),
        ("name = ", "name = 3 #", "expected text 'name', found 3"),
        ("latency = 1e-6", "latency = inf", "expected a number of at least 0 'latency' in [level], found inf"),
        ("latency = 1e-6", "latency = 1e300", "(between 1e-30 and 1e+30) 'latency' in [level], found 1e+300"),
        ("memory = 1e9", "memory = nan", "expected a positive number 'memory' in [device], found nan"),
        ("bandwidth = 1e10", 'bandwidth = "fast"', "'bandwidth' in [device], found 'fast'"),
        ("overhead = 0", "overhead = 0\noverlap = 'much'", "'overlap' in [device], found 'much'"),
        (
            "overhead = 0",
            "overhead = 0\noverlap = 0.5",
            "expected a number of at least 1 'overlap' in [device], found 0.5",
        ),
        (
            "overhead = 0",
            "overhead = 0\ndispatch = 1e-6",
            "unknown key 'dispatch' in [device]\n  hint: known are kind, ",
        ),
        ("[[level]]", "[runtime]\ndispatch = []\n[[level]]", "'dispatch' in [runtime], found []"),
        ("[[level]]", "[runtime]\nview = -1\n[[level]]", "at least 0 'view' in [runtime], found -1"),
        ("[[level]]", "[runtime]\nin_place = 1\n[[level]]", "expected true or false as 'in_place', found 1"),
        (
            "[[level]]",
            "[runtime]\nissue = 1\n[[level]]",
            "unknown key 'issue' in [runtime]\n  hint: known are dispatch, ",
        ),
        (
            "[[level]]",
            "[runtime]\nwaits = ['sends']\n[[level]]",
            "expected a list 'waits' in [runtime], found ['sends']\n  hint: ops are shape_op, all_reduce, ",
        ),
        ("[[level]]", "[runtime]\nwaits = 'send'\n[[level]]", "'waits' in [runtime], found 'send'"),
        ("overhead = 0", "overhead = 0\ncache = 1e6", "'cache_bandwidth' in [device]"),
        ("[device.matrix.float32]\nflops = 1e12\nhalf_rows = 3", "", "expected a table [device.matrix]"),
        ("flops = 1e12", "", "expected a positive number 'flops' in [device.matrix.float32]"),
        ("half_rows = 3", "half_rows = -1", "at least 0 'half_rows' in [device.matrix.float32], found -1"),
        (
            "half_rows = 3",
            "half_row = 3",
            "unknown key 'half_row' in [device.matrix.float32]\n  hint: known are flops, half_rows",
        ),
        ("[device.matrix.float32]", "[device.matrix]", "expected a table [device.matrix.flops]"),
        ("[device.vector]\nfloat32 = 1e11", "", "expected a table [device.vector]"),
        ("float32 = 1e11", "float32 = 0", "'float32' in [device.vector], found 0"),
        (SMALL[SMALL.index("[[level]]") :], "", "at least one [[level]] of links"),
        ("[[level]]", "[level]", "expected tables [[level]]"),
        ("latency = 1e-6\n", "", "expected a number of at least 0 'latency' in [level], found None"),
        ("size = 4\n", "", "expected a positive number 'size' in [level], found None"),
        ("[[level]]", "[collective]\nranks = 2\n[[level]]", "expected tables [[collective]]"),
        ("[[level]]", "[[collective]]\nname = 'send'\n[[level]]", "'ranks' in [collective]"),
    ],
)
def test_each_mistake_is_named(old: str, new: str, message: str) -> None:
    assert old in SMALL
    read_profile(SMALL)
    with pytest.raises(ProfileError) as raised:
        read_profile(SMALL.replace(old, new), "own")
    assert message in str(raised.value)
    assert raised.value.where.split(":")[0] == "own"


@pytest.mark.parametrize(("causal", "masked", "keys"), [(False, False, 58), (True, False, 29), (False, True, 29)])
def test_attention_of_a_cpu_is_a_product_without_what_its_mask_hides(causal: bool, masked: bool, keys: int) -> None:
    q = TensorType((3, 5, 57, 16), "float32")
    mask = (TensorType((1, 1, 57, 57), "bool"),) if masked else ()
    attrs = {"scale": 0.25, "causal": causal, "masked": masked, "boolean": masked}
    entry = lookup("nn.scaled_dot_product_attention")
    own = {"float32": {entry.name: Matrix(1e9, half_rows=6.0, bandwidth=1e8)}}
    profile = replace(machine(1), products=own, overlap=1.0)
    moved = sum(t.bytes for t in (q, q, q, *mask, q))
    expected = 15 * 2 * (57 + 6) * min(keys, 57) * 32 / 1e9 + moved / 1e8
    assert op_seconds(profile, entry, (q, q, q, *mask), attrs, (q,)) == pytest.approx(expected)
    # One new position attends to all before it.
    new = TensorType((3, 5, 1, 16), "float32")
    mask = (TensorType((1, 1, 1, 57), "bool"),) if masked else ()
    moved = sum(t.bytes for t in (new, q, q, *mask, new))
    expected = 15 * 2 * (1 + 6) * 57 * 32 / 1e9 + moved / 1e8
    one = {**attrs, "causal": False}
    assert op_seconds(profile, entry, (new, q, q, *mask), one, (new,)) == pytest.approx(expected)


def test_the_roofline() -> None:
    """An op takes the longer of computing and moving, and its overhead; products are slower where they are small."""
    x = TensorType((1000, 1000), "float32")
    profile = replace(machine(1, flops=1e12, bandwidth=1e10), overhead=1e-3)
    # 12 MB at 10 GB/s is more than a million additions.
    assert op_seconds(profile, lookup("add"), (x, x), {}, (x,)) == pytest.approx(1e-3 + 12e6 / 1e10)
    fast = replace(profile, bandwidth=1e15)
    assert op_seconds(fast, lookup("add"), (x, x), {}, (x,)) == pytest.approx(1e-3 + 1e6 / 1e12)
    assert op_seconds(fast, lookup("matmul"), (x, x), {}, (x,)) == pytest.approx(1e-3 + 2e9 / 1e12)
    slow = replace(fast, matrix={"float32": Matrix(1e12, 1000.0, 0.0, 500.0)})
    assert op_seconds(slow, lookup("matmul"), (x, x), {}, (x,)) == pytest.approx(1e-3 + 2 * 2 * 1.5 * 1e9 / 1e12)
    # Row by row where that is less: of 10 rows, not of 1000.
    thin = replace(fast, matrix={"float32": Matrix(1e12, 1000.0, thin=1e11, bandwidth=1e9)})
    row = TensorType((10, 1000), "float32")
    assert op_seconds(thin, lookup("matmul"), (row, x), {}, (row,)) == pytest.approx(1e-3 + 2e7 / 1e11)
    assert op_seconds(thin, lookup("matmul"), (x, x), {}, (x,)) == pytest.approx(1e-3 + 2 * 2e9 / 1e12)
    # Of a batch the first product takes as long as alone, each other as its whole tiles: 64 x 128 for 10 x 100.
    many = replace(fast, matrix={"float32": Matrix(1e12, 100.0, 900.0, tile=64.0)})
    a, b, c = (TensorType(shape, "float32") for shape in ((7, 10, 50), (7, 50, 100), (7, 10, 100)))
    expected = 2 * 50 * (110 * 1000 + 6 * 64 * 128) / 1e12
    assert op_seconds(many, lookup("matmul"), (a, b), {}, (c,)) == pytest.approx(1e-3 + expected)
    a, b, c = (TensorType(shape, "float32") for shape in ((7, 3, 50), (7, 50, 5), (7, 3, 5)))
    small = replace(fast, matrix={"float32": Matrix(1e12, 1.0, 2.0, tile=64.0)})
    expected = 7 * 2 * 50 * 4 * 7 / 1e12
    assert op_seconds(small, lookup("matmul"), (a, b), {}, (c,)) == pytest.approx(1e-3 + expected), (
        "no longer than alone"
    )
    far = op_seconds(thin, lookup("matmul"), (row, x), {}, (row,), cold=(False, True, False))
    assert far == pytest.approx(1e-3 + 4e6 / 1e9), "a product reads what is in no cache more slowly"
    both = replace(profile, overlap=1.0)
    assert op_seconds(both, lookup("add"), (x, x), {}, (x,)) == pytest.approx(1e-3 + 12e6 / 1e10 + 1e6 / 1e12)
    cached = replace(profile, cache=12e6, cache_bandwidth=1e11)
    assert op_seconds(cached, lookup("add"), (x, x), {}, (x,)) == pytest.approx(1e-3 + 12e6 / 1e11)
    # Of 8 MB that are read the half is in no cache, nor is what is written.
    half = op_seconds(cached, lookup("add"), (x, x), {}, (x,), cold=(True, False, True))
    assert half == pytest.approx(1e-3 + 8e6 / 1e10 + 4e6 / 1e11)
    assert [uncached_share(used, 8e6) for used in (0.0, 4e6, 10e6, 16e6, 1e9)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert uncached_share(cache_of(10e6) * 1.25, cache_of(10e6)) == 0.5
    work = op_work(lookup("add"), (x, x), {}, (x,), cold=(True, False, True), share=0.25)
    assert (work.moved, work.uncached) == (12e6, 8e6)
    near = 1e-3 + 12e6 / 1e11
    assert work_seconds(cached, work) == pytest.approx(0.25 * half + 0.75 * near), "a quarter of such ops reads memory"
    # Python calls an op, unless it is in a list of native calls; a product has figures of its own.
    called = replace(fast, call=3.0, calls={"float32": {"add": 5.0}}, python=7.0, ops={"float32": {"add": 1e12}})
    assert op_seconds(called, lookup("add"), (x, x), {}, (x,)) == pytest.approx(12.0 + 1e-3 + 1e6 / 1e12)
    assert op_seconds(called, lookup("subtract"), (x, x), {}, (x,)) == pytest.approx(10.0 + 1e-3 + 1e6 / 1e12)
    recorded = op_work(lookup("add"), (x, x), {}, (x,), recorded=True)
    assert work_seconds(called, recorded) == pytest.approx(1e-3 + 1e6 / 1e12)
    by_python = op_work(lookup("tanh"), (x,), {}, (x,), recorded=True)
    assert work_seconds(called, by_python) == pytest.approx(10.0 + 1e-3 + 1e6 / 1e12)
    held = replace(profile, dispatch=1.0)
    assert op_seconds(held, lookup("add"), (x, x), {}, (x,)) == 1.0
    turned = TensorType((1000, 1000), "float32")
    assert op_seconds(profile, lookup("permute_dims"), (x,), {"axes": (1, 0)}, (turned,)) == 0.0
    empty = TensorType((0, 5), "float32")
    assert op_seconds(profile, lookup("add"), (empty, empty), {}, (empty,)) == 1e-3


def test_a_dtype_that_a_profile_does_not_know_is_as_slow_as_its_slowest() -> None:
    profile = replace(machine(1), vector={"float32": 4.0, "float16": 8.0})
    assert profile.rate(profile.vector, "float16") == 8.0
    assert profile.rate(profile.vector, "int64") == 4.0
    matrices = {"float32": Matrix(3.0), "float16": Matrix(9.0)}
    assert profile.rate(matrices, "float64") == Matrix(3.0)


UNLIKE = (
    SMALL.replace("devices = 3", "devices = 16")
    + """
[[group]]
devices = "4-7, 12"
speed = 0.5
memory = 5e8

[[group]]
devices = "0"
speed = 2
"""
)


def test_devices_may_be_unlike() -> None:
    profile = read_profile(UNLIKE)
    assert read_profile(print_profile(profile)) == profile
    kinds = [(2.0, 1e9), *[(1.0, 1e9)] * 3, *[(0.5, 5e8)] * 4, *[(1.0, 1e9)] * 4, (0.5, 5e8), *[(1.0, 1e9)] * 3]
    assert profile.device_specs(16) == kinds
    assert [(profile.speed_of(d), profile.memory_of(d)) for d in range(16)] == kinds
    assert [str(group) for group in profile.groups] == ["4-7, 12", "0"]
    for count in (1, 5, 13):
        assert profile.without(count).device_specs(16 - count) == kinds[count:]


def test_a_slow_device_computes_and_moves_data_slowly_and_is_called_as_fast() -> None:
    profile = replace(machine(bandwidth=1e9, overhead=3.0), overlap=1.0)
    kinds = [TensorType((5, 7), "float32"), TensorType((7, 3), "float32")]
    times = [
        op_seconds(profile, lookup("matmul"), kinds, {}, [TensorType((5, 3), "float32")], speed=speed)
        for speed in (1.0, 0.5, 0.25)
    ]
    assert [t - 3.0 for t in times] == pytest.approx([(times[0] - 3.0) * n for n in (1, 2, 4)])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"4-7, 12"', '"4-7, 16"', "names device 16, the machine has 16"),
        ('"4-7, 12"', '"0-4"', "device 0 is named twice"),
        ('"4-7, 12"', '"7-4"', "expected the numbers of devices"),
        ('"4-7, 12"', '"four"', "expected the numbers of devices"),
        ('"4-7, 12"', "4", 'devices = "4-7, 12"'),
        ("speed = 2", "speed = 0", "expected a positive number 'speed'"),
        ("speed = 2", "sped = 2", "unknown key 'sped'"),
        ("memory = 5e8", 'memory = "much"', "expected a positive number 'memory'"),
    ],
)
def test_what_is_wrong_with_unlike_devices_is_said(old: str, new: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read_profile(UNLIKE.replace(old, new))
