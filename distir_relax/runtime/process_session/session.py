"""`dr.launch`: a bundle on processes that mpirun or torchrun starts, called from this one."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from distir_relax.bundle import Bundle, ReadOptions, file_of, read_bundle
from distir_relax.errors import DistIRError, RunError
from distir_relax.runtime.arrays import as_torch
from distir_relax.runtime.backends import find_backend
from distir_relax.runtime.call_arguments import bind_arguments, result_names
from distir_relax.runtime.generation import LanguageProgram, Run, TokenGenerator, TokenOptions, whole_result
from distir_relax.runtime.hosts import HostList, read_hosts
from distir_relax.runtime.launched import RankOptions
from distir_relax.runtime.launcher_detection import check_alone
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.microbatch_io import parts_of, user_outputs
from distir_relax.runtime.process_session.rank_processes import RankProcesses, ServeOptions
from distir_relax.runtime.process_session.requests import RanksLost, Reply, Requests
from distir_relax.runtime.process_session.tensor_frames import shared_size, size_of_value
from distir_relax.runtime.sequence_calls import SequenceCalls
from distir_relax.runtime.session import SessionClosed
from distir_relax.runtime.state import changing, checked_source
from distir_relax.runtime.turns import Turns
from distir_relax.runtime.verification import Verified
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import check_size

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array

_T = TypeVar("_T")

_verified: set[Verified] = set()
"""Bundles that ranks of this process's sessions have verified."""


def launch(
    bundle: str | Path, ranks: int | None = None, *, launcher: str | None = None, backend: str = "torch",
    device: str = "cpu", timeout: float = DEFAULT_TIMEOUT, threads: int | None = None, hosts: str = "", rsh: str = "",
    **options: Unpack[ReadOptions],
) -> ProcessSession:  # fmt: skip
    """Start the ranks of a saved bundle as processes of this machine, and return the session that calls them.

    With `hosts`, as "a:2,b:1", they are processes of these, which agents start that are reached by `rsh`, ssh by
    default; hosts that lack the bundle get the slices that their ranks read.

    `ranks` is their number, that of the bundle's mesh. `launcher` is "mpirun" or "torchrun"; by default mpirun if there
    is one. `threads` is the number of threads of a rank, by default OMP_NUM_THREADS or its share of the cores. A rank
    that waits for others for more than `timeout` seconds (0: never) ends the session. `options` are those of
    `ReadOptions`, as for `dr.load`.

    Raises `BundleError` for a bundle that is missing or damaged, and for `weights` that do not fit it, `RunError` for
    another number of ranks, in a process that is a rank of a launch itself, and if the ranks do not start; no process
    is left then.
    """
    check_alone()
    if not isinstance(bundle, (str, Path)):
        raise RunError(f"expected the path of a bundle, found {bundle!r}", hint="plan.save(path) writes one")
    find_backend(backend)
    rank_device(device, 0)
    opened = read_bundle(bundle, False, **options)
    check_size(opened.manifest.mesh, opened.manifest.mesh.size if ranks is None else ranks)
    known = Verified.of(opened)
    checked = known.to_json() if known in _verified else []
    served = ServeOptions(file_of(opened), RankOptions(backend, device, timeout), checked)
    of_hosts = HostList(read_hosts(hosts, opened.manifest.mesh.size), rsh) if hosts else None
    processes = RankProcesses.start(opened.manifest.mesh.size, served, of_hosts or launcher, threads)
    if processes.verified == known.to_json():
        _verified.add(known)
    return ProcessSession(opened, processes, timeout)


class ProcessSession(TokenGenerator):
    """Ranks of `bundle` as processes, with programs and weights loaded; see `launch`, which makes it.

    Calls are exclusive, from threads and coroutines, in order of arrival. An error that all ranks have alike leaves the
    session usable; after any other error of a rank, or its end, it is `closed`. An interrupted call leaves it usable:
    the ranks finish the call, and its results are dropped. A context manager, which closes it.
    """

    def __init__(self, bundle: Bundle, processes: RankProcesses, timeout: float) -> None:
        super().__init__(bundle.texts, bundle.path, bundle.manifest.name)
        self.bundle = bundle
        self.seconds = 0.0
        """The time of rank 0's program in the last call, without slicing and gathering."""
        self._timeout = timeout
        self._processes = processes
        self._requests = Requests(processes)
        self._calls = SequenceCalls(bundle)
        self._turns = Turns("this session is in use by a stream or call that is not finished, of the same caller")
        self._closed = ""
        self._ending = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        # Also at exit, and when the session is garbage.
        self._finalizer = weakref.finalize(self, processes.stop)

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        state = f"closed: {self._closed}" if self._closed else f"{manifest.mesh.size} processes"
        return f"<session of {manifest.name} on {manifest.mesh}, {self._processes.launcher}, {state}>"

    def __enter__(self) -> ProcessSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> str:
        """The reason why the session takes no more calls; empty while it does."""
        return self._closed

    def __call__(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Run once on the model's own arguments; return its output, or several by name, as `dr.load` does.

        The caller owns the results. Raises `RunError` for arguments that do not match, and if a rank waits for more
        than `timeout` seconds, and `SessionClosed`.
        """
        return self._in_turn(partial(self._call, args, kwargs, timeout))

    async def call_async(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Run once as `__call__` does, without blocking the event loop."""
        return await self._in_turn_async(partial(self._call, args, kwargs, timeout))

    def run(
        self, inputs: Mapping[str, Array], timeout: float | None = None, outputs: Collection[str] | None = None,
        past: int = 0,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Run once on inputs by name; return the `outputs` named, by default all. See `Session.__call__`."""
        return self._in_turn(partial(self._run, inputs, timeout, outputs, past))

    async def generate_async(
        self, prompt: Any, max_new_tokens: int | None = None, **options: Unpack[TokenOptions]
    ) -> Any:
        """Return the result of `generate` without blocking the event loop. When cancelled, it ends after a token."""
        given, _ = self._start(prompt, max_new_tokens, **options)
        return whole_result([each async for each in self.stream_async(prompt, max_new_tokens, **options)], given)

    async def stream_async(
        self, prompt: Any, max_new_tokens: int | None = None, **options: Unpack[TokenOptions]
    ) -> AsyncIterator[Any]:
        """Yield the results of `stream` without blocking the event loop."""
        _, results = self._start(prompt, max_new_tokens, **options)
        async with self._turns.taken_async():
            while (result := await self._off_loop(lambda: next(results, None))) is not None:
                yield result

    def state(self) -> dict[str, torch.Tensor]:
        """Return the global tensors of all updated weights, by name, on the CPU; the caller owns them."""
        room = shared_size(map(size_of_value, changing(self.bundle.manifest)))
        return self._in_turn(partial(self._request, "state", {}, {}, None, room)).tensors

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Overwrite all weights that the program updates, from global arrays by name.

        Raises RunError for arrays that are missing, unknown, or of another shape or dtype, before anything is changed.
        """
        checked_source(self.bundle.manifest, state)
        tensors = {name: as_torch(value) for name, value in state.items()}
        self._in_turn(partial(self._request, "load_state", {}, tensors))

    def ping(self) -> None:
        """Wait until the ranks have handled all earlier requests."""
        self._in_turn(partial(self._request, "ping", {}, {}))

    def close(self) -> None:
        """End the ranks: in good order, or at once if a call is running in another thread. Closing again is allowed."""
        self._end("close() was called", self._processes.end if self._turns.is_taken else self._processes.stop)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float | None) -> Any:
        names = result_names(self.bundle.manifest)
        outputs = self._run(bind_arguments(self.bundle.manifest, args, kwargs), timeout, names, 0)
        return next(iter(outputs.values())) if len(names) == 1 else outputs

    def _run(
        self, inputs: Mapping[str, Array], timeout: float | None, outputs: Collection[str] | None, past: int
    ) -> dict[str, torch.Tensor]:
        _, prepared = self._calls.of(inputs, past)
        manifest = prepared.call.manifest
        parts_of(manifest, outputs)
        results = [tensor for tensor in user_outputs(manifest) if outputs is None or tensor.name in outputs]
        names = None if outputs is None else list(outputs)
        tensors = {name: as_torch(value) for name, value in inputs.items()}
        room = shared_size(map(size_of_value, results))
        try:
            reply = self._request("call", {"outputs": names, "past": past}, tensors, timeout, room)
        except DistIRError as error:
            if manifest.updates and not self._closed:
                self._end(f"its last run failed and left its state between two steps: {error.message}")
            raise
        self.seconds = float(reply.values["seconds"])
        return reply.tensors

    def _turn(self) -> AbstractContextManager[None]:
        return self._turns.taken()

    def _language(self, backend: str | None) -> LanguageProgram:
        return LanguageProgram.of(self.bundle.manifest)

    def _runs(self, backend: str | None) -> Run:
        if backend is not None:
            raise RunError("the backend of a session is that of its ranks", hint="pass backend= to dr.launch")
        return self._run

    def _in_turn(self, work: Callable[[], _T]) -> _T:
        with self._turns.taken():
            return work()

    async def _in_turn_async(self, work: Callable[[], _T]) -> _T:
        async with self._turns.taken_async():
            return await self._off_loop(work)

    async def _off_loop(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the session's thread; one that is cancelled runs to its end before the caller goes on."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "distir-session")
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            if not running.cancelled():
                # Retrieved, or asyncio would print it.
                running.exception()
            raise

    def _request(
        self, kind: str, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], timeout: float | None = None,
        room: int = 0,
    ) -> Reply:  # fmt: skip
        """Send a request and wait for its reply. Raises the error of the ranks, and SessionClosed."""
        if os.getpid() != self._processes.owner:
            raise RunError(
                f"this session belongs to process {self._processes.owner}, and this one is a fork of it",
                hint="call dr.launch in the process that uses the session",
            )
        self._check_open()
        try:
            number = self._requests.submit(kind, values, tensors, self._timeout if timeout is None else timeout, room)
            try:
                return self._requests.result(number)
            except BaseException:
                self._requests.abandon(number)
                raise
        except RanksLost as lost:
            # Another thread may have closed it meanwhile.
            self._check_open()
            self._end(lost.error.message if isinstance(lost.error, DistIRError) else str(lost.error))
            raise lost.error from None

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"this session is closed: {self._closed}", hint="make a new session with dr.launch")

    def _end(self, reason: str, end: Callable[[], None] | None = None) -> None:
        """Close the session for a reason, with its processes."""
        self._closed = self._closed or reason
        with self._ending:
            if self._finalizer.alive:
                (end or self._processes.end)()
                self._finalizer.detach()
                self._requests.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False)
