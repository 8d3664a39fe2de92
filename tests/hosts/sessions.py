"""A session on two hosts: ``python -m tests.hosts.sessions BUNDLE INPUT``, in namespaces.

The bundle is on the host of the session alone. Prints one line of JSON: the output of a call, its difference from a
call on this machine, the error of the call in which a rank was killed, the seconds until it was raised, and the
processes that are left on the hosts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import distir_relax as dr
from distir_relax.errors import LostError
from tests.hosts.laboratory import Laboratory

HOSTS = "n0:1,n1:2"


def main() -> None:
    """Make the hosts, and run the session on the first one."""
    if len(sys.argv) == 4:
        call(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
        return
    bundle, given = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), ("n0", "n1")) as laboratory:
        own = laboratory.hosts["n0"].root / "tmp" / "own"
        shutil.copytree(bundle, own / "m.dist")
        shutil.copy(given, own / "x.npz")
        process = laboratory.start(
            "n0", sys.executable, "-m", "tests.hosts.sessions", "/tmp/own/m.dist", "/tmp/own/x.npz",
            str(laboratory.shell), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "XDG_CACHE_HOME": "/tmp/cache", "TMPDIR": folder},
        )  # fmt: skip
        assert process.stdout is not None
        called = process.stdout.readline()
        os.kill(laboratory.pids_of("n1", "rank_server")[-1], 9)
        rest, _ = process.communicate(b"\n", timeout=60)
        until = time.monotonic() + 3
        while any(laboratory.pids(name) for name in laboratory.names) and time.monotonic() < until:
            time.sleep(0.05)
        left = {name: len(laboratory.pids(name)) for name in laboratory.names}
        print(json.dumps({**json.loads(called), **json.loads(rest), "left": left}))


def call(bundle: Path, given: Path, rsh: str) -> None:
    """Print the difference of a call; once a line is read, call until an error is raised, and print that."""
    inputs = {name: torch.from_numpy(x) for name, x in np.load(given).items()}
    expected = dr.load(bundle)(*inputs.values())
    with dr.launch(bundle, hosts=HOSTS, rsh=rsh) as session:
        found = session(*inputs.values())
        print(json.dumps({"difference": float((found - expected).abs().max()), "shape": list(found.shape)}), flush=True)
        sys.stdin.readline()
        start = time.monotonic()
        try:
            while True:
                session(*inputs.values())
        except LostError as error:
            print(json.dumps({"error": error.message, "seconds": time.monotonic() - start}))


if __name__ == "__main__":
    main()
