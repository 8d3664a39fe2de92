"""A rank of a launch that runs several bundles, one after the other: ``python several_runs.py FILE``.

Each line of FILE is what stands behind ``distir`` on a command line, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from distir_relax.cli import app


def main(file: Path) -> None:
    for line in file.read_text().splitlines():
        app(json.loads(line), standalone_mode=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
