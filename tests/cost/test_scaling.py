"""Scaled profiles: each name changes its figures and no others, and what is wrong is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.network import collective_seconds
from distir_relax.cost.profile import Level, Line, Profile, load_profile, read_profile
from distir_relax.cost.profile_writer import print_profile
from distir_relax.cost.scaling import faster, has, scalable, scale_profile
from distir_relax.errors import ProfileError
from tests.cost.test_profile import SHIPPED

H100 = load_profile("dgx-h100:3")
CPU = load_profile("cpu-local")


def changed(before: Profile, after: Profile) -> dict[str, float]:
    """The ratio of each figure that differs."""
    names = [name for name, figures in scalable(before).items() if figures == (name,)]
    found = {}
    for name in names:
        old, new = figure(before, name), figure(after, name)
        if old != new:
            found[name] = new / old
    return found


def figure(profile: Profile, name: str) -> float:
    """Read a figure by a way of its own: from the tables of the profile's file."""
    table, *rest = name.split(".", 1)
    if table in ("beside", "collective_overhead"):
        return float(getattr(profile, table))
    if table == "level":
        kind, _, key = rest[0].rpartition(".")
        return float(getattr(next(n for n in profile.levels if n.name == kind), key))
    kind, _, key = rest[0].partition(".")
    if table == "collective":
        ranks, _, field = key.partition(".")
        line = next(n for n in profile.lines if (n.collective, str(n.ranks)) == (kind, ranks))
        return float(getattr(line, field))
    if kind in ("matrix", "packed"):
        dtype, _, field = key.partition(".")
        return float(getattr(getattr(profile, kind)[dtype], field))
    if kind == "vector":
        return float(profile.vector[key])
    if kind == "ops":
        dtype, _, op = key.partition(".")
        return float(profile.ops[dtype][op])
    return float(getattr(profile, kind))


def test_a_family_changes_the_rates_of_one_resource() -> None:
    ratios = changed(CPU, scale_profile(CPU, "device.flops=0.5x"))
    assert {name.rpartition(".")[2] for name in ratios if name.startswith("device.matrix")} <= {"flops", "thin"}
    assert {name.split(".")[1] for name in ratios} == {"matrix", "packed", "vector", "ops"}
    assert set(ratios.values()) == {0.5}
    ratios = changed(CPU, scale_profile(CPU, "device.bandwidth=3x"))
    assert all("bandwidth" in name for name in ratios)
    assert ratios["device.cache_bandwidth"] == pytest.approx(3)
    after = scale_profile(H100, "network.bandwidth=2x")
    assert [new.bandwidth / old.bandwidth for new, old in zip(after.levels, H100.levels, strict=True)] == [2, 2]
    assert changed(H100, scale_profile(H100, "device.overhead=4x")).keys() <= {
        "device.overhead", "runtime.dispatch", "runtime.view",
    }  # fmt: skip


def test_a_level_changes_by_its_own_name_and_one_called_network_by_its_full_name() -> None:
    after = scale_profile(H100, "InfiniBand.bandwidth=2x,NVSwitch.latency=0.5x")
    assert changed(H100, after) == {"level.InfiniBand.bandwidth": 2, "level.NVSwitch.latency": 0.5}
    odd = replace(H100, levels=(Level("network", 4, 1e-6, 1e9), Level("outer.most", 64, 1e-5, 1e8)))
    assert changed(odd, scale_profile(odd, "level.network.bandwidth=7x")) == {"level.network.bandwidth": 7}
    assert len(changed(odd, scale_profile(odd, "network.bandwidth=7x"))) == 2
    assert changed(odd, scale_profile(odd, "outer.most.latency=3x")) == {"level.outer.most.latency": 3}


def test_values_have_units_and_take_their_family_along() -> None:
    assert scale_profile(H100, "device.memory=40GB").memory == 40e9
    assert scale_profile(H100, "NVSwitch.latency = 3us").levels[0].latency == pytest.approx(3e-6)
    assert scale_profile(H100, "NVSwitch.bandwidth=25GB/s").levels[0].bandwidth == pytest.approx(25e9)
    assert scale_profile(H100, "runtime.dispatch=2.5e-6").dispatch == pytest.approx(2.5e-6)
    assert scale_profile(replace(H100, view=0.0), "runtime.view=1us").view == 1e-6
    assert scale_profile(H100, "device.overhead=0,beside=0").overhead == 0.0
    own = replace(H100, shape_op=4e-6, view=2e-6)
    assert faster(own, ("runtime.times",), 2.0) == replace(own, dispatch=own.dispatch / 2, view=1e-6, shape_op=2e-6)
    cached = scale_profile(H100, "device.cache=4MB,device.cache_bandwidth=5TB/s")
    assert (cached.cache, cached.cache_bandwidth) == (4e6, 5e12)
    unlike = replace(H100, groups=(Group(((1, 1),), 1.0, 20e9), Group(((2, 2),), 0.5)))
    halved = scale_profile(unlike, f"device.memory={unlike.memory / 2:.0f}")
    assert halved.groups[0].memory == pytest.approx(10e9)
    assert halved.groups[1].memory is None
    after = scale_profile(CPU, "device.bandwidth=40GB/s")
    ratio = after.bandwidth / CPU.bandwidth
    assert after.cache_bandwidth == pytest.approx(CPU.cache_bandwidth * ratio)


def test_the_items_apply_in_turn_and_name_the_machine() -> None:
    after = scale_profile(H100, "device.flops=2x, device.vector.float32=2x")
    assert after.vector["float32"] == pytest.approx(4 * H100.vector["float32"])
    assert after.name == "dgx-h100 with device.flops=2x, device.vector.float32=2x"
    assert scale_profile(scale_profile(H100, "network.latency=3x"), "network.latency=1x").levels[0].latency == (
        pytest.approx(3 * H100.levels[0].latency)
    )


def test_of_a_measured_line_latency_and_bandwidth_are_apart() -> None:
    line = Line("all_reduce", 3, 5e-6, 1e-9, ((100.0, 6e-6), (1000.0, 9e-6)))
    before = replace(CPU, lines=(line,), devices=3)
    wide, soon = scale_profile(before, "network.bandwidth=2x"), scale_profile(before, "network.latency=2x")
    both = scale_profile(before, "network.bandwidth=0.5x,network.latency=2x")
    for size in (50.0, 100.0, 700.0, 1000.0, 5000.0):
        old, w, s, b = (collective_seconds(p, "all_reduce", (0, 1, 2), [size]) for p in (before, wide, soon, both))
        assert w == pytest.approx(5e-6 + (old - 5e-6) / 2)
        assert s == pytest.approx(5e-6 + old)
        assert b == pytest.approx(2 * old)


def test_a_line_belongs_to_the_innermost_level_that_holds_its_ranks() -> None:
    lines = (Line("all_reduce", 8, 1e-5, 1e-10), Line("all_reduce", 16, 2e-5, 1e-9))
    before = replace(H100, lines=lines)
    inner = scale_profile(before, "NVSwitch.bandwidth=2x")
    assert [new.seconds_per_byte / old.seconds_per_byte for new, old in zip(inner.lines, lines, strict=True)] == [
        0.5,
        1,
    ]


def test_a_line_may_name_its_level() -> None:
    inner, outer = H100.levels[:2]
    lines = (Line("all_reduce", 2, 1e-5, 1e-10, level=inner.name), Line("all_reduce", 2, 1e-5, 1e-10, level=outer.name))
    scaled = scale_profile(replace(H100, lines=lines), f"{outer.name}.bandwidth=2x")
    assert [line.seconds_per_byte for line in scaled.lines] == [1e-10, 0.5e-10]


@pytest.mark.parametrize("name", SHIPPED)
def test_whatever_is_scaled_is_a_profile_that_can_be_written(name: str) -> None:
    profile = load_profile(name)
    for family in scalable(profile):
        if not has(profile, family) or family in ("beside", "device.overlap"):
            continue
        after = scale_profile(profile, f"{family}=0.7x")
        assert after != replace(profile, name=after.name)
        assert read_profile(print_profile(after)).name == after.name


def test_faster_divides_times_and_multiplies_rates() -> None:
    ratios = changed(CPU, faster(CPU, ("network.bandwidth", "network.latency", "device.flops"), 4.0))
    for name, ratio in ratios.items():
        is_time = name.rpartition(".")[2] in ("latency", "seconds_per_byte", "collective_overhead")
        assert ratio == pytest.approx(0.25 if is_time else 4.0), name
    assert faster(H100, ("nothing",), 2.0) == H100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("network.bandwith=2x", "did you mean network.bandwidth"),
        ("flux=2x", "has no figure 'flux'"),
        ("network.bandwidth", "expected NAME=FACTORx or NAME=VALUE, found 'network.bandwidth'"),
        ("", "found ''"),
        ("device.flops=2x,", "found ''"),
        ("device.flops=", "found 'device.flops='"),
        ("device.flops=2", "expected a factor for the figures of device.flops, found '2'"),
        ("device.memory=40GBit", "a size such as 40GB, for device.memory, found '40GBit'"),
        ("device.memory=4us", "found '4us'"),
        ("device.memory=-1x", "found '-1x'"),
        ("device.memory=nanx", "found 'nanx'"),
        ("device.memory=1e400x", "expected a factor from 1e-15 to 1e15"),
        ("device.memory=0x", "expected a factor from 1e-15 to 1e15"),
        ("device.memory=0", "expected device.memory from"),
        ("NVSwitch.bandwidth=0", "expected level.NVSwitch.bandwidth from"),
        ("device.vector.float32=0", "expected device.vector.float32 from"),
        ("device.matrix.float16.flops=1e40", "expected device.matrix.float16.flops from"),
        ("device.cache=4MB", "expected the bandwidth of a cache"),
        ("beside=2x", "expected beside from 0 to 1, found 2"),
        ("runtime.view=2x", "is 0, which no factor changes"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ProfileError) as error:
        scale_profile(H100, text)
    assert message in str(error.value)
