"""`jaxpd generate`: prompts in, text or JSON out, on an engine in this process or on a server."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from jaxpd.cli import backends, connection, options, prompts, structured
from jaxpd.cli.progress import console_progress
from jaxpd.cli.render import Result, result_json, summary
from jaxpd.errors import InvalidArgument
from jaxpd.request import SamplingParams

PROMPT = "Prompt (give one)"
SAMPLING = "Sampling"
MATCHING = "What the answer matches (give one)"
OUTPUT = "Where it runs, what it prints"
ANY_VOCAB = 2**31  # sampling parameters are checked before a model, and with it a vocabulary, is there


def generate(
    model: options.OptionalModel = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text to continue.", show_default=False, rich_help_panel=PROMPT),
    ] = None,
    prompt_ids: Annotated[
        str | None,
        typer.Option(metavar="1,2,3", help="Token ids to continue.", show_default=False, rich_help_panel=PROMPT),
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A user's message, put into the model's chat template.",
            show_default=False,
            rich_help_panel=PROMPT,
        ),
    ] = None,
    prompt_file: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON list of {"prompt_ids": [...]}, {"text": ...} or {"chat": [...]}, or an object whose `prompts` '
            "is such a list. All run at once.",
            show_default=False,
            rich_help_panel=PROMPT,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="Most tokens to generate.", rich_help_panel=SAMPLING)
    ] = SamplingParams.max_tokens,
    n: Annotated[
        int, typer.Option("--n", metavar="N", help="Answers to each prompt.", rich_help_panel=SAMPLING)
    ] = SamplingParams.n,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 takes the likeliest token.", rich_help_panel=SAMPLING)
    ] = SamplingParams.temperature,
    top_k: Annotated[
        int, typer.Option(metavar="K", help="Draw from the K likeliest tokens; 0 for all.", rich_help_panel=SAMPLING)
    ] = SamplingParams.top_k,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P", help="Draw from the likeliest tokens that make up this probability.", rich_help_panel=SAMPLING
        ),
    ] = SamplingParams.top_p,
    min_p: Annotated[
        float,
        typer.Option(
            metavar="P", help="Draw from tokens at least P times as likely as the likeliest.", rich_help_panel=SAMPLING
        ),
    ] = SamplingParams.min_p,
    repetition_penalty: Annotated[
        float,
        typer.Option(metavar="R", help="Above 1 avoids tokens of prompt and answer.", rich_help_panel=SAMPLING),
    ] = SamplingParams.repetition_penalty,
    presence_penalty: Annotated[
        float,
        typer.Option(metavar="X", help="Above 0 avoids tokens of the answer.", rich_help_panel=SAMPLING),
    ] = SamplingParams.presence_penalty,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            metavar="X", help="Above 0 avoids tokens of the answer, each time more.", rich_help_panel=SAMPLING
        ),
    ] = SamplingParams.frequency_penalty,
    logit_bias: Annotated[
        str | None,
        typer.Option(
            metavar="ID:BIAS,...",
            help="Added to the logits of these tokens, such as 50:-100,7:2.5.",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    min_tokens: Annotated[
        int,
        typer.Option(metavar="N", help="No end-of-sequence token among the first N tokens.", rich_help_panel=SAMPLING),
    ] = SamplingParams.min_tokens,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End the answer before this text; give it again for more than one.",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    stop_token_ids: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,3",
            help="End the answer at one of these tokens, as at the end of a sequence.",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --json: the log probability of each token, and the N likeliest beside it (0 to 20).",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --json: the same for each token of the prompt but the first.",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="S", help="Makes sampling repeatable.", show_default="drawn", rich_help_panel=SAMPLING),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.", rich_help_panel=SAMPLING)
    ] = False,
    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|{...}",
            help="JSON that this JSON schema accepts.",
            show_default=False,
            rich_help_panel=MATCHING,
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Text that this regular expression matches as a whole.",
            show_default=False,
            rich_help_panel=MATCHING,
        ),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="This text; give it again for each other that it may be.",
            show_default=False,
            rich_help_panel=MATCHING,
        ),
    ] = None,
    grammar: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Text of the context-free grammar in this file, in Lark's notation.",
            show_default=False,
            rich_help_panel=MATCHING,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ask this server instead of starting an engine here.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    api_key: connection.ApiKey = None,
    api_key_file: connection.ApiKeyFile = None,
    tls: connection.Tls = False,
    ssl_ca_certs: connection.SslCaCerts = None,
    ssl_certfile: connection.SslCertfile = None,
    ssl_keyfile: connection.SslKeyfile = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object for each prompt (a list for --prompt-file); with --n above 1, a list of "
            "objects for each.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    mode: options.Mode = None,
    mesh: options.Mesh = None,
    prefill_mesh: options.PrefillMesh = None,
    decode_mesh: options.DecodeMesh = None,
    local_prefill: options.LocalPrefill = None,
    max_model_len: options.MaxModelLen = None,
    page_size: options.PageSize = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    kv_memory: options.KvMemory = None,
    reserve_tokens: options.ReserveTokens = None,
    step_timeout: options.StepTimeout = None,
    dtype: options.Dtype = None,
    prefix_cache: options.PrefixCache = None,
    kernels: options.Kernels = None,
    precompile: options.Precompile = None,
    compile_cache: options.CompileCache = None,
) -> None:
    """Generate text from prompts, in this process or on a server."""
    params = SamplingParams(
        max_tokens=max_tokens,
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=options.parse_logit_bias(logit_bias) if logit_bias is not None else {},
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=(
            options.parse_token_ids(stop_token_ids, flag="--stop-token-ids") if stop_token_ids is not None else ()
        ),
        ignore_eos=ignore_eos,
        structured=structured.from_flags(json_schema, regex, choice, grammar),
    )
    params.validate(vocab_size=ANY_VOCAB)
    for field, asked in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if asked is not None and not as_json:
            flag = f"--{field.replace('_', '-')}"
            raise InvalidArgument(f"{flag} {asked} is shown in JSON only; add --json", field=field)
    inputs = prompts.from_flags(prompt, prompt_ids, chat, prompt_file)
    engine = options.engine_fields(
        mode=mode,
        mesh=mesh,
        prefill_mesh=prefill_mesh,
        decode_mesh=decode_mesh,
        local_prefill=local_prefill,
        max_model_len=max_model_len,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_memory=kv_memory,
        reserve_tokens=reserve_tokens,
        step_timeout_s=step_timeout,
        dtype=dtype,
        prefix_cache=prefix_cache,
        kernels=kernels,
        precompile=False if precompile is None and server is None else precompile,
        compile_cache=compile_cache,
    )
    way = {
        "api_key": connection.read_api_key(api_key, api_key_file),
        "tls": tls or None,
        "ca_certs": ssl_ca_certs,
        "certfile": ssl_certfile,
        "keyfile": ssl_keyfile,
    }
    with _backend(server, model, engine, {name: value for name, value in way.items() if value is not None}) as backend:
        streams = not as_json and len(inputs) == n == 1  # what comes interleaved is shown when it is whole
        results = [[_stream(backend, inputs[0], params)]] if streams else backend.generate(inputs, params)
    if as_json:
        values = [_value(samples, n) for samples in results]
        print(json.dumps(values if prompt_file is not None else values[0]), flush=True)
    elif not streams:
        _print_all(results)
    for item, samples in zip(inputs, results, strict=True):
        for i, result in enumerate(samples):
            where = [item.label] * (prompt_file is not None) + [f"sample {i}"] * (len(samples) > 1)
            _report(result, "".join(f"{part}: " for part in where), with_summary=not as_json)
    errors = [result.error for samples in results for result in samples if result.error is not None]
    if errors:
        raise typer.Exit(errors[0].exit_code)


def _value(samples: Sequence[Result], n: int) -> Any:
    """What `--json` prints for one prompt: an object, or a list of them where several samples were asked for."""
    objects = [result_json(result) for result in samples]
    return objects if n > 1 else objects[0]


def _print_all(results: Sequence[Sequence[Result]]) -> None:
    """Every answer under a heading that says which prompt and which sample it belongs to, where there are several."""
    for i, samples in enumerate(results):
        for j, result in enumerate(samples):
            parts = [f"prompt {i}"] * (len(results) > 1) + [f"sample {j}"] * (len(samples) > 1)
            print(f"--- {', '.join(parts)}\n{_shown(result.token_ids, result.text)}", flush=True)


def _report(result: Result, where: str, *, with_summary: bool) -> None:
    """The line about one answer on stderr."""
    if result.error is not None:
        print(f"{where}error: {result.error}", file=sys.stderr)
    elif with_summary:
        print(f"{where}{summary(result)}", file=sys.stderr)


def _backend(
    server: str | None, model: str | None, engine: dict[str, Any], way: dict[str, Any]
) -> contextlib.AbstractContextManager[backends.Backend]:
    """The backend that the flags name. Raises InvalidArgument for engine flags beside --server, and others without."""
    if server is None:
        if way:
            raise InvalidArgument(
                "API keys and TLS are for a server, and none is named; add --server HOST:PORT or leave them out",
                field=next(iter(way)),
            )
        return backends.local(model or options.DEFAULT_MODEL, console_progress(), engine)
    if engine:
        flags = ", ".join(map(options.flag_of, engine))
        raise InvalidArgument(
            f"{flags} cannot go with --server {server}, whose meshes and limits were chosen at its start; leave it out",
            field=next(iter(engine)),
        )
    return backends.remote(options.parse_address(server), model, way)


def _stream(backend: backends.Backend, prompt: prompts.Prompt, params: SamplingParams) -> Result:
    result: Result | None = None
    for item in backend.stream(prompt, params):
        if isinstance(item, Result):
            result = item
        else:
            sys.stdout.write(_shown(item.token_ids, item.text))
            sys.stdout.flush()
    print(flush=True)
    assert result is not None, "a stream without a result"
    return result


def _shown(token_ids: Sequence[int], text: str | None) -> str:
    """Text; token ids where the model has no tokenizer."""
    return text if text is not None else "".join(f"{token} " for token in token_ids)
