"""Launches on hosts that are namespaces of this machine: each end is named in time, and nothing is left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distir_relax as dr
from distir_relax.bundle import write_bundle
from tests.hosts.laboratory import in_namespaces, why_not
from tests.hosts.limits import has_memory_limits
from tests.hosts.lost import CASES, LINKS
from tests.runtime.handmade import example_input, mlp_bundle

pytestmark = [pytest.mark.mpirun, pytest.mark.timeout(150)]

NAMED = {
    "rank": (0.25, "rank 1 on n1 was killed by SIGKILL"),
    # Python writes the stack of the crash first.
    "segfault": (3.0, "rank 1 on n1 crashed: segmentation fault"),
    "stopped rank": (2.0, "rank 1 on n1 was stopped"),
    "agent": (0.25, "host n1 was lost: its agent has ended"),
    "host": (0.25, "host n1 was lost: its agent has ended"),
    "stopped host": (2.0, "host n1 has not answered for 1."),
    "cut": (2.0, "host n1 has not answered for 1."),
    "cut one way": (2.0, "host n1 has not answered for 1."),
    "cut, slow links": (2.0, "host n1 has not answered for 1."),
}
"""The seconds in which a failure is named, and its name."""
OTHERS = {
    "nothing", "nothing, other clocks, slow links", "rank, other clocks", "memory", "full disk", "launcher", *LINKS,
}  # fmt: skip
"""The cases of the other tests."""
_BUSY = 1.0
"""Seconds by which other tests may delay it."""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    write_bundle(mlp_bundle([3, 2]), folder / "m.dist")
    write_bundle(mlp_bundle([3, 2, 2]), folder / "links.dist")
    np.savez(folder / "x.npz", x=example_input())
    return folder


def happened(what: str, files: Path) -> dict[str, Any]:
    bundle = files / ("links.dist" if what in LINKS else "m.dist")
    done = in_namespaces("tests.hosts.lost", what, str(bundle), str(files / "x.npz"))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", ["nothing", "nothing, other clocks, slow links"])
def test_a_launch_on_two_hosts_succeeds(case: str, files: Path) -> None:
    found = happened(case, files)
    assert found["code"] == 0, found["text"]
    assert any("2 ranks (torch)" in line for line in found["text"])
    assert found["left"] == {"n0": [], "n1": []}
    assert found["written"] == []


def test_clocks_of_hosts_do_not_delay_the_name_of_a_killed_rank(files: Path) -> None:
    found = happened("rank, other clocks", files)
    assert found["code"] == 75, found["text"]
    assert any(line.startswith(f"error: {NAMED['rank'][1]}") for line in found["text"]), found["text"]
    assert found["named"] < NAMED["rank"][0] + _BUSY
    assert found["left"] == {"n0": [], "n1": []}


def test_a_rank_that_the_kernel_kills_for_memory_is_named(files: Path) -> None:
    if not has_memory_limits():
        pytest.skip("there are no memory limits by control groups of version 1 here")
    found = happened("memory", files)
    assert found["code"] == 75, found["text"]
    assert "error: rank 1 on n1 was killed by the system: out of memory" in found["text"]
    assert found["left"] == {"n0": [], "n1": []}


def test_an_output_for_a_full_disk_is_an_error_and_leaves_no_file(files: Path) -> None:
    found = happened("full disk", files)
    assert found["code"] == 2, found["text"]
    place = r"\[0\] error: .*/disk-n0/y\.npz: cannot be written: No space left on device"
    assert any(re.match(place, line) for line in found["text"]), found["text"]
    assert found["disk"] == ["filled"]
    assert found["left"] == {"n0": [], "n1": []}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("what", sorted(NAMED))
def test_what_is_lost_is_named_and_ends_the_launch(what: str, files: Path) -> None:
    seconds, name = NAMED[what]
    found = happened(what, files)
    assert found["code"] == 75, found["text"]
    assert any(line.startswith(f"error: {name}") for line in found["text"]), found["text"]
    assert found["named"] < seconds + _BUSY
    assert found["ended"] < seconds + 5.0
    assert found["left"] == {"n0": [], "n1": []}
    (written,) = found["written"]
    assert written["failure"].startswith(name)
    assert written["hosts"] == {"n0": [0], "n1": [1]}
    survivor, other = written["ranks"]
    assert survivor["host"] == "n0"
    assert survivor["position"].startswith("rank 0 ")
    assert any("test_hosts" not in line and "distir_relax" in line for line in survivor["threads"]["MainThread"])
    assert other["rank"] == 1
    if survivor["collective"] is not None and what != "stopped rank":  # which may wait in the same one
        assert written["missing"]["ranks"] == [1]
        assert any(line.startswith("  missing from ") for line in found["text"])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("what", LINKS)
def test_a_cut_between_two_hosts_without_the_launcher_is_named(what: str, files: Path) -> None:
    # The agents start within a second, and have five to connect.
    seconds = 6.5 if what == "firewall" else 2.0
    found = happened(what, files)
    assert found["code"] == 75, found["text"]
    (error,) = [line for line in found["text"] if line.startswith("error: ")]
    # Without acknowledgements the other direction stops, too.
    assert re.fullmatch(r"error: host n[12] has not heard of host n[12] for 1\.\d s", error)
    assert found["named"] < seconds + _BUSY
    assert found["ended"] < seconds + 5.0
    assert found["left"] == {"n0": [], "n1": [], "n2": []}
    if what == "firewall" and not found["written"]:
        return  # No rank had begun.
    (written,) = found["written"]
    assert written["hosts"] == {"n0": [0], "n1": [1], "n2": [2]}
    assert [rank["rank"] for rank in written["ranks"]] == [0, 1, 2]


@pytest.fixture(scope="module")
def wide(files: Path) -> tuple[Path, torch.nn.Module, torch.Tensor]:
    """A bundle on three ranks with wide weights, its model, and the input in the file `wide.npz`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(127, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 127)).eval()
    x = torch.randn(5, 127)
    dr.compile(model, (x,), strategy="1/3/1/1").save(files / "wide.dist")
    np.savez(files / "wide.npz", input=x.numpy())
    return files / "wide.dist", model, x


def test_a_session_on_hosts_names_the_rank_that_is_killed(
    files: Path, wide: tuple[Path, torch.nn.Module, torch.Tensor]
) -> None:
    done = in_namespaces("tests.hosts.sessions", str(wide[0]), str(files / "wide.npz"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["shape"] == [5, 127]
    assert found["difference"] < 1e-5
    assert re.fullmatch(r"rank [12] on n1 was killed by SIGKILL", found["error"])
    assert found["seconds"] < 1.0 + _BUSY
    assert found["left"] == {"n0": 0, "n1": 0}


def test_hosts_without_the_bundle_get_the_slices_of_their_ranks(
    files: Path, wide: tuple[Path, torch.nn.Module, torch.Tensor]
) -> None:
    bundle, model, x = wide
    done = in_namespaces("tests.hosts.copies", str(bundle), str(files / "wide.npz"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (first, lines), (second, more) = found["launches"]
    assert (first, second) == (0, 0), lines + more
    with torch.no_grad():
        (y,) = found["output"].values()
        np.testing.assert_allclose(y, model(x).numpy(), rtol=1e-5, atol=1e-5)
    (sent,) = [line for line in lines if line.startswith("sending /tmp/own/m.dist to n1: ")]
    assert not any("sending " in line for line in more), "the second launch finds the copies of the first"
    assert found["copies"]["n0"] == {}
    # Two of three ranks are on the second host.
    size = (bundle / "weights.safetensors").stat().st_size
    assert 0.65 * size < int(sent.split()[-2].replace(",", "")) < 0.68 * size + 10_000
    assert found["copies"]["n1"]["weights.safetensors"] < size


@pytest.mark.sweep
def test_ranks_end_with_their_launcher(files: Path) -> None:
    assert happened("launcher", files)["left"] == {"n0": [], "n1": []}


def test_every_failure_has_a_name() -> None:
    assert {*NAMED, *OTHERS} == set(CASES)
