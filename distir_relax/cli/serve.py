"""The command `distir serve`."""

from __future__ import annotations

import os
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from distir_relax.cli.app import app
from distir_relax.cli.language_model import ModelArgument, ModelPrecisionOption, ModelStrategyOption, compiled_model
from distir_relax.cli.options import (
    ChunkTokensOption,
    MaxRequestsOption,
    RshOption,
    StepTokensOption,
    with_run_options,
)


class Launchers(StrEnum):
    """Launchers of ranks."""

    threads = "threads"
    mpirun = "mpirun"
    torchrun = "torchrun"


KEYS_VARIABLE = "DISTIR_API_KEYS"
"""The environment variable with the API keys, separated by commas."""


@app.command()
@with_run_options("weights", "device", "require_signature")
def serve(
    model: ModelArgument,
    ranks: Annotated[int | None, typer.Option("-n", min=1, help="Number of ranks, that of the bundle.")] = None,
    launcher: Annotated[
        Launchers | None, typer.Option(help="Start ranks with it; by default mpirun if there is one.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="HOST:RANKS,...", help="Hosts of the ranks, which agents start.")
    ] = None,
    rsh: RshOption = "",
    replicas: Annotated[
        int, typer.Option(min=1, help="Number of copies of the model, each on ranks of its own, that share requests.")
    ] = 1,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 chooses one.")] = 8000,
    max_requests: MaxRequestsOption = 16,
    max_waiting: Annotated[int, typer.Option(min=0, help="Number of requests that wait; others get 429.")] = 64,
    memory: Annotated[
        float | None,
        typer.Option(min=0, metavar="GB", help="Memory of a rank for states of requests; by default what is free."),
    ] = None,
    step_tokens: StepTokensOption = 512,
    chunk_tokens: ChunkTokensOption = 128,
    drafts: Annotated[int, typer.Option(min=0, help="Number of tokens to draft by prompt lookup in each step.")] = 0,
    share_prefixes: Annotated[bool, typer.Option(help="Compute the common beginning of requests once.")] = True,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Let no request change a bit of another's logits; slower.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request is ended.")] = 600.0,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name for clients; by default that of the bundle.")
    ] = None,
    strategy: ModelStrategyOption = None,
    precision: ModelPrecisionOption = None,
    *,
    reading: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Serve a language model over HTTP, with OpenAI's interface and a page to chat at /.

    API keys in the environment variable DISTIR_API_KEYS, separated by commas, are then required.
    """
    from distir_relax.bundle import read_bundle
    from distir_relax.runtime.hosts import HostList, read_hosts
    from distir_relax.runtime.world import check_size
    from distir_relax.serving import Engine, EngineOptions, Replica, start_engine
    from distir_relax.serving.http import EngineService, Replicas, ServerOptions, bound_socket, create_app, run_server

    keys = tuple(key for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key)
    options = EngineOptions(
        max_requests, None if memory is None else round(memory * 1e9), step_tokens, chunk_tokens, drafts,
        share_prefixes, batch_invariant,
    )  # fmt: skip
    server = ServerOptions(max_waiting, timeout, api_keys=keys, model_name=served_model_name)
    with compiled_model(model, strategy, precision) as bundle:
        read = read_bundle(bundle, **reading)
        check_size(read.manifest.mesh, ranks or read.manifest.mesh.size)
        listener = bound_socket(host, port)
        by: str | HostList | None = None if launcher is None else launcher.value
        if hosts is not None:
            by = HostList(read_hosts(hosts, read.manifest.mesh.size), rsh)

        def start(number: int) -> Engine:
            return start_engine(read, options, by, running["device"], replica=Replica(number, replicas))

        services: list[EngineService] = []
        try:
            for number in range(replicas):
                services.append(EngineService(partial(start, number)))
        except BaseException:
            Replicas(services).close()
            raise
        application = create_app(Replicas(services), read, server)
        address = f"[{host}]" if ":" in host else host
        typer.echo(f"http://{address}:{listener.getsockname()[1]}", err=True)
        run_server(application, listener)
