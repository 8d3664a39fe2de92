"""``python -I -S forked.py SOCKET ARGUMENTS``: as ``python ARGUMENTS``, in a fork of the server at SOCKET.

It imports next to nothing: a launch starts one of these for each of its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(address: str, arguments: list[str]) -> None:
    """End as the program ends: with its exit code, or by the signal that ended it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(server, [b"!"], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        status = int(server.makefile().readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
