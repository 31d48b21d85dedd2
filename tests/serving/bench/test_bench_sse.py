"""Server-sent events in all the forms that they may come in."""

from __future__ import annotations

import random

import pytest

from serving.bench import sse
from serving.bench.sse import Events, TooLong


def read(*chunks: bytes) -> list[str]:
    events = Events()
    return [event for chunk in chunks for event in events.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b": ping\n\ndata: a\n: in between\n\n: ping\n\n", ["a"]),
        (b"event: x\nid: 7\nretry: 10\ndata: a\n\n", ["a"]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"data: a\r\ndata: b\r\n\r\n", ["a\nb"]),  # cut between CR and LF, this is no empty line
        (b"data:a\n\ndata:  b\n\n", ["a", " b"]),  # one space belongs to the field, a second to the data
        (b"data\n\n", [""]),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b"data: \xe2\x82\xac\n\n", ["\u20ac"]),
        (b"data: \xff\n\n", ["\ufffd"]),
        (b"data: a\n\ndata: cut", ["a"]),
        (b"data: a\n\ndata: cut\n", ["a"]),
        (b"database: x\n\n\n\n", []),
        (b"data: a b: c\n\n", ["a b: c"]),
    ],
)
def test_every_form_in_one_read_and_byte_by_byte(stream: bytes, events: list[str]) -> None:
    assert read(stream) == events
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == events
    assert read(*(piece for i in range(len(stream)) for piece in (stream[i : i + 1], b""))) == events


def test_any_cut_gives_the_same_events() -> None:
    rng = random.Random(0)
    stream = "".join(
        f"data: {'é€😀' * (i % 4)}{i}{end}{end}" for i, end in enumerate(["\n", "\r\n", "\r"] * 30)
    ).encode()
    whole = read(stream)
    assert len(whole) == 90
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(stream)), 20))
        assert read(*(stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True))) == whole


def test_a_server_that_never_ends_its_event_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MOST_BYTES", 100)
    with pytest.raises(TooLong):
        read(b"data: " + b"x" * 60, b"y" * 60)
    with pytest.raises(TooLong):
        read(*[b"data: xxxxxxxxxx\n"] * 20)
