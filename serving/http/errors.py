"""Every failure as OpenAI's clients expect it: `{"error": {"message", "type", "param", "code"}}`.

A JaxpdError says what is wrong in words that are safe to show. Of anything else the client gets the request's id and
nothing more; the log has the rest.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from jaxpd.errors import JaxpdError, NotFound, ResourceExhausted, TooLong

logger = logging.getLogger(__name__)

STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "INTERNAL": 500,
}
# type and code of a status, as OpenAI's clients and proxies know them
KINDS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
}
# Names of fields inside, where HTTP has another one.
PARAMS = {
    "text": "prompt",
    "token_ids": "prompt",
    "prompt_ids": "prompt",
    "chat": "messages",
    "template_options": "chat_template_kwargs",
    "request_id": "x-request-id",
    "structured": "structured_outputs",
}
# What the description of the API says of errors.
_DESCRIBED = {
    "description": "What is wrong, in words",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}
DESCRIBED: dict[int | str, dict[str, Any]] = {"4XX": _DESCRIBED, "5XX": _DESCRIBED}
UNAVAILABLE_RETRY_S = 2.0  # for a server that starts or ends
MAX_SHOWN = 2000  # characters of a message


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""


class Refused(HTTPException):
    """A request that is turned away for what it is as a message: too large, at a bad time."""

    def __init__(self, status_code: int, message: str, *, retry_after_s: float | None = None) -> None:
        headers = None if retry_after_s is None else {"retry-after": retry_after(retry_after_s)}
        super().__init__(status_code, message, headers)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an answer with that status; `code` is the status's own unless it is given."""
    kind, usual = KINDS.get(status, KINDS[500] if status >= 500 else KINDS[400])
    return {"error": {"message": message[:MAX_SHOWN], "type": kind, "param": param, "code": code or usual}}


def body_of(error: JaxpdError, request_id: str, names: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Status and body for a request that failed. `names` are fields that this client calls otherwise."""
    status = STATUS[error.code]
    code, message, param = None, error.message, error.field
    if status == 500:
        message, param = f"{error.message} (request {request_id})", None
    if isinstance(error, TooLong):
        code = "context_length_exceeded"
    elif isinstance(error, ModelNotFound):
        code = "model_not_found"
    if param is not None:
        param = (names or {}).get(param) or PARAMS.get(param, param)
        if param.startswith("structured_output."):
            param = "structured_outputs" if names is None else names.get("structured", "structured_outputs")
    return status, error_body(status, message, param=param, code=code)


def unexpected(request_id: str) -> dict[str, Any]:
    """The body for a bug: nothing of it is shown."""
    return error_body(500, f"internal error; the server's log says more under request {request_id}")


def retry_after(seconds: float) -> str:
    """The header's value: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


def json_response(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A body as JSON; ASCII, so that no half of a surrogate pair from a client can spoil it."""
    return Response(json.dumps(body).encode(), status, headers, media_type="application/json")


def response_of(error: JaxpdError, request_id: str, names: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that failed."""
    status, body = body_of(error, request_id, names)
    if status == 500:
        logger.error("request %s failed", request_id, exc_info=error)
    return json_response(status, body, _headers(error))


def _headers(error: JaxpdError) -> dict[str, str]:
    if isinstance(error, ResourceExhausted):
        return {
            "retry-after": retry_after(error.retry_after_s),
            "retry-after-ms": str(round(error.retry_after_s * 1000)),
        }
    if error.code == "UNAVAILABLE":
        return {"retry-after": retry_after(UNAVAILABLE_RETRY_S)}
    return {"www-authenticate": "Bearer"} if error.code == "UNAUTHENTICATED" else {}


def request_id_of(request: Request) -> str:
    """The id that the middleware gave the request."""
    return str(request.scope["state"]["request_id"])


def install(app: FastAPI) -> None:
    """Makes all of an app's errors look like this."""
    # Starlette types a handler by the base class of what it handles.
    app.add_exception_handler(JaxpdError, _on_jaxpd_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_jaxpd_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, JaxpdError)
    return response_of(error, request_id_of(request))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, message = error.status_code, str(error.detail)
    if status == 404:
        message = f"{request.method} {request.url.path[:200]} is not served here; GET /openapi.json lists what is"
    elif status == 405:
        message = f"{request.url.path[:200]} does not take {request.method}; use {(error.headers or {}).get('Allow')}"
    elif status == 400 and "body" in message:
        message = "the body is not JSON that can be read (UTF-8, no number of thousands of digits, not nested deeply)"
    return json_response(status, error_body(status, message), error.headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    param, message = _first_fault(error.errors(), request)
    return json_response(400, error_body(400, message, param=param))


def _first_fault(faults: Sequence[Any], request: Request) -> tuple[str | None, str]:
    """The name of the first field that is wrong, and what is wrong with it."""
    fault = faults[0]
    where, what = fault["loc"], str(fault["msg"])
    if fault["type"] == "json_invalid":
        return None, f"the body is not JSON: {fault.get('ctx', {}).get('error', what)} at character {where[-1]}"
    if where == ("body",):
        if "json" not in request.headers.get("content-type", ""):
            return None, "the body must be JSON; send it with the header content-type: application/json"
        return None, "the body must be a JSON object" if fault["type"] != "missing" else "the body is missing"
    names = [part for part in where[1:] if isinstance(part, int) or not _is_branch(part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).removeprefix(".")
    if fault["type"] == "missing":
        return param, f"{param} is missing; set it"
    if fault["type"] == "value_error":
        return param, f"{param} {what.removeprefix('Value error, ')}"
    return param, f"{param}: {what[:1].lower()}{what[1:]}"


def _is_branch(part: str) -> bool:
    """Whether it names a branch of a union rather than a field: pydantic writes both."""
    return "[" in part or part in ("str", "int", "float", "bool")
