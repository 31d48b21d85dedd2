"""A client's request on its way, as seen by a test in another thread: its tokens so far, how it ended, and when."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from concurrent.futures import Future
from typing import Any

from jaxpd.errors import JaxpdError
from jaxpd.request import FinishReason, TokenLogprobs
from serving.client import AsyncClient
from serving.messages import Finished, GenerateRequest, Tokens

PATIENCE_S = 120.0  # of a test, where no bound is at stake


@dataclasses.dataclass(eq=False)
class Asked:
    """One request. `error` is what the client was told instead of an answer, or after some of it."""

    prompt: tuple[int, ...]
    max_tokens: int
    options: dict[str, Any]
    leaves_at: int | None = None  # the client goes away with so many tokens
    left: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finished: Finished | None = None
    error: JaxpdError | None = None
    ended_s: float | None = None  # on the monotonic clock
    task: Future[None] | None = None

    def __post_init__(self) -> None:
        self._news = threading.Condition()

    async def run(self, client: AsyncClient) -> None:
        """Sends it and follows the answer to its end."""
        request = GenerateRequest(
            token_ids=self.prompt,
            **{"max_tokens": self.max_tokens, "ignore_eos": True, "want_text": False, "want_token_ids": True}
            | self.options,
        )
        try:
            async with contextlib.aclosing(client.stream(request)) as messages:
                async for message in messages:
                    if isinstance(message, Tokens):
                        with self._news:
                            assert message.first_index == len(self.tokens), "tokens twice, or with a gap"
                            self.tokens += message.token_ids
                            self.logprobs += message.logprobs or ()
                            self._news.notify_all()
                    if self.leaves_at is not None and len(self.tokens) >= self.leaves_at and not self.finished:
                        self.left = True
                        return
                    if isinstance(message, Finished):
                        self.finished = message
                        self.error = message.error
        except JaxpdError as error:
            self.error = error
        except asyncio.CancelledError:
            pass  # the client has left; nothing more will be told
        finally:
            with self._news:
                self.ended_s = time.monotonic()
                self._news.notify_all()

    @property
    def ended(self) -> bool:
        return self.ended_s is not None

    def wait_tokens(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Until it has so many tokens. Raises AssertionError where it ends before, or they do not come."""
        with self._news:
            came = self._news.wait_for(lambda: len(self.tokens) >= count or self.ended, timeout_s)
        assert came and len(self.tokens) >= count, f"{len(self.tokens)} tokens of {count}: {self.told()}"

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Until it has ended, well or not; raises AssertionError where it has not."""
        with self._news:
            assert self._news.wait_for(lambda: self.ended, timeout_s), f"no answer in {timeout_s} s: {self.told()}"
        assert self.task is not None
        if not self.task.cancelled():
            self.task.result(10)  # an assertion that failed over there fails here

    def leave(self) -> None:
        """The client goes away in the middle."""
        assert self.task is not None
        self.task.cancel()

    def told(self) -> str:
        """For messages of failed assertions."""
        if self.error is not None:
            return f"{self.error.code}: {self.error.message}"
        if self.finished is not None:
            return f"{len(self.tokens)} tokens, ended by {self.finished.reason}"
        return f"{len(self.tokens)} tokens so far"

    def assert_tokens(self, expected: tuple[int, ...]) -> None:
        """It has ended by length with exactly these."""
        assert self.error is None, self.told()
        assert self.finished is not None and self.finished.reason is FinishReason.LENGTH, self.told()
        assert tuple(self.tokens) == expected, f"{self.tokens} are not {expected}"
        assert self.finished.usage.completion_tokens == len(expected)
        assert self.finished.usage.prompt_tokens == len(self.prompt)
