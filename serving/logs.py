"""What a server writes to its log: the format, and one line for each request that has ended.

    text   2026-11-30 16:00:01,250 INFO serving.logs: request 5f1c finished: stop, 12 + 40 tokens, ttft 0.031 s
    json   {"time": "2026-11-30T16:00:01.250Z", "level": "info", "logger": "serving.logs", "message": ...,
            "request_id": "5f1c", ...}

Prompts, answers and keys are never logged. What looks like a key in a line of somebody else's is blotted out.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import logging
import re
import sys
from typing import Any, TextIO, cast

from jaxpd.errors import InvalidArgument, JaxpdError
from jaxpd.request import FinishEvent, Request
from serving.config import LOG_FORMATS
from serving.messages import check_request_id, shown
from serving.observer import Observer, Origin

TEXT, JSON = LOG_FORMATS
OURS = ("jaxpd", "meshes", "pallas_kernels", "serving")
DETAILS = "details"  # the attribute of a record whose entries become fields of a JSON line
_KEYS = re.compile(
    r"(?i)(\bbearer\s+|\b(?:authorization|x-api-key|api[-_]?key)\b[\"']?\s*[:=]\s*[\"']?(?:bearer\s+)?)[^\s\"',;&]+"
)

logger = logging.getLogger(__name__)


def set_up(log_format: str = TEXT, stream: TextIO | None = None) -> None:
    """Makes the root logger write lines of `log_format` to `stream` (stderr): ours from INFO on, others' WARNING.

    Raises InvalidArgument for another format.
    """
    if log_format not in LOG_FORMATS:
        raise InvalidArgument(
            f"--log-format {log_format} is not known; use one of {', '.join(LOG_FORMATS)}", field="log_format"
        )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == JSON else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for package in OURS:
        logging.getLogger(package).setLevel(logging.INFO)


class TextFormatter(logging.Formatter):
    """Lines for a person."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return without_keys(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id where there is one, and details."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_keys(record.getMessage()),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            line["request_id"] = request_id
        line |= getattr(record, DETAILS, {})
        if record.exc_info:
            line["exception"] = without_keys(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = without_keys(record.stack_info)
        return json.dumps(line, default=str)


def without_keys(text: str) -> str:
    """`text` with whatever follows "Bearer", "authorization:" or "api_key=" blotted out."""
    return _KEYS.sub(r"\1***", text)


def log_stream(name: str) -> TextIO:
    """A stream whose lines become records of `name`: for progress, where every line of stderr has to be JSON."""
    return cast(TextIO, _LogStream(name))


class _LogStream(io.TextIOBase):
    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                self._logger.info("%s", line)
        return len(text)


class RequestLog(Observer):
    """One line for each sample that has ended and for each request that was refused."""

    def refused(self, request_id: str, origin: Origin, error: JaxpdError) -> None:
        """See `Observer`. What is wrong with a request may quote it, so that only the field is named."""
        quotes = error.code in ("INVALID_ARGUMENT", "NOT_FOUND")
        why = f"{error.code} ({error.field or 'request'})" if quotes else f"{error.code}: {error.message}"
        details = {"event": "refused", **_origin(origin), "error": error.code, "field": error.field}
        try:
            check_request_id(request_id)
        except InvalidArgument:
            request_id = shown(request_id)
        _log(request_id, f"request {request_id} refused: {why}", details)

    def finished(self, request: Request, origin: Origin, event: FinishEvent) -> None:
        """See `Observer`."""
        usage = event.usage
        times = {name: round(s, 6) for name, s in dataclasses.asdict(event.timings).items() if s is not None}
        details: dict[str, Any] = {
            "event": "finished",
            **_origin(origin),
            "reason": event.reason.value,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            **times,
        }
        if request.params.n > 1:
            details["sample"] = event.sample
        why = event.reason.value
        if event.error is not None:
            details["error"] = event.error.code
            why = f"{why} ({event.error.code}: {event.error.message})"
        parts = [
            f"request {request.request_id} finished: {why}",
            f"{usage.prompt_tokens} ({usage.cached_tokens} cached) + {usage.completion_tokens} tokens",
            *(f"{name.removesuffix('_s')} {seconds:.3f} s" for name, seconds in times.items()),
        ]
        _log(request.request_id, ", ".join(parts), details)


def _origin(origin: Origin) -> dict[str, str]:
    return {"front": origin.front, "operation": origin.operation, "caller": origin.caller.name}


def _log(request_id: str, message: str, details: dict[str, Any]) -> None:
    logger.info("%s", message, extra={"request_id": request_id, DETAILS: details})
