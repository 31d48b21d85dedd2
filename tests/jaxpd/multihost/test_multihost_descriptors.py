"""Descriptors survive the wire, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpd.multihost import descriptors as d
from jaxpd.multihost.descriptors import decode, encode

PACKED = np.arange(-4, 8, dtype=np.int32).reshape(2, 6)
ALL: list[d.Descriptor] = [
    d.Setup("0.1", "{}", "prefill", (2, 1), "bfloat16", "auto", 600, 16, 8, ((16, 16, 10), (64, 8, 10))),
    d.Begin(5.0),
    d.Goodbye(),
    d.Step((16, 2, 10), PACKED),
    d.Forward((16, 2, 10), PACKED),
    d.Sample(None),
    d.Sample(np.full((1, 2, 3), -1, np.int32)),
    d.Score(1, np.array([5, 6], np.int32), 7, np.array([3, 1], np.int32), 2, np.array([6], np.int32)),
    d.SetSlot(0, 3, np.arange(9, dtype=np.int32), None),
    d.SetSlot(0, 3, np.arange(9, dtype=np.int32), np.arange(5, dtype=np.uint16)),
    d.Gather(9, 1, np.array([4, 2], np.int32)),
    d.OpenTransport(1, 2, 1 << 33, 1024, 30.5),
    d.CloseTransport(1),
    d.OfferPiece(1, 9, (1 << 64) - 1),
    d.EndOffer(1, (1 << 64) - 1, "acked", "acknowledged"),
    d.DropPiece(9),
    d.Ready(),
    d.Failed("no memory: ü"),
    d.Offered(1, 5, (1 << 64) - 2, "[fd00::5]:7000"),
    d.Freed(1, 5, "expired", "nobody took it"),
]


def fields(descriptor: Any) -> list[Any]:
    return [type(descriptor), *(getattr(descriptor, f.name) for f in dataclasses.fields(descriptor))]


@pytest.mark.parametrize("descriptor", ALL, ids=lambda it: type(it).__name__)
def test_a_descriptor_survives_the_wire(descriptor: d.Descriptor) -> None:
    for sent, got in zip(fields(descriptor), fields(decode(encode(descriptor))), strict=True):
        assert type(sent) is type(got)
        if isinstance(sent, np.ndarray):
            assert sent.dtype == got.dtype
            np.testing.assert_array_equal(sent, got)
        else:
            assert sent == got


def test_every_kind_is_covered() -> None:
    assert {type(it) for it in ALL} == set(d.Descriptor.__args__)  # type: ignore[attr-defined]


def test_a_step_is_little_more_than_its_batch() -> None:
    packed = np.zeros((1, 4000), np.int32)
    assert len(encode(d.Step((512, 8, 128), packed))) < packed.nbytes + 80


def test_keys_are_not_shown() -> None:
    assert "4711" not in repr(d.Offered(1, 5, 4711, "10.0.0.5:7000"))


@given(st.sampled_from(ALL), st.integers(1, 40))
def test_a_message_that_was_cut_off_is_refused(descriptor: d.Descriptor, cut: int) -> None:
    message = encode(descriptor)
    with pytest.raises(ValueError):
        decode(message[: -min(cut, len(message) - 1)])
    with pytest.raises(ValueError):
        decode(message + bytes(cut))


@given(st.binary(max_size=60))
def test_any_other_bytes_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError):
        decode(message)
