"""Running the application with uvicorn."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from distir_relax.errors import RunError

if TYPE_CHECKING:
    from starlette.applications import Starlette

_GRACE = 30
"""Seconds that open requests have to end after a SIGTERM."""


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises `RunError` if it is taken, or not one of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(f"cannot listen at {host}:{port}: {reason}", hint="choose another --port or --host") from None
    return listener


def run_server(app: Starlette, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; open requests then have 30 seconds to end."""
    import uvicorn

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE, lifespan="on", server_header=False
    )
    uvicorn.Server(config).run(sockets=[listener])
