"""Handlers of a rank, by the kind of request.

To add a kind: a function below, its line in `HANDLERS`, and a method of the session that submits it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from distir_relax.runtime.generation import Sampling
from distir_relax.runtime.requests import RankRequests, Slot
from distir_relax.runtime.session import Session
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch


@dataclass
class Served:
    """What the handlers of a rank act on: its session, and its requests if it serves steps of several."""

    world: World
    session: Session
    requests: RankRequests | None = None

    @property
    def replier(self) -> int:
        """The rank that replies."""
        return 0 if self.requests is None else self.requests.root


Answer: TypeAlias = "tuple[dict[str, Any], dict[str, torch.Tensor]]"
Handler: TypeAlias = "Callable[[Served, Mapping[str, Any], dict[str, torch.Tensor]], Answer]"
"""Takes the values and tensors of a request, and returns those of the reply, of which only one rank's are sent.

Every rank calls it. The tensors may be views of shared memory, valid until it returns, and must not be written to.
"""


def ping(served: Served, values: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Answer:
    """Reply at once."""
    return {}, {}


def call(served: Served, values: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Answer:
    """Run once on the inputs `tensors`; reply with the outputs named, all if null."""
    session = served.session
    if session.bundle.manifest.states:
        # A state that is an input outlives the call.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    outputs = session(tensors, None, values["outputs"], values["past"])
    return {"seconds": session.seconds}, outputs


def state(served: Served, values: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Answer:
    """Reply with the global tensors of all weights that the program updates."""
    return {}, served.session.state()


def load_state(served: Served, values: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Answer:
    """Overwrite the weights that the program updates."""
    served.session.load_state(tensors)
    return {}, {}


_sampling = lru_cache(1024)(Sampling)
"""A request has the same in all its steps, and a check of its values takes longer than this."""


def step(served: Served, values: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Answer:
    """Run a step of several requests; reply with the tokens of each slot. See `RankRequests.step`."""
    requests, comm = served.requests, served.session.communicator
    assert requests is not None, "the ranks were started for steps"
    comm.start_counting()
    comm.progress.start()
    slots = [
        Slot(request, past, tokens, last, length, _sampling(*sampling), source, prompt)
        for request, past, tokens, last, length, sampling, source, prompt in values["slots"]
    ]
    with served.world.running(comm.progress, requests.steps):
        tokens = requests.step(slots, values["ended"])
    return {"tokens": tokens}, {}


def busy(served: Served, values: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Answer:
    """Reply with the seconds that each rank has computed in steps."""
    assert served.requests is not None, "the ranks were started for steps"
    return {"seconds": served.requests.collect_busy()}, {}


HANDLERS: dict[str, Handler] = {
    "ping": ping, "call": call, "state": state, "load_state": load_state,
    "step": step, "busy": busy,
}  # fmt: skip
