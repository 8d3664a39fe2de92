"""Groups that share uplinks, by hand: one NIC a node, tapered trees, uneven units, axes of meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from distir_relax.cost.network import collective_seconds, collective_timing
from distir_relax.cost.profile import Level, load_profile, read_profile
from distir_relax.cost.profile_writer import print_profile
from distir_relax.cost.scaling import has, scalable, scale_profile
from distir_relax.errors import ProfileError
from distir_relax.layout import DeviceMesh
from distir_relax.simulation.device_classes import axis_groups
from tests.machines import machine

# Devices of a node have 64 bytes a second to each other, 8 to other nodes, and share 4.
NET = Level("net", 1 << 20, 10.0, 8.0)
PAIR = (Level("node", 2, 1.0, 64.0, uplink=4.0), NET)
NODE = (Level("node", 3, 1.0, 64.0, uplink=4.0), NET)
OWN = (Level("node", 3, 1.0, 64.0), NET)
TAPERED = (Level("node", 2, 1.0, 64.0, uplink=16.0), Level("leaf", 6, 4.0, 8.0, uplink=12.0), NET)
"""Nodes of 2 with all that their devices can send, 3 of them at a leaf with a quarter of that to the spine."""

Groups = Sequence[Sequence[int]]


def along(shape: tuple[int, ...], axis: str) -> Groups:
    mesh = DeviceMesh(shape, tuple("abc"[: len(shape)]))
    groups: Groups = axis_groups(mesh, axis, tuple(range(mesh.size))).tolist()
    return groups


def one(count: int) -> Groups:
    return [list(range(count))]


ACROSS = [[0, 3], [1, 4], [2, 5]]
THREE = [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize(
    ("levels", "groups", "name", "size", "expected"),
    [
        # Sends: over a device's own link, a shared one, and with others.
        (OWN, [[0, 3]], "send", 16, 10 + 16 / 8),
        (NODE, [[0, 3]], "send", 16, 10 + 16 / 4),
        (NODE, [[0, 1]], "send", 16, 1 + 16 / 64),
        (PAIR, [[0, 2], [1, 3]], "send", 16, 10 + 2 * 16 / 4),
        (NODE, ACROSS, "send", 16, 10 + 3 * 16 / 4),
        (OWN, ACROSS, "send", 16, 10 + 16 / 8),
        # Opposite directions do not share, two receivers in a unit do, and a unit that others use does not count.
        (NODE, [[0, 3], [4, 1]], "send", 16, 10 + 16 / 4),
        (PAIR, [[0, 4], [2, 5]], "send", 16, 10 + 2 * 16 / 4),
        (PAIR, [[0, 6], [2, 4], [3, 5]], "send", 16, 10 + 16 / 4),
        (NODE, [[0, 1], [2, 3], [5, 6]], "send", 16, 1 + 16 / 64),
        # All-reduces of two, by doubling.
        (PAIR, [[0, 2], [1, 3]], "all_reduce", 128, 10 + 2 * 128 / 4),
        (NODE, ACROSS, "all_reduce", 128, 10 + 3 * 128 / 4),
        (NODE, [[0, 3]], "all_reduce", 128, 10 + 128 / 4),
        (OWN, ACROSS, "all_reduce", 128, 10 + 128 / 8),
        # Three nodes, each device with its peers: rings for large tensors, two steps of doubling for small ones.
        (NODE, THREE, "all_reduce", 3000, 4 * (10 + 1000 * 3 / 4)),
        (NODE, THREE[:1], "all_reduce", 3000, 4 * (10 + 1000 / 4)),
        (OWN, THREE, "all_reduce", 3000, 4 * (10 + 1000 / 8)),
        (NODE, THREE, "all_reduce", 8, 2 * (10 + 8 * 3 / 4)),
        (NODE, THREE, "all_gather", 50, 2 * (10 + 50 * 3 / 4)),
        (NODE, THREE, "reduce_scatter", 150, 2 * (10 + 50 * 3 / 4)),
        (NODE, THREE, "all_to_all", 150, 2 * (10 + 50 * 3 / 4)),
        # One ring over uneven units leaves each of them once.
        (NODE, one(7), "all_reduce", 7000, 12 * (10 + 1000 / 4)),
        (PAIR, one(5), "all_gather", 100, 4 * (10 + 100 / 4)),
        (PAIR, one(7), "reduce_scatter", 700, 6 * (10 + 100 / 4)),
        # Of the shifts of 5, 2 of two members leave a unit in two; of 7 in units of 3, 1, 2, 3, 3, 2, 1.
        (PAIR, one(5), "all_to_all", 500, 4 * 10 + 100 * (1 + 2 + 2 + 1) / 4),
        (NODE, one(7), "all_to_all", 700, 6 * 10 + 100 * (1 + 2 + 3 + 3 + 2 + 1) / 4),
        # Two nodes of 3: all three devices of a node send at once over its uplink.
        (NODE, one(6), "all_gather", 60, (10 + 60 * 3 / 4) + 2 * (1 + 2 * 60 / 64)),
        (NODE, one(6), "reduce_scatter", 360, (10 + 60 * 3 / 4) + 2 * (1 + 2 * 60 / 64)),
        (NODE, one(6), "all_reduce", 4800, 2 * 2 * (1 + 1600 / 64) + 10 + 1600 * 3 / 4),
        (NODE, one(6), "all_to_all", 960, 2 * (1 + 320 / 64) + 10 + 480 * 3 / 4),
        # As many bytes leave a node pairwise, without the steps within it, which matter less than latencies until here.
        (NODE, one(6), "all_to_all", 4800, 5 * 10 + 800 * (1 + 2 + 3 + 2 + 1) / 4),
        # Rows of a 2 x 3 mesh on nodes of 2: both use the node in the middle.
        (PAIR, along((2, 3), "b"), "all_gather", 20, 2 * (10 + 20 * 2 / 4)),
        (PAIR, along((2, 3), "b")[:1], "all_gather", 20, 2 * (10 + 20 / 4)),
        (PAIR, along((2, 3), "b"), "all_to_all", 60, 2 * (10 + 20 * 2 / 4)),
        (PAIR, along((2, 3), "a"), "all_reduce", 20, 10 + 20 * 2 / 4),
        # The axes of a 3 x 2 x 5 mesh on nodes of 3.
        (NODE, along((3, 2, 5), "c"), "all_gather", 20, 4 * (10 + 20 * 2 / 4)),
        (NODE, along((3, 2, 5), "c")[:1], "all_gather", 20, 4 * (10 + 20 / 4)),
        (NODE, along((3, 2, 5), "b"), "all_reduce", 20, 10 + 20 * 3 / 4),
        (NODE, along((3, 2, 5), "a"), "all_gather", 20, 2 * (10 + 20 * 3 / 4)),
        # A tapered tree: within a leaf nothing is short, beyond it six devices share 12 bytes a second.
        (TAPERED, [[0, 2], [1, 3]], "send", 48, 4 + 48 / 8),
        (TAPERED, [[0, 6]], "send", 48, 10 + 48 / 8),
        (TAPERED, [[d, d + 6] for d in range(6)], "send", 48, 10 + 48 * 6 / 12),
        (TAPERED, along((2, 6), "a"), "all_reduce", 48, 10 + 48 * 6 / 12),
        (TAPERED, along((2, 3, 2), "b"), "all_gather", 48, 2 * (4 + 48 / 8)),
        # Three levels, of which the devices at one position in nodes and leaves communicate with each other in turn.
        (TAPERED, one(12), "all_gather", 64, (10 + 64 * 6 / 12) + 2 * (4 + 128 / 8) + (1 + 384 / 64)),
        (TAPERED, one(12), "reduce_scatter", 768, (10 + 64 * 6 / 12) + 2 * (4 + 128 / 8) + (1 + 384 / 64)),
        (TAPERED, one(12), "all_reduce", 192, 2 * (1 + 96 / 64) + 4 * (4 + 32 / 8) + 10 + 32 * 6 / 12),
        (TAPERED, one(12), "all_to_all", 192, (1 + 96 / 64) + 2 * (4 + 64 / 8) + 10 + 96 * 6 / 12),
        # Large tensors go round in parallel rings: in a step a unit sends one message, each device of it a part.
        (TAPERED, one(12), "all_gather", 6400, 11 * (10 + 6400 / 12)),
        (OWN, one(15), "all_gather", 6400, 14 * (10 + 6400 / 3 / 8)),
        (OWN, one(15), "all_reduce", 96000, 28 * (10 + 6400 / 3 / 8)),
    ],
)  # fmt: skip
def test_closed_forms(levels: tuple[Level, ...], groups: Groups, name: str, size: float, expected: float) -> None:
    found = collective_seconds(machine(32, levels), name, groups[0], [size] * len(groups[0]), np.array(groups))
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_tree_crosses_each_unit_once_up_and_once_down() -> None:
    # 27 devices of 9 nodes: rings have 52 steps, doubling five with everything, the tree eight without.
    levels = (Level("node", 3, 0.5, 64.0, uplink=16.0), Level("net", 1 << 20, 10.0, 8.0))
    found = collective_seconds(machine(27, levels), "all_reduce", range(27), [256] * 27)
    within, across = 2 * 0.5 * 2, 2 * 10 * 4
    hierarchical = 4 * (0.5 + 256 / 3 / 64) + 4 * (10 + 256 / 3 * 3 / 16)
    assert hierarchical < within + across + 2 * 256 / 8
    assert found == pytest.approx(hierarchical, rel=1e-12)
    # Uneven nodes leave no hierarchy.
    found = collective_seconds(machine(28, levels), "all_reduce", range(26), [256] * 26)
    assert found == pytest.approx(within + across + 2 * 256 / 8, rel=1e-12)
    # Three such groups share the uplinks.
    groups = np.arange(78).reshape(26, 3).T
    found = collective_seconds(machine(90, levels), "all_reduce", groups[0].tolist(), [256] * 26, groups)
    assert found == pytest.approx(2 * 10 * 5 + 2 * 256 * 3 / 16, rel=1e-12)


def test_an_uplink_is_occupied_by_all_groups_and_crossed_by_one() -> None:
    profile = machine(32, NODE)
    timing = collective_timing(profile, "all_reduce", [0, 3], [128, 128], np.array(ACROSS))
    assert timing.uplinks == ((0, 3 * 128 / 4, 3 * 128 / 4),)
    # One device alone is slower than an uplink of 16.
    wide = (replace(NODE[0], uplink=16.0), NET)
    timing = collective_timing(machine(32, wide), "all_reduce", [0, 3], [128, 128], np.array(ACROSS[:1]))
    assert timing.uplinks == ((0, 128 / 16, 128 / 8),)
    assert collective_timing(profile, "all_reduce", [0, 1], [128, 128]).uplinks == ()
    assert collective_timing(machine(32, OWN), "all_reduce", [0, 3], [128, 128], np.array(ACROSS)).uplinks == ()


def test_the_time_of_one_group_does_not_grow_with_the_machine() -> None:
    """64 times as many groups give the same; an all-to-all of 16,384 devices has as many shifts."""
    levels = (Level("node", 8, 1e-6, 64e9, uplink=25e9), Level("net", 1 << 20, 1e-5, 25e9))
    for count in (256, 16384):
        groups = np.arange(count).reshape(-1, 8, 8).transpose(0, 2, 1).reshape(-1, 8)
        found = collective_seconds(machine(count, levels), "all_gather", groups[0].tolist(), [1e6] * 8, groups)
        assert found == pytest.approx(7 * (1e-5 + 1e6 * 8 / 25e9), rel=1e-12)
    everyone = range(16384)
    found = collective_seconds(machine(16384, levels), "all_to_all", everyone, [16384e6] * 16384)
    pairwise = 16383 * 1e-5 + 1e6 * (8 * 16383 - 2 * (7 + 6 + 5 + 4 + 3 + 2 + 1)) / 25e9
    assert found == pytest.approx(pairwise, rel=1e-12)


PROFILE = print_profile(machine(32, NODE, bandwidth=1e9))


def test_an_uplink_is_read_and_written() -> None:
    assert read_profile(PROFILE).levels == NODE
    assert "uplink" not in print_profile(machine(32, OWN))
    for wrong in ("0", "-1.0", '"fast"', "1e40"):
        with pytest.raises(ProfileError, match=r"expected a positive number.*'uplink'"):
            read_profile(PROFILE.replace("uplink = 4", f"uplink = {wrong}"))
    with pytest.raises(ProfileError, match="expected no 'uplink' in the outermost level 'net'") as raised:
        read_profile(PROFILE + "uplink = 3.0\n")
    assert "order levels from the innermost" in str(raised.value)


def test_an_uplink_is_scaled_by_its_name_and_with_the_network() -> None:
    profile = machine(32, NODE)
    assert scale_profile(profile, "node.uplink=2x").levels[0].uplink == 8.0
    assert scale_profile(profile, "node.uplink=25GB/s").levels[0].uplink == 25e9
    assert scale_profile(profile, "network.bandwidth=2x").levels == (
        replace(NODE[0], bandwidth=128.0, uplink=8.0), replace(NET, bandwidth=16.0),
    )  # fmt: skip
    assert scale_profile(profile, "node.bandwidth=2x").levels[0] == replace(NODE[0], bandwidth=128.0)
    assert has(profile, "level.node.uplink")
    assert not has(machine(32, OWN), "level.node.uplink")
    assert "level.node.uplink" in scalable(profile)
    shared = scale_profile(load_profile("dgx-h100:2"), "NVSwitch.uplink=50GB/s")
    sizes = [1e9] * 16
    alone = collective_seconds(load_profile("dgx-h100:2"), "all_gather", range(16), sizes)
    assert collective_seconds(shared, "all_gather", range(16), sizes) > 3 * alone
    with pytest.raises(ProfileError, match="expected no 'uplink' in the outermost level 'net'"):
        scale_profile(profile, "net.uplink=4")
