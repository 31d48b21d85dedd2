"""Calls to a jaxpd server over gRPC. Its messages say how many tokens they hold, and prompts go as token ids."""

from __future__ import annotations

import contextlib
import secrets
import time

import numpy as np

from jaxpd.errors import FailedPrecondition, InvalidArgument, JaxpdError
from serving.bench import prompts
from serving.bench.records import BROKEN, ENDED_BADLY, NO_TOKENS, About, Call, Failure, Reply
from serving.bench.target import Target
from serving.client import AsyncClient
from serving.messages import Finished, GenerateRequest, Tokens, Understood


class GrpcBackend:
    """See `records.Backend`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client: AsyncClient | None = None
        self._vocabulary = target.vocab_size or 0
        self._run_id = secrets.token_hex(4)

    async def open(self, *, synthetic: bool) -> About:
        """See `records.Backend`."""
        target = self._target
        if target.extra_body:
            raise FailedPrecondition(
                f"--extra-body {dict(target.extra_body)} is for OpenAI servers; leave it out with --backend grpc",
                field="extra_body",
            )
        self._client = AsyncClient(
            target.address,
            timeout_s=target.timeout_s,
            api_key=target.api_key,
            tls=target.tls,
            ca_certs=target.ssl_ca_certs,
            certfile=target.ssl_certfile,
            keyfile=target.ssl_keyfile,
        )
        info = await self._client.model_info()
        if target.model not in (None, info.name):
            raise InvalidArgument(
                f"--model {target.model}: {target.address} serves {info.name} and nothing else; leave it out",
                field="model",
            )
        self._vocabulary = self._vocabulary or info.vocab_size
        notes = [f"prompts are token ids below {self._vocabulary}"] if synthetic else []
        return About(
            backend=target.backend,
            address=target.address,
            model=info.name,
            max_model_len=info.max_model_len or None,
            notes=tuple(notes),
        )

    async def count_tokens(self, texts: list[str]) -> list[int] | None:
        """See `records.Backend`."""
        return None

    def prepare(self, call: Call, *, seed: int, salt: int) -> tuple[Call, np.ndarray | None, str]:
        """An array takes an eighth of the room that a tuple of numbers takes; `send` makes the message."""
        ids = None
        if call.text is None:
            ids = prompts.token_ids(call.pieces, self._vocabulary, seed=seed, salt=salt).astype(np.int32)
        return call, ids, f"bench-{self._run_id}-{salt}-{call.index}"

    async def send(self, prepared: tuple[Call, np.ndarray | None, str]) -> Reply:
        """See `records.Backend`."""
        assert self._client is not None
        call, ids, request_id = prepared
        request = GenerateRequest(
            text=call.text,
            token_ids=None if ids is None else tuple(ids.tolist()),
            request_id=request_id,
            max_tokens=call.output_len,
            temperature=self._target.temperature,
            ignore_eos=self._target.ignore_eos,
        )
        reply = Reply(sent_s=time.perf_counter())
        try:
            async with contextlib.aclosing(self._client.stream(request)) as messages:
                async for message in messages:
                    _take(reply, message, time.perf_counter())
        except JaxpdError as error:
            reply.failure = Failure(error.code, str(error))
        reply.end_s = time.perf_counter()
        if reply.failure is None:
            _finish(reply)
        return reply

    async def close(self) -> None:
        """See `records.Backend`."""
        if self._client is not None:
            await self._client.close()


def _take(reply: Reply, message: Understood | Tokens | Finished, now: float) -> None:
    match message:
        case Understood():
            reply.prompt_tokens = message.prompt_tokens
        case Tokens(count=count, text=text) if count or text:
            reply.message_s.append(now)
            reply.message_tokens.append(count)
        case Finished():
            reply.finish_reason = str(message.reason)
            reply.prompt_tokens = message.usage.prompt_tokens
            reply.completion_tokens = message.usage.completion_tokens
            reply.cached_tokens = message.usage.cached_tokens


def _finish(reply: Reply) -> None:
    if reply.finish_reason is None:
        reply.failure = Failure(BROKEN, f"ended after {len(reply.message_s)} messages without its last one")
    elif reply.finish_reason in ENDED_BADLY:
        reply.failure = Failure(f"finished by {reply.finish_reason}", f"finish reason {reply.finish_reason}")
    elif not reply.message_s:
        reply.failure = Failure(NO_TOKENS, "the answer holds no tokens")
