"""What happens to every HTTP request before a route sees it, as plain ASGI: nothing here touches a body twice.

    RequestIds -> ApiKeys -> Bodies -> routes

`scope["state"]` then holds `request_id` and `caller`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpd.errors import InvalidArgument, Unauthenticated
from serving.callers import ANYONE, Keys, bearer
from serving.http.errors import Refused, error_body, json_response, response_of, retry_after, unexpected
from serving.messages import check_request_id, new_request_id

logger = logging.getLogger(__name__)

BUSY_RETRY_S = 1.0


class RequestIds:
    """Gives every request an id: the client's `x-request-id` where it is one, and says it in the answer.

    The last to see a request: a bug leaves as a 500 that shows the id and nothing else, whatever it was.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _id_of(header(scope, b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        name = (b"x-request-id", request_id.encode("ascii"))
        started = False

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal started
                started = True
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server stops, and this is the task's end
            if not started:
                body = error_body(503, "the server has shut down before it could answer; ask another one")
                response = json_response(503, body, {"retry-after": retry_after(BUSY_RETRY_S)})
                await response(scope, receive, send_with_id)
        except Exception as error:
            logger.error("%s %s of request %s failed", scope["method"], scope["path"], request_id, exc_info=error)
            if not started:
                await json_response(500, unexpected(request_id))(scope, receive, send_with_id)


class ApiKeys:
    """Finds out who asks. Without a key only `open_paths`, and what stands below `open_folders`, are answered."""

    def __init__(self, app: ASGIApp, *, keys: Keys, open_paths: Iterable[str], open_folders: tuple[str, ...]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._open_folders = open_folders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            state, path = scope["state"], scope["path"]
            if path in self._open_paths or path.startswith(self._open_folders):
                state["caller"] = ANYONE
            else:
                try:
                    state["caller"] = self._keys.find(bearer(header(scope, b"authorization")))
                except Unauthenticated as error:
                    await response_of(error, state["request_id"])(scope, receive, send)
                    return
        await self._app(scope, receive, send)


class Bodies:
    """Holds bodies to a size each and to one together, however they are sent: their bytes are counted."""

    def __init__(self, app: ASGIApp, *, most: int, most_together: int) -> None:
        self._app = app
        self._most = most
        self._most_together = most_together
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdecimal() and int(declared) > self._most:
            body = error_body(413, self._too_large(int(declared)))
            await json_response(413, body)(scope, receive, send)
            return
        held = 0

        async def receive_counted() -> Message:
            nonlocal held
            message = await receive()
            if size := len(message.get("body", b"")):
                held += size
                self._held += size
                if held > self._most:
                    raise Refused(413, self._too_large(held))
                if self._held > self._most_together:
                    raise Refused(503, "the server holds too many large requests", retry_after_s=BUSY_RETRY_S)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._held -= held

    def _too_large(self, size: int) -> str:
        return f"the body has {size} bytes or more, the limit is {self._most}; shorten the prompt or split the request"


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name (lower case)."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def _id_of(asked: str | None) -> str:
    if asked is not None:
        try:
            check_request_id(asked)
        except InvalidArgument:
            return new_request_id()
        return asked
    return new_request_id()
