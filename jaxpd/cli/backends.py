"""What runs the prompts of `jaxpd generate`: an engine in this process, or a server. Both answer with `Result`s."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jaxpd.cli.prompts import Prompt
from jaxpd.cli.render import Result
from jaxpd.errors import InvalidArgument, JaxpdError
from jaxpd.progress import Progress
from jaxpd.request import FinishReason, SamplingParams, Timings, Usage

MAX_CALLS = 64  # to a server at once, one thread each


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of a stream; `text` is None where the model has no tokenizer."""

    token_ids: tuple[int, ...]
    text: str | None


class Backend(Protocol):
    """Runs prompts. A request that fails by itself is a `Result` with its error; the others run on."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[Result]]:
        """All at once; the samples of each prompt, in the order of the prompts."""
        ...

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Piece | Result]:
        """Pieces as they come, then the result; for `params.n` of 1."""
        ...


def failed(error: JaxpdError) -> Result:
    """The result of a request that was refused."""
    usage = Usage(prompt_tokens=0, completion_tokens=0)
    return Result((), "", FinishReason.ERROR, usage, Timings(), error)


@contextlib.contextmanager
def local(model: str, progress: Progress, config: dict[str, Any]) -> Iterator[Backend]:
    """An engine in this process; `config` are fields of `EngineConfig`."""
    from jaxpd.llm import LLM

    with LLM(model, progress=progress, **config) as llm:
        yield _Local(llm)


@contextlib.contextmanager
def remote(address: str, model: str | None, way: dict[str, Any]) -> Iterator[Backend]:
    """A server at "host:port"; `way` are options of `serving.client.Client` such as its API key.

    Raises InvalidArgument where `model` is given and not the one it serves.
    """
    from serving.client import Client

    with Client(address, **way) as client:
        if model is not None and (served := client.model_info().name) != model:
            raise InvalidArgument(
                f"MODEL {model} is not what --server {address} serves, that is {served}; leave MODEL out", field="model"
            )
        yield _Remote(client)


class _Local:
    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[Result]]:
        results = [_completed(c) for c in self._llm.generate([p.value for p in prompts], params)]
        return [results[i : i + params.n] for i in range(0, len(results), params.n)]

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Piece | Result]:
        from jaxpd.llm import Completion

        for item in self._llm.stream(prompt.value, params):
            yield _completed(item) if isinstance(item, Completion) else Piece(item.token_ids, item.text)


def _completed(completion: Any) -> Result:
    c = completion
    scores = None if c.prompt_logprobs is None else tuple(zip(c.prompt_ids[1:], c.prompt_logprobs, strict=True))
    return Result(tuple(c.token_ids), c.text, c.finish_reason, c.usage, c.timings, c.error, c.logprobs, scores)


class _Remote:
    def __init__(self, client: Any) -> None:
        self._client = client

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[Result]]:
        with concurrent.futures.ThreadPoolExecutor(min(len(prompts), MAX_CALLS)) as pool:
            return list(pool.map(lambda prompt: self._call(prompt, params), prompts))

    def _call(self, prompt: Prompt, params: SamplingParams) -> list[Result]:
        try:
            answer = self._client.generate(_request(prompt, params))
        except JaxpdError as error:
            return [failed(error)]
        prompt_ids, scores = answer.understood.prompt_ids, answer.prompt_logprobs
        scored = None if scores is None or prompt_ids is None else tuple(zip(prompt_ids[1:], scores, strict=True))
        results = []
        for sample in answer.samples:
            end, of_prompt = sample.finished, scored if sample.index == 0 else None
            results.append(
                Result(
                    sample.token_ids,
                    sample.text or "",
                    end.reason,
                    end.usage,
                    end.timings,
                    end.error,
                    sample.logprobs,
                    of_prompt,
                )
            )
        return results

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Piece | Result]:
        from serving.messages import Finished, Tokens

        ids: list[int] = []
        texts: list[str] = []
        for message in self._client.stream(_request(prompt, params)):
            match message:
                case Tokens():
                    ids.extend(message.token_ids)
                    if message.text is not None:
                        texts.append(message.text)
                    yield Piece(message.token_ids, message.text)
                case Finished() as end:
                    text = "".join(texts) if texts else None
                    yield Result(tuple(ids), text, end.reason, end.usage, end.timings, end.error)


def _request(prompt: Prompt, params: SamplingParams) -> Any:
    """What differs from the defaults, which a server has too."""
    from serving.messages import GenerateRequest

    options = {field.name: getattr(params, field.name) for field in dataclasses.fields(SamplingParams)}
    plain = {field.name: getattr(SamplingParams(), field.name) for field in dataclasses.fields(SamplingParams)}
    kept = {name: value for name, value in options.items() if name == "max_tokens" or value != plain[name]}
    return GenerateRequest(
        text=prompt.text,
        token_ids=prompt.token_ids,
        chat=prompt.chat,
        want_prompt_ids=params.prompt_logprobs is not None or None,
        **kept,
    )
