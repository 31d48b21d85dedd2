"""An OpenAI server without a model, whose delays are known: `delay_server.py '{"ttft_s": 0.3, ...}'` prints its port.

Only the standard library and one loop, so that it starts at once and keeps its times. Token i leaves at arrival +
ttft_s + i * itl_s on an absolute clock; a message of k tokens leaves when its first is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import ssl
import sys
import time
from typing import Any


@dataclasses.dataclass
class Options:
    """What the server does. `refuse_every` k answers each k-th call with 429, `break_every` cuts it off half way."""

    ttft_s: float = 0.05
    itl_s: float = 0.01
    per_message: int = 1
    tokenizes: str = "words"  # "words", "bytes", or "" for no /tokenize
    usage: str = "each"  # "each" message, "end", or "" for none; what is not served is refused
    strict: bool = False  # stream_options that are not served are a 400
    template: int = 5  # tokens that a chat template adds
    refuse_every: int = 0
    break_every: int = 0
    max_rate: float | None = None  # a probe that has come faster so far gets slow_ttft_s
    slow_ttft_s: float = 0.4
    api_key: str | None = None
    max_model_len: int | None = 4096
    eos_after: int | None = None  # tokens, unless ignore_eos
    certfile: str | None = None
    keyfile: str | None = None


class Server:
    """`calls` keeps the bodies of the streamed calls, `most` the largest number that ran at once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.calls: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.running = self.most = 0
        self._arrived: dict[str, list[float]] = {}  # by the part of the request id that names a probe
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> int:
        """Listens on a free port, and returns it."""
        context = None
        if self.options.certfile is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.options.certfile, self.options.keyfile)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096, ssl=context)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Ends all connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.headers.append(headers)
                await self._answer(head[0].split()[1], headers, json.loads(body or b"{}"), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client is gone
        except asyncio.CancelledError:
            return  # by stop(); a cancelled handler would be logged
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    async def _answer(
        self, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        key = self.options.api_key
        if key is not None and headers.get("authorization") != f"bearer {key}":
            _plain(writer, 401, {"error": {"message": "no such key", "type": "auth", "param": None, "code": None}})
        elif path == "/v1/models":
            model = {"id": "delays", "object": "model"}
            if self.options.max_model_len is not None:
                model["max_model_len"] = self.options.max_model_len  # type: ignore[assignment]
            _plain(writer, 200, {"object": "list", "data": [model]})
        elif path == "/tokenize" and self.options.tokenizes:
            text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            tokens = self._tokens(text) + [0] * (self.options.template if "messages" in body else 0)
            _plain(writer, 200, {"count": len(tokens), "max_model_len": 4096, "tokens": tokens})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            await self._complete(path.endswith("chat/completions"), headers, body, writer)
        else:
            _plain(writer, 404, {"error": {"message": f"no {path}", "type": "x", "param": None, "code": None}})

    async def _complete(
        self, chat: bool, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        arrived = time.perf_counter()
        options = self.options
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        length = len(prompt if isinstance(prompt, list) else self._tokens(prompt)) + (options.template if chat else 0)
        count = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        if options.eos_after is not None and not body.get("ignore_eos"):
            count = min(count, options.eos_after)
        if not body.get("stream"):
            _plain(writer, 200, {"choices": [], "usage": {"prompt_tokens": length, "completion_tokens": count}})
            return
        wanted = body.get("stream_options") or {}
        known = {"each": {"include_usage", "continuous_usage_stats"}, "end": {"include_usage"}, "": set[str]()}
        if options.strict and set(wanted) - known[options.usage]:
            _plain(writer, 400, {"error": {"message": "stream_options is not known", "type": "x"}})
            return
        self.calls.append(body)
        number = len(self.calls) - 1  # the check that comes first is number 0
        if options.refuse_every and number and number % options.refuse_every == 0:
            _plain(writer, 429, {"error": {"message": "too many", "type": "busy", "param": None, "code": None}})
            return
        broken = bool(options.break_every and number and number % options.break_every == 0)
        times = self._arrived.setdefault(headers.get("x-request-id", "").rpartition("-")[0], [])
        times.append(arrived)
        slow = options.max_rate is not None and len(times) > 15
        slow = slow and (len(times) - 1) / (times[-1] - times[0]) > (options.max_rate or 0)
        first_s = arrived + (options.slow_ttft_s if slow else options.ttft_s)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._stream(chat, wanted, length, count, first_s, writer, broken)
        finally:
            self.running -= 1

    async def _stream(
        self,
        chat: bool,
        wanted: dict[str, bool],
        length: int,
        count: int,
        first_s: float,
        writer: asyncio.StreamWriter,
        broken: bool,
    ) -> None:
        each = self.options.usage == "each" and wanted.get("continuous_usage_stats")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for begin in range(0, count, self.options.per_message):
            await asyncio.sleep(max(0.0, first_s + begin * self.options.itl_s - time.perf_counter()))
            if broken and begin >= count // 2:
                writer.transport.abort()
                raise ConnectionResetError
            made = min(begin + self.options.per_message, count)
            text = " tok" * (made - begin)
            choice = {"index": 0, "finish_reason": "length" if made == count else None}
            choice |= {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}  # type: ignore[dict-item]
            event: dict[str, Any] = {"choices": [choice]}
            if each:
                event["usage"] = {"prompt_tokens": length, "completion_tokens": made}
            _chunk(writer, f"data: {json.dumps(event)}\n\n")
            await writer.drain()
        if self.options.usage and wanted.get("include_usage"):
            usage = {"prompt_tokens": length, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}
            _chunk(writer, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
        _chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _tokens(self, text: str) -> list[int]:
        if self.options.tokenizes == "bytes":
            return list(text.encode())
        return [sum(word.encode()) for word in text.split()]


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    data = text.encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _plain(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def _main() -> None:
    server = Server(Options(**json.loads(sys.argv[1])))
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it goes away


if __name__ == "__main__":
    asyncio.run(_main())
