"""Errors that reach a person: each names the flag or field, the value, the limit and the cure.

The class says what kind of answer it is; `serving` maps `code` to a gRPC status and an HTTP status, the CLI prints
the message and exits with `exit_code`. Anything else that escapes is a bug, answered as INTERNAL without details.
"""

from __future__ import annotations


class JaxpdError(Exception):
    """Base of all errors that are meant to be read by a user. `code` is the gRPC status name."""

    code = "INTERNAL"
    exit_code = 1

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidArgument(JaxpdError):
    """The request or flag can never be served as it stands (too long, out of range, does not parse)."""

    code = "INVALID_ARGUMENT"
    exit_code = 2


class TooLong(InvalidArgument):
    """The prompt, or what it may grow to, is longer than the model's context."""


class NotFound(JaxpdError):
    """A model, file or request id that does not exist."""

    code = "NOT_FOUND"
    exit_code = 2


class Unauthenticated(JaxpdError):
    """No API key, or one that this server does not know."""

    code = "UNAUTHENTICATED"
    exit_code = 2


class ResourceExhausted(JaxpdError):
    """More work than the bound; try again after `retry_after_s` seconds."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class FailedPrecondition(JaxpdError):
    """The set-up does not allow it (does not fit in memory, a feature that is off, a port in use)."""

    code = "FAILED_PRECONDITION"
    exit_code = 2


class Unavailable(JaxpdError):
    """Starting, draining, or a peer was lost: the same request may work later or elsewhere."""

    code = "UNAVAILABLE"


class DeadlineExceeded(Unavailable):
    """The caller gave less time than the answer needs: refused at once where that is plain, ended otherwise."""

    code = "DEADLINE_EXCEEDED"


class Internal(JaxpdError):
    """A bug or a device failure. The message is safe to show: it holds no stack and no path."""


class HandoffFailed(Internal):
    """A decode pool could not take a sequence over; `reason` is one word, to count by.

    `copy`: pages did not arrive. `step`: a step of the decode pool failed, and what had arrived is gone. `lost`: what
    the decode pool had of the prompt from before is gone. Between processes also `peer`: the other one is gone, or
    cannot be reached. `refused`: the other one does not take it. `lease`: nobody fetched its pages in time.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
