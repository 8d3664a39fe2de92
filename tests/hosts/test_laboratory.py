"""Hosts of the laboratory have a network, a /tmp, clocks and limits of their own."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from tests.hosts.clocks import has_compiler
from tests.hosts.inspect_hosts import DELAY, MONOTONIC, WALL
from tests.hosts.laboratory import in_namespaces, why_not
from tests.hosts.limits import has_memory_limits

pytestmark = pytest.mark.mpirun


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    if reason := why_not():
        pytest.skip(reason)
    done = in_namespaces("tests.hosts.inspect_hosts")
    assert done.returncode == 0, done.stderr
    properties: dict[str, Any] = json.loads(done.stdout)
    return properties


def test_a_host_has_a_name_and_a_tmp_in_which_shared_folders_are_visible(seen: dict[str, Any]) -> None:
    assert seen["name"] == "n2"
    assert seen["own"] == {"n0": True, "n1": False, "n2": False}
    assert seen["shared"] == {"n0": True, "n1": True, "n2": True}


def test_clocks_of_a_host_are_shifted(seen: dict[str, Any]) -> None:
    assert seen["clocks n0"] == pytest.approx([0.0, 0.0, 0.0], abs=10.0)
    wall = WALL if has_compiler() else 0
    assert seen["clocks n1"] == pytest.approx([MONOTONIC, wall, wall], abs=10.0)


def test_a_relay_delays_limits_and_cuts(seen: dict[str, Any]) -> None:
    latency, bandwidth = seen["link"]
    assert DELAY < latency < 3 * DELAY
    assert 0.1e9 < bandwidth * 8 < 1.01e9
    assert seen["statistics"]["bytes"] > 64 << 20
    assert seen["connected"] == seen["mended"] == errno.ECONNREFUSED
    assert seen["cut"] == seen["cut one way"] == errno.EAGAIN


def test_limits_of_a_host_end_with_it(seen: dict[str, Any]) -> None:
    assert seen["groups"] == [True, True] * has_memory_limits()
    assert seen["groups left"] == []
    assert seen["disk"] == errno.ENOSPC
