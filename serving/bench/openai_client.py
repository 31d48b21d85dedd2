"""Calls to an OpenAI server: chat or completions, streamed, on aiohttp.

Before anything is timed, `open` asks for the model, finds out how the server counts tokens and makes one call for a
check:

    GET /v1/models -> POST /tokenize, or two short calls whose usage tells -> one streamed call

The streamed call settles how token counts come: with every message (`continuous_usage_stats`), at the end
(`include_usage`), or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import ssl
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpd.errors import FailedPrecondition, InvalidArgument, JaxpdError, Unauthenticated, Unavailable
from serving.bench import prompts
from serving.bench.openai_stream import finish, take
from serving.bench.prompts import WORDS, Words
from serving.bench.records import BAD_ANSWER, BROKEN, CONNECT, TIMEOUT, About, Call, Failure, Piece, Reply
from serving.bench.sse import Events, TooLong
from serving.bench.target import Target

if TYPE_CHECKING:
    import aiohttp

# uvicorn closes a connection after 5 idle seconds. One that is used again at just that moment would be a failure that
# no user of the server sees.
KEEPALIVE_S = 2.0
AT_ONCE = 32  # calls to /tokenize
SHOWN = 300  # characters of a server's error that are kept
_CHECK_SALT = 2**31
_STREAM_OPTIONS: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)


class OpenAIBackend:
    """See `records.Backend`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._chat = target.backend == "openai-chat"
        self._root = target.address.rstrip("/").removesuffix("/v1")
        self._url = self._root + ("/v1/chat/completions" if self._chat else "/v1/completions")
        self._aiohttp = _aiohttp()
        self._client: aiohttp.ClientSession | None = None
        self._model = target.model or ""
        self._stream_options = _STREAM_OPTIONS[0]
        self._words = Words(WORDS)
        self._ids: np.ndarray | int | None = target.vocab_size if not self._chat else None
        self._tokenizes = False
        self._run_id = secrets.token_hex(4)

    async def connect(self) -> None:
        """Makes the connection pool; nothing is sent."""
        target, http = self._target, self._aiohttp
        headers = {"Content-Type": "application/json"}
        if target.api_key is not None:
            headers["Authorization"] = f"Bearer {target.api_key}"
        connector = http.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=_tls(target))
        self._client = http.ClientSession(
            connector=connector, headers=headers, timeout=http.ClientTimeout(total=target.timeout_s)
        )

    async def open(self, *, synthetic: bool) -> About:
        """See `records.Backend`."""
        await self.connect()
        max_model_len = await self._find_model()
        notes = await self._learn_tokens(synthetic)
        notes += await self._check()
        return About(
            backend=self._target.backend,
            address=self._root,
            model=self._model,
            max_model_len=max_model_len,
            notes=tuple(notes),
        )

    async def count_tokens(self, texts: list[str]) -> list[int] | None:
        """See `records.Backend`."""
        if not self._tokenizes:
            return None
        some = asyncio.Semaphore(AT_ONCE)

        async def one(text: str) -> int:
            async with some:
                return len(await self._tokenize(prompt=text) or ())

        return list(await asyncio.gather(*map(one, texts)))

    def prepare(self, call: Call, *, seed: int, salt: int) -> tuple[str, bytes]:
        """The id and the body."""
        body: dict[str, Any] = {"model": self._model, "stream": True, "temperature": self._target.temperature}
        if self._stream_options is not None:
            body["stream_options"] = self._stream_options
        if self._target.ignore_eos:
            body["ignore_eos"] = True
        prompt: Any = call.text
        if prompt is None and self._ids is not None:
            prompt = prompts.token_ids(call.pieces, self._ids, seed=seed, salt=salt).tolist()
        elif prompt is None:
            prompt = self._words.text(call.pieces, seed=seed, salt=salt)
        if self._chat:
            body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": call.output_len}
        else:
            body |= {"prompt": prompt, "max_tokens": call.output_len}
        body |= self._target.extra_body
        return f"bench-{self._run_id}-{salt}-{call.index}", json.dumps(body, ensure_ascii=False).encode()

    async def send(self, prepared: tuple[str, bytes]) -> Reply:
        """See `records.Backend`."""
        assert self._client is not None
        request_id, body = prepared
        reply = Reply(sent_s=time.perf_counter())
        try:
            async with self._client.post(
                self._url, data=body, headers={"X-Request-Id": request_id}, allow_redirects=False
            ) as response:
                if response.status != 200:
                    reply.failure = Failure(f"http {response.status}", _message(await response.text(errors="replace")))
                elif response.content_type != "text/event-stream":
                    said = _message(await response.text(errors="replace"))
                    reply.failure = Failure(BAD_ANSWER, f"{response.content_type} instead of a stream: {said}")
                else:
                    await _read(response, reply)
        except TimeoutError:
            reply.failure = Failure(TIMEOUT, f"no whole answer in {self._target.timeout_s:g} s; --timeout allows more")
        except self._aiohttp.ClientConnectorError as error:
            reply.failure = Failure(CONNECT, str(error))
        except (self._aiohttp.ClientError, OSError, TooLong) as error:
            reply.failure = Failure(BROKEN, str(error) or type(error).__name__)
        if not reply.end_s or reply.failure is not None:
            reply.end_s = time.perf_counter()
        return reply

    async def close(self) -> None:
        """See `records.Backend`."""
        if self._client is not None:
            await self._client.close()

    async def _find_model(self) -> int | None:
        """Sets the model's name; returns its limit of tokens where the server says one."""
        status, answer = await self._json("GET", "/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        listed = [m for m in models if isinstance(m, dict) and m.get("id")] if isinstance(models, list) else []
        if status == 401:
            raise Unauthenticated(
                f"{self._root} wants an API key ({_message(json.dumps(answer))}); give it by --api-key-file FILE",
                field="api_key",
            )
        if not self._model:
            if not listed:
                raise FailedPrecondition(
                    f"{self._root}/v1/models names no model (status {status}); say which one to ask by --model NAME",
                    field="model",
                )
            self._model = str(listed[0]["id"])
        limit = next((m.get("max_model_len") for m in listed if m["id"] == self._model), None)
        return limit if isinstance(limit, int) else None

    async def _learn_tokens(self, synthetic: bool) -> list[str]:
        """How many tokens a word costs, and what ids there are. Returns notes."""
        base = await self._tokenize(prompt="the")
        self._tokenizes = base is not None
        if not synthetic or (self._ids is not None and not self._chat):
            return []
        if base is None:
            return await self._calibrate()
        whole = await self._tokenize(prompt=" ".join(("the", *WORDS))) or ()
        if len(whole) - len(base) == len(WORDS):
            words, cost = WORDS, 1
            if not self._chat:
                self._ids = np.asarray(whole[len(base) :])
        else:
            counts = await self.count_tokens([f"the {word}" for word in WORDS])
            assert counts is not None
            words, cost = prompts.cheapest([count - len(base) for count in counts])
            if not self._chat:
                self._ids = np.asarray(whole)
        overhead = 0
        if self._chat:
            chat = await self._tokenize(messages=[{"role": "user", "content": "the"}])
            overhead = len(chat) - len(base) if chat is not None else 0
        self._words = Words(words, cost=cost, overhead=overhead)
        if self._ids is not None:
            return [f"prompts are token ids, {len(set(whole))} different ones that /tokenize gave for common words"]
        template = f"; {overhead} tokens of each prompt are the template's" if self._chat else ""
        return [f"prompts are words, {cost} token{'s' * (cost > 1)} each by /tokenize{template}"]

    async def _calibrate(self) -> list[str]:
        """Without /tokenize: the cost of a word from the usage of two short calls."""
        used, sizes = [], (32, 160)
        for size in sizes:
            call = Call(index=0, due_s=None, input_len=size, output_len=1, pieces=(Piece((9, size), size),))
            _, body = self.prepare(call, seed=0, salt=_CHECK_SALT)
            plain = {key: value for key, value in json.loads(body).items() if key not in ("stream", "stream_options")}
            status, answer = await self._json("POST", self._url.removeprefix(self._root), plain)
            if status != 200:
                raise self._refused(status, _message(json.dumps(answer)))
            usage = answer.get("usage") if isinstance(answer, dict) else None
            tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
            if not isinstance(tokens, int):
                return ["the server has no /tokenize and reports no usage: a word of a prompt was taken for one token"]
            used.append(tokens)
        cost = max(0.2, (used[1] - used[0]) / (sizes[1] - sizes[0]))
        self._words = Words(WORDS, cost=cost, overhead=max(0.0, used[0] - sizes[0] * cost))
        return [f"prompts are words of {cost:.2f} tokens on average, by usage (the server has no /tokenize)"]

    async def _check(self) -> list[str]:
        """One streamed call that is not timed. Raises what the server said if it fails."""
        call = Call(index=0, due_s=None, input_len=8, output_len=2, text="Say yes.")
        replies: list[Reply] = []
        for options in _STREAM_OPTIONS:
            self._stream_options = options
            replies.append(await self.send(self.prepare(call, seed=0, salt=_CHECK_SALT)))
            failure = replies[-1].failure
            if failure is None or failure.kind not in ("http 400", "http 422"):
                break
        reply, failure = replies[-1], replies[-1].failure
        if failure is not None:
            if failure.kind.startswith("http "):
                # Of the refusals, the first is of the request as it is meant.
                first = replies[0].failure
                assert first is not None
                raise self._refused(int(first.kind[5:]), first.message)
            raise Unavailable(f"{self._url} does not answer a short call ({failure.kind}: {failure.message})")
        if reply.completion_tokens is None:
            return ["the server reports no usage: tokens were counted by messages"]
        if None in reply.message_tokens:
            return ["the server does not say how many tokens a message holds; where that matters, ITL is left out"]
        return []

    def _refused(self, status: int, message: str) -> JaxpdError:
        if status == 401:
            return Unauthenticated(
                f"{self._root} wants an API key ({message}); give it by --api-key-file FILE", field="api_key"
            )
        if status in (429, 503):
            return Unavailable(f"{self._url} takes no requests now, status {status}: {message}; try again later")
        return FailedPrecondition(
            f"{self._url} refuses a short call with status {status}: {message}; check --backend, --model and "
            "--extra-body"
        )

    async def _tokenize(self, **what: Any) -> list[int] | None:
        """Token ids of a prompt (without special tokens) or of messages; None where the server does not tell."""
        body = {"model": self._model, **what}
        if "prompt" in what:
            body["add_special_tokens"] = False
        status, answer = await self._json("POST", "/tokenize", body)
        tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None

    async def _json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON (None where it is none). Raises Unavailable where nobody answers."""
        assert self._client is not None
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self._client.request(method, self._root + path, data=data, allow_redirects=False) as response:
                text = await response.text(errors="replace")
                with contextlib.suppress(ValueError):
                    return response.status, json.loads(text)
                return response.status, None
        except TimeoutError:
            raise Unavailable(f"{self._root}{path} does not answer within {self._target.timeout_s:g} s") from None
        except (self._aiohttp.ClientError, OSError) as error:
            raise Unavailable(
                f"no server answers at {self._root} ({error}); start one, or name another by --base-url"
            ) from None


async def _read(response: aiohttp.ClientResponse, reply: Reply) -> None:
    """Reads the stream to its end into `reply`. Raises what aiohttp raises, and TooLong."""
    events = Events()
    async for chunk in response.content.iter_any():
        now = time.perf_counter()
        for event in events.feed(chunk):
            if take(reply, event, now):
                reply.end_s = now
                if reply.failure is None:
                    finish(reply, done=True)
                    # What is left is the end of the body; with it read, the connection can be used again.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await response.content.read()
                return
    reply.end_s = time.perf_counter()
    finish(reply, done=False)


def _message(text: str) -> str:
    """What an error body says, on one line."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        body = json.loads(text)
        error = body.get("error", body.get("detail", body))
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[:SHOWN] + "..."


def _tls(target: Target) -> ssl.SSLContext | bool:
    if target.ssl_ca_certs is None and target.ssl_certfile is None:
        return True
    try:
        context = ssl.create_default_context(cafile=target.ssl_ca_certs)
        if target.ssl_certfile is not None:
            context.load_cert_chain(target.ssl_certfile, target.ssl_keyfile, password="")
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            f"the certificates of --ssl-ca-certs or --ssl-certfile cannot be used ({error}); they must be PEM files, "
            "the key without a password",
            field="ssl_ca_certs",
        ) from None
    return context


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise FailedPrecondition(
            "--backend openai-chat and openai-completions need the package aiohttp, which is not installed; "
            "pip install 'jaxpd[bench]', or measure gRPC by --backend grpc",
            field="backend",
        ) from error
    return aiohttp
