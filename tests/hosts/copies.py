"""Launches on hosts without a common disk: ``python -m tests.hosts.copies BUNDLE INPUT``, in namespaces.

The bundle and the input are on the first host alone, which is launched from. Prints one line of JSON: for two launches
the exit codes and the lines that they have printed, the values of the output, and for each host the files of its copies
with their bytes on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.hosts.laboratory import Laboratory


def main() -> None:
    """Run the launches, and print the line."""
    bundle, given = Path(sys.argv[1]), Path(sys.argv[2])
    names = ("n0", "n1")
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), names) as laboratory:
        roots = {name: laboratory.hosts[name].root / "tmp" for name in names}
        shutil.copytree(bundle, roots["n0"] / "own" / "m.dist")
        shutil.copy(given, roots["n0"] / "own" / "x.npz")
        command = [
            sys.executable, "-P", "-m", "distir_relax", "launch", "/tmp/own/m.dist", "--host", "n0:1,n1:2",
            "--rsh", str(laboratory.shell), "--input", "/tmp/own/x.npz", "--output", "/tmp/own/y.npz",
        ]  # fmt: skip
        launches = []
        for _ in range(2):
            process = laboratory.start(
                "n0", *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, "XDG_CACHE_HOME": "/tmp/cache", "TMPDIR": folder},
            )  # fmt: skip
            out, _ = process.communicate(timeout=90)
            launches.append((process.returncode, out.decode(errors="replace").splitlines()))
        output = roots["n0"] / "own" / "y.npz"
        values = {name: x.tolist() for name, x in np.load(output).items()} if output.exists() else {}
        copies = {
            name: {
                path.name: path.stat().st_blocks * 512
                for path in root.glob("cache/distir-relax/copies/**/*")
                if path.is_file()
            }
            for name, root in roots.items()
        }
        print(json.dumps({"launches": launches, "output": values, "copies": copies}))


if __name__ == "__main__":
    main()
