"""Serving over HTTP, with the interface of OpenAI's completions and chat completions."""

from distir_relax.serving.http.app import ServerOptions, create_app
from distir_relax.serving.http.replicas import Replicas
from distir_relax.serving.http.server import bound_socket, run_server
from distir_relax.serving.http.service import EngineService

__all__ = ["EngineService", "Replicas", "ServerOptions", "bound_socket", "create_app", "run_server"]
