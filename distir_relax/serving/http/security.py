"""What every request passes first: its identifier, the API key, and the bound of its body."""

from __future__ import annotations

import hmac
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, TypeAlias

from distir_relax.serving.http.openai_api import error_body

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]


class Guard:
    """Middleware of an ASGI application.

    A request gets the identifier of its header ``X-Request-Id``, or a new one; its response names it. Below ``/v1``
    one of the `keys` is required, if there are any. A body has at most `max_body` bytes.
    """

    def __init__(self, app: Any, keys: Collection[str], max_body: int) -> None:
        self._app, self._keys, self._max_body = app, [key.encode() for key in keys], max_body

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        identifier = given if re.fullmatch(r"[\w.-]{1,128}", given, re.ASCII) else uuid.uuid4().hex
        scope["distir.request_id"] = identifier

        async def named(message: _Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", identifier.encode())]
            await send(message)

        if scope["path"].startswith("/v1") and not self._is_allowed(headers.get(b"authorization", b"")):
            await _answer(named, 401, error_body("a valid API key is required", "authentication_error"))
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body:
            await _answer(named, 413, error_body(f"expected a body of at most {self._max_body} bytes"))
            return
        received = 0

        async def bounded() -> _Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            # A chunked body does not say its length; it is cut off, and is no JSON then.
            return message if received <= self._max_body else {"type": "http.request", "body": b"", "more_body": False}

        await self._app(scope, bounded, named)

    def _is_allowed(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        if not self._keys:
            return True
        # All keys are compared, so that the time tells nothing of them.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


async def _answer(send: _Send, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
