"""The HTTP application: routes, streaming, admission, and what happens when a client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle
from distir_relax.errors import DistIRError, RunError
from distir_relax.runtime.generation import bundle_tokenizer
from distir_relax.serving.http.metrics import Metrics
from distir_relax.serving.http.openai_api import (
    CompletionRequest,
    InvalidRequest,
    ResponseWriter,
    error_body,
    parse_request,
)
from distir_relax.serving.http.rank_roles import rank_roles
from distir_relax.serving.http.replicas import Replicas
from distir_relax.serving.http.security import Guard
from distir_relax.serving.request import GenerationRequest
from distir_relax.text import StopStrings, Tokenizer

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_LOG = logging.getLogger("distir_relax.serving")


@dataclass(frozen=True)
class ServerOptions:
    """Limits of a server: requests that wait, seconds of a request, bytes of a body, and the API keys, if any.

    `model_name` is what clients see, by default the name of the bundle. A request with several prompts is one that
    waits, however many they are.
    """

    max_waiting: int = 64
    timeout: float = 600.0
    max_body: int = 4 << 20
    api_keys: Collection[str] = ()
    model_name: str | None = None


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", retry: int = 0) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.retry = status, message, kind, retry


def create_app(replicas: Replicas, bundle: Bundle, options: ServerOptions | None = None) -> Starlette:
    """Return the application for engines of a bundle, which it closes when it ends.

    Raises `RunError` for a bundle without a tokenizer.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    options = options or ServerOptions()
    handlers = _Handlers(replicas, bundle, options)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(replicas.close)

    routes = [
        Route("/v1/completions", handlers.route(handlers.completions), methods=["POST"]),
        Route("/v1/chat/completions", handlers.route(handlers.chat), methods=["POST"]),
        Route("/v1/models", handlers.models),
        Route("/v1/models/{name:path}", handlers.model),
        Route("/health", handlers.health),
        Route("/metrics", handlers.metrics_text),
        Route("/status", handlers.status),
        Route("/", handlers.page),
    ]
    keys = Middleware(Guard, keys=options.api_keys, max_body=options.max_body)
    errors: Any = {HTTPException: _unknown_path}
    return Starlette(routes=routes, lifespan=lifespan, middleware=[keys], exception_handlers=errors)


async def _unknown_path(http: Request, error: Any) -> Response:
    """Answer an unknown path or method as OpenAI's API does, with JSON."""
    from starlette.responses import JSONResponse

    body = error_body(f"{error.detail}: {http.method} {http.url.path}")
    return JSONResponse(body, error.status_code, error.headers)


class _Handlers:
    def __init__(self, replicas: Replicas, bundle: Bundle, options: ServerOptions) -> None:
        self.replicas, self.bundle, self.options = replicas, bundle, options
        self.metrics = Metrics(replicas)
        self.name = options.model_name or bundle.manifest.name
        self.tokenizer: Tokenizer = bundle_tokenizer(bundle.texts, bundle.path, bundle.manifest.name)
        self._started = int(time.time())
        self._open: list[list[_Choice]] = []

    def route(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler whose refusals are answered as OpenAI's."""
        from starlette.responses import JSONResponse

        async def handle(http: Request) -> Response:
            try:
                return await handler(http)
            except _Refused as refused:
                self.metrics.refused(refused.status)
                headers = {"Retry-After": str(refused.retry)} if refused.retry else {}
                return JSONResponse(error_body(refused.message, refused.kind), refused.status, headers)

        return handle

    async def completions(self, http: Request) -> Response:
        return await self._complete(http, is_chat=False)

    async def chat(self, http: Request) -> Response:
        return await self._complete(http, is_chat=True)

    async def models(self, http: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, http: Request) -> Response:
        from starlette.responses import JSONResponse

        name = http.path_params["name"]
        if name == self.name:
            return JSONResponse(self._model())
        return JSONResponse(error_body(f"the model {name!r} does not exist", code="model_not_found"), 404)

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._started, "owned_by": "distir-relax"}

    async def health(self, http: Request) -> Response:
        from starlette.responses import JSONResponse

        if self.replicas.is_ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "starting", "reason": self.replicas.failure}, 503, {"Retry-After": "2"})

    async def metrics_text(self, http: Request) -> Response:
        from starlette.responses import Response

        body, media_type = self.metrics.text()
        return Response(body, headers={"Content-Type": media_type})

    async def status(self, http: Request) -> Response:
        from starlette.responses import JSONResponse

        replicas = self.replicas
        # It waits for the steps in flight.
        idle = await asyncio.gather(*(asyncio.to_thread(service.idle) for service in replicas.services))
        return JSONResponse(
            {
                "model": self.name, "ready": replicas.is_ready, "restarts": replicas.restarts,
                "running": replicas.running, "waiting": replicas.waiting,
                "chat": self.tokenizer.template is not None, "ranks": rank_roles(self.bundle.manifest, idle),
            }
        )  # fmt: skip

    async def page(self, http: Request) -> Response:
        from starlette.responses import HTMLResponse

        text = (resources.files("distir_relax.serving.http") / "page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _PAGE_POLICY, "X-Frame-Options": "DENY"})

    async def _complete(self, http: Request, is_chat: bool) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            parsed = parse_request(json.loads(await http.body()), is_chat, self.tokenizer.defaults)
        except (ValueError, RecursionError):
            raise _Refused(400, "expected JSON in the body of the request") from None
        except InvalidRequest as error:
            raise _Refused(400, str(error)) from None
        choices = self._submit(parsed, http.scope["distir.request_id"])
        prefix = "chatcmpl" if is_chat else "cmpl"
        writer = ResponseWriter(f"{prefix}-{uuid.uuid4().hex}", self.name, int(time.time()), is_chat)
        if parsed.is_stream:
            events = self._events(choices, writer, parsed)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        left: asyncio.Future[Any] = asyncio.ensure_future(_until_disconnected(http))
        work = asyncio.ensure_future(_texts(choices))
        try:
            await asyncio.wait([left, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise _Refused(499, "the client has left")
            texts = work.result()
        finally:
            left.cancel()
            work.cancel()
            for choice in choices:
                self._finish(choice)
        prompt_tokens, tokens = _counts(choices)
        return JSONResponse(writer.whole(texts, [choice.reason for choice in choices], prompt_tokens, tokens))

    def _submit(self, parsed: CompletionRequest, identifier: str) -> list[_Choice]:
        """Submit all prompts of a request, or none."""
        choices: list[_Choice] = []
        try:
            if self._waiting() >= self.options.max_waiting:
                raise _Refused(429, "too many requests wait; try again later", "rate_limit_error", retry=1)
            self._open.append(choices)
            for prompt in parsed.prompts:
                choice = _Choice(self.tokenizer, parsed.stop, self.options.timeout, identifier)
                # Token ids are those of a text.
                stop = self.tokenizer.stop if isinstance(prompt, list) else None
                if parsed.is_chat:
                    prompt = self.tokenizer.encode_chat(prompt, parsed.variables)
                    stop = self.tokenizer.chat_stop
                choice.request = self.replicas.submit(
                    prompt, parsed.count, sampling=parsed.sampling, stop=stop, on_token=choice.wake,
                    fit=not parsed.is_count_given,
                )  # fmt: skip
                choices.append(choice)
        except _Refused:
            raise
        except RunError as error:
            for choice in choices:
                choice.request.cancel()
            if not self.replicas.is_ready:
                raise _Refused(503, error.message, "server_error", retry=2) from None
            raise _Refused(400, str(error)) from None
        return choices

    def _waiting(self) -> int:
        """Return how many requests wait: those of whose prompts none has begun count as one."""
        self._open = [choices for choices in self._open if not all(choice.request.ended for choice in choices)]
        begun_late = (sum(choice.is_waiting for choice in choices) - 1 for choices in self._open)
        return self.replicas.waiting - sum(max(0, count) for count in begun_late)

    async def _events(
        self, choices: list[_Choice], writer: ResponseWriter, parsed: CompletionRequest
    ) -> AsyncIterator[str]:
        """Yield the pieces of all choices as server-sent events. A client that leaves cancels the requests."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def run(index: int, choice: _Choice) -> None:
            try:
                is_first = True
                async for piece in choice.pieces():
                    await queue.put(writer.chunk(index, piece, is_first=is_first))
                    is_first = False
                await queue.put(writer.chunk(index, "", choice.reason, is_first=is_first))
            except _Refused as refused:
                self.metrics.refused(refused.status)
                await queue.put(error_body(refused.message, refused.kind))
            await queue.put(None)

        tasks = [asyncio.ensure_future(run(index, choice)) for index, choice in enumerate(choices)]
        try:
            open_choices = len(tasks)
            while open_choices:
                event = await queue.get()
                if event is None:
                    open_choices -= 1
                else:
                    yield _event(event)
            if parsed.has_usage:
                yield _event(writer.usage_chunk(*_counts(choices)))
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()
            for choice in choices:
                self._finish(choice)

    def _finish(self, choice: _Choice) -> None:
        """Cancel a request that has not ended, and count it."""
        request = choice.request
        request.cancel()
        self.metrics.ended(request)
        first = request.times[0] - request.submitted if request.times else 0.0
        _LOG.info(
            "request %s: %s, %d prompt tokens, %d new, %.0f ms to the first, %.0f ms in all", choice.identifier,
            request.ended, len(request.prompt), len(request.tokens), first * 1e3,
            (time.perf_counter() - request.submitted) * 1e3,
        )  # fmt: skip


class _Choice:
    """One prompt of a request: its tokens as text, up to a stop text."""

    request: GenerationRequest

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], timeout: float, identifier: str) -> None:
        self._tokenizer, self._stops, self._timeout = tokenizer, StopStrings(stop), timeout
        self.identifier = identifier
        self.reason = "stop"
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether there is no token yet."""
        return not self.request.ended and not self.request.times

    def wake(self, request: GenerationRequest) -> None:
        """Continue `pieces`: called by the engine's thread."""
        # The loop is closed while the server ends.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def whole(self) -> str:
        """Return the text."""
        return "".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text as its characters are complete. Raises `_Refused` when the engine fails, or time is up."""
        decoder = self._tokenizer.decoder(self.request.prompt)
        position = 0
        while True:
            self._changed.clear()
            ended, tokens = self.request.ended, self.request.tokens[position:]
            position += len(tokens)
            piece = "".join(map(decoder.feed, tokens))
            if piece := self._stops.feed(piece):
                yield piece
            if self._stops.is_reached:
                self.request.cancel()
                return
            if ended:
                break
            left = self.request.submitted + self._timeout - time.perf_counter()
            try:
                await asyncio.wait_for(self._changed.wait(), max(left, 0.0))
            except TimeoutError:
                raise _Refused(504, f"the request took longer than {self._timeout:g} s", "timeout_error") from None
        if ended not in ("stop", "length"):
            error = self.request.error
            reason = error.message if isinstance(error, DistIRError) else "the engine failed"
            raise _Refused(503, reason, "server_error", retry=2)
        self.reason = ended
        rest = self._stops.feed(decoder.finish())
        if rest := rest + self._stops.finish():
            yield rest


async def _texts(choices: list[_Choice]) -> list[str]:
    """Return the texts of all choices. The future of `gather`, once cancelled, would log that nobody took its error."""
    return await asyncio.gather(*(choice.whole() for choice in choices))


def _counts(choices: list[_Choice]) -> tuple[int, int]:
    return sum(len(c.request.prompt) for c in choices), sum(len(c.request.tokens) for c in choices)


def _event(data: dict[str, Any]) -> str:
    # Within strings, where JSON allows them, readers of lines would take these for the end of one.
    return f"data: {json.dumps(data, ensure_ascii=False).translate(_LINE_ENDS)}\n\n"


_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\u0085\u2028\u2029"}


async def _until_disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
