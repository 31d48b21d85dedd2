"""Readers of request traces: Mooncake's JSONL, Azure's CSV, ShareGPT's JSON. The file itself shows which one it is.

- Mooncake: an object a line, `timestamp` in ms, `input_length`, `output_length`, `hash_ids` with one id for every 512
  tokens of the prompt, equal ids for equal prefixes.
- Azure: a header and rows `TIMESTAMP,ContextTokens,GeneratedTokens`.
- ShareGPT: a list of `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}`; the first
  turn is the prompt, the length of the first answer is the length to ask for. It has no times.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxpd.errors import InvalidArgument

BLOCK = 512  # tokens for each of Mooncake's hash ids
FORMATS = "Mooncake JSONL, Azure CSV and ShareGPT JSON"
_ASKING, _ANSWERING = ("human", "user"), ("gpt", "assistant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One request of a trace. `at_s` counts from the first. ShareGPT has texts instead of lengths and times."""

    at_s: float | None = None
    input_len: int = 0
    output_len: int = 0
    blocks: tuple[int, ...] = ()
    prompt: str | None = None
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace in the order of its times; `kind` is mooncake, azure or sharegpt."""

    kind: str
    rows: tuple[Row, ...]


def read_trace(path: pathlib.Path) -> Trace:
    """The requests in `path`. Raises InvalidArgument that names the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidArgument(f"--trace {path} cannot be read: {error.strerror}", field="trace") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"--trace {path} is no text file; {FORMATS} are read", field="trace") from None
    begin = text.lstrip()[:1]
    if begin == "[":
        trace = Trace("sharegpt", tuple(_sharegpt(path, text)))
    elif begin == "{":
        trace = Trace("mooncake", tuple(_mooncake(path, text)))
    else:
        trace = Trace("azure", tuple(_azure(path, text)))
    if not trace.rows:
        raise InvalidArgument(f"--trace {path} has no requests in it; {FORMATS} are read", field="trace")
    return trace if trace.kind == "sharegpt" else Trace(trace.kind, _from_zero(trace.rows))


def _mooncake(path: pathlib.Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                yield Row(
                    at_s=float(row["timestamp"]) / 1000,
                    input_len=max(1, int(row["input_length"])),
                    output_len=max(1, int(row["output_length"])),
                    blocks=tuple(int(block) for block in row.get("hash_ids", ())),
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise _bad_line(path, number, "Mooncake's", error) from None


def _azure(path: pathlib.Path, text: str) -> Iterator[Row]:
    reader = csv.reader(text.splitlines())
    header = [name.strip().lower() for name in next(reader, [])]
    try:
        when, asked, made = (header.index(name) for name in ("timestamp", "contexttokens", "generatedtokens"))
    except ValueError:
        raise InvalidArgument(
            f"--trace {path} begins with {','.join(header)[:80]!r}, which is no known trace; {FORMATS} are read "
            "(the CSV needs the columns TIMESTAMP, ContextTokens and GeneratedTokens)",
            field="trace",
        ) from None
    for row in reader:
        if row:
            try:
                yield Row(
                    at_s=_seconds(row[when]),
                    input_len=max(1, int(row[asked])),
                    output_len=max(1, int(row[made])),
                )
            except (ValueError, IndexError) as error:
                raise _bad_line(path, reader.line_num, "Azure's", error) from None


def _sharegpt(path: pathlib.Path, text: str) -> Iterator[Row]:
    try:
        talks = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"--trace {path} begins like JSON, but is none: {error}", field="trace") from None
    for talk in talks:
        turns = talk.get("conversations", talk.get("messages")) if isinstance(talk, dict) else None
        if not isinstance(turns, list):
            raise InvalidArgument(
                f"--trace {path} is a JSON list of something else than ShareGPT's conversations; {FORMATS} are read",
                field="trace",
            )
        said = [(_string(turn, "from", "role"), _string(turn, "value", "content")) for turn in turns]
        while said and said[0][0] not in _ASKING:  # a system prompt, or the end of a talk that was cut in two
            said.pop(0)
        if len(said) >= 2 and said[1][0] in _ANSWERING and said[0][1].strip() and said[1][1].strip():
            yield Row(prompt=said[0][1], answer=said[1][1])


def _seconds(text: str) -> float:
    """Of a time stamp; one without a zone is taken as UTC, so that no clock change shifts it."""
    moment = datetime.datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _string(turn: Any, *names: str) -> str:
    """The first of `names` that the turn has, if it is a text."""
    found = next((turn[name] for name in names if name in turn), None) if isinstance(turn, dict) else None
    return found if isinstance(found, str) else ""


def _from_zero(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    ordered = sorted(rows, key=lambda row: row.at_s or 0.0)
    first = ordered[0].at_s or 0.0
    return tuple(dataclasses.replace(row, at_s=(row.at_s or 0.0) - first) for row in ordered)


def _bad_line(path: pathlib.Path, number: int, whose: str, error: Exception) -> InvalidArgument:
    what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return InvalidArgument(
        f"--trace {path}, line {number}, is not in {whose} format ({what}); {FORMATS} are read", field="trace"
    )
