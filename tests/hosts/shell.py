"""Run a command of the system, such as `ip`, whose failure is an error."""

from __future__ import annotations

import subprocess


def run(*command: str) -> str:
    """Run a command and return its output. Raises RuntimeError with its message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
