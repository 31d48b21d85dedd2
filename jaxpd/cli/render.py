"""How numbers, completions and tables look on the command line and in its JSON."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from jaxpd.errors import JaxpdError
from jaxpd.request import FinishReason, Timings, TokenLogprobs, Usage

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one prompt. `text` is None where the model has no tokenizer; `error` is set where it failed."""

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    error: JaxpdError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one a token, where asked for
    # of the prompt, from its second token on: (token id, its log probabilities), where asked for
    prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] | None = None


def seconds(value: float) -> str:
    """ "0.04 s", "3.2 s", "48 s", "2 min 5 s"."""
    if value < 0.1:
        return f"{value:.2f} s"
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value // 60:.0f} min {value % 60:.0f} s"


def amount(value: float, unit: str, *, of: float | None = None) -> str:
    """ "3/12 programs", "9.4/15.0 GiB", "41 tensors": `unit` "bytes" is scaled to what `of` (or `value`) needs."""
    if unit != "bytes":
        return " ".join(part for part in (f"{value:g}" + (f"/{of:g}" if of is not None else ""), unit) if part)
    largest = value if of is None else of
    power = 0
    while largest >= 1024 and power < len(_BYTES) - 1:
        largest /= 1024
        power += 1
    scale = 1024**power
    digits = 1 if power else 0
    shown = f"{value / scale:.{digits}f}"
    return f"{shown}/{of / scale:.{digits}f} {_BYTES[power]}" if of is not None else f"{shown} {_BYTES[power]}"


def result_json(done: Result) -> dict[str, Any]:
    """The object that `--json` prints for one answer; `error` is there only where the request failed, `logprobs` and
    `prompt_logprobs` only where it asked for them (the latter in the first sample).
    """
    out: dict[str, Any] = {
        "token_ids": list(done.token_ids),
        "text": done.text,
        "finish_reason": str(done.finish_reason),
        "usage": dataclasses.asdict(done.usage),
        "timings": dataclasses.asdict(done.timings),
    }
    if done.logprobs is not None:
        out["logprobs"] = [_logprobs_json(token) for token in done.logprobs]
    if done.prompt_logprobs is not None:
        out["prompt_logprobs"] = [{"token_id": i, **_logprobs_json(token)} for i, token in done.prompt_logprobs]
    if done.error is not None:
        out["error"] = {"code": done.error.code, "message": str(done.error)}
    return out


def _logprobs_json(token: TokenLogprobs) -> dict[str, Any]:
    return {"logprob": token.logprob, "top": [{"token_id": i, "logprob": p} for i, p in token.top]}


def summary(done: Result) -> str:
    """One line for a person: how much came, why it ended, how fast."""
    usage, timings = done.usage, done.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [f"{usage.prompt_tokens}{cached} + {usage.completion_tokens} tokens", f"ended by {done.finish_reason}"]
    if timings.ttft_s is not None:
        parts.append(f"first token after {seconds(timings.ttft_s)}")
    if timings.transfer_s is not None:
        parts.append(f"hand-off {timings.transfer_s * 1e3:.1f} ms")
    if timings.decode_s and usage.completion_tokens > 1:
        parts.append(f"then {(usage.completion_tokens - 1) / timings.decode_s:.1f} tokens/s")
    return ", ".join(parts)


def rows(table: Mapping[str, str]) -> list[str]:
    """Lines of a two-column table."""
    width = max(map(len, table), default=0)
    return [f"{key:<{width}}  {value}" for key, value in table.items()]


def command_name() -> str:
    """How the person who started this command can type `jaxpd` again: with its folder where PATH does not have it."""
    mine = os.path.join(os.path.dirname(sys.executable), "jaxpd")
    found = shutil.which("jaxpd")
    if found is not None and (not os.path.exists(mine) or os.path.samefile(found, mine)):
        return "jaxpd"
    if not os.path.exists(mine):
        return f"{os.path.basename(sys.executable)} -m jaxpd"
    relative = os.path.relpath(mine)
    if relative.startswith(os.pardir):
        return mine
    return relative if os.sep in relative else os.path.join(os.curdir, relative)
