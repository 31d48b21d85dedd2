"""The hand-shake names both values; offers that make no sense are not made; leases end exactly once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from meshes.heads import head_layout
from meshes.transfer.identity import COMPARED, PROTOCOL, Identity, IdentityMismatch, agree
from meshes.transfer.leases import Leases
from meshes.transfer.messages import Offer, Source
from tests.meshes.fake_link import FakeClock, make_offer

IDENTITY = Identity("sha256:abc", "bfloat16", 16, 30, 9, 3, 128, 1)
OTHER: dict[str, Any] = {
    "model": "sha256:def",
    "dtype": "float32",
    "page_size": 32,
    "num_layers": 24,
    "num_heads": 12,
    "num_kv_heads": 9,
    "lanes": 256,
    "streams": 4,
}


def test_equal_identities_agree() -> None:
    assert agree(IDENTITY, IDENTITY, "decode 10.0.0.2:9") == PROTOCOL


@pytest.mark.parametrize("field", OTHER)
def test_each_difference_is_named_with_both_values(field: str) -> None:
    theirs = dataclasses.replace(IDENTITY, **{field: OTHER[field]})
    with pytest.raises(IdentityMismatch) as caught:
        agree(IDENTITY, theirs, "decode 10.0.0.2:9")
    message = str(caught.value)
    assert "decode 10.0.0.2:9" in message
    assert str(OTHER[field]) in message and str(getattr(IDENTITY, field)) in message
    assert ": start both with" in message or ": load the same" in message


def test_every_field_is_compared() -> None:
    compared = set(COMPARED) | {"protocol", "oldest_protocol"}
    assert compared == {field.name for field in dataclasses.fields(Identity)} and set(OTHER) == set(COMPARED)


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [((3, 2), (3, 2), 3), ((3, 2), (2, 1), 2), ((2, 1), (3, 2), 2), ((3, 2), (1, 1), None), ((1, 1), (3, 2), None)],
)
def test_one_protocol_version_back_is_understood(ours: Any, theirs: Any, version: int | None) -> None:
    a, b = (dataclasses.replace(IDENTITY, protocol=p, oldest_protocol=o) for p, o in (ours, theirs))
    if version is not None:
        assert agree(a, b, "peer") == version
    else:
        with pytest.raises(IdentityMismatch, match=r"protocol (1|2 to 3), this process (1|2 to 3): upgrade"):
            agree(a, b, "peer")


def test_an_offer_knows_its_bytes() -> None:
    offer = Offer(1, 1, 2, "h:1", head_layout(9, 3, 8), (1, 30, 4, 16, 128), "bfloat16", 1.0)
    assert offer.nbytes == 3 * 30 * 4 * 16 * 128 * 2


def test_an_offer_knows_where_each_head_is() -> None:
    offer = make_offer(1)
    assert offer.sources == (Source(offer.address, offer.key, (0, 1)),)
    other, third = Source("h:1", 5, (0,)), Source("h:2", 6, (1,))
    assert dataclasses.replace(offer, elsewhere=(other,)).sources == (Source(offer.address, offer.key, (1,)), other)
    assert dataclasses.replace(offer, elsewhere=(third, other)).sources == (third, other)
    assert "5" not in repr(other)


def test_the_key_is_not_shown() -> None:
    assert "key" not in repr(make_offer(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": 1 << 64},
        {"id": -1},
        {"key": 1 << 64},
        {"generation": 0},
        {"lease_s": 0.0},
        {"lease_s": float("inf")},
        {"lease_s": float("nan")},
        {"shape": ()},
        {"shape": (2, 3)},
        {"shape": (1, 0)},
        {"dtype": "float13"},
        {"elsewhere": (Source("h:1", 1, (0, 0)),)},
        {"elsewhere": (Source("h:1", 1, (0,)), Source("h:2", 2, (0, 1)))},
        {"elsewhere": (Source("h:1", 1, (2,)),)},
    ],
    ids=str,
)
def test_offers_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(make_offer(1), **wrong)


def leases(max_bytes: int = 100, max_count: int = 3, **kwargs: Any) -> tuple[Leases, FakeClock]:
    clock = FakeClock()
    return Leases(max_bytes, max_count, clock=clock, **kwargs), clock


def test_bytes_and_number_are_bounded() -> None:
    book, _ = leases()
    first, second = book.grant(60), book.grant(40)
    assert first is not None and second is not None and book.grant(1) is None
    assert book.end(first.id) == first
    assert book.used_bytes == 100 and book.grant(1) is None, "ended, but its memory is not free yet"
    book.free(first)
    assert book.grant(20) is not None and book.grant(20) is not None
    assert book.used_bytes == 80 and book.grant(1) is None, "three live"


def test_one_that_is_larger_than_the_bound_goes_alone() -> None:
    book, _ = leases()
    assert (large := book.grant(1000)) is not None and book.grant(1) is None
    book.end(large.id)
    book.free(large)
    assert book.grant(1) is not None and book.grant(1000) is None


def test_a_lease_ends_once_and_in_its_generation() -> None:
    book, clock = leases()
    assert (lease := book.grant(10)) is not None
    assert book.end(lease.id, 1) is None, "never offered: nobody can have it"
    assert (started := book.start(lease.id, 5.0)) is not None and started.generation == 1
    assert (again := book.start(lease.id, 5.0)) is not None and again.generation == 2
    assert book.end(lease.id, 1) is None
    assert book.end(lease.id, 2) == again and book.end(lease.id, 2) is None and book.end(lease.id) is None
    assert book.start(lease.id, 5.0) is None and len(book) == 0


def test_leases_run_from_their_start() -> None:
    book, clock = leases()
    assert (a := book.grant(1)) is not None and (b := book.grant(1)) is not None
    clock.now += 100
    assert book.expired() == [] and book.next_end_s() is None, "what is not offered does not run"
    book.start(a.id, 5.0)
    book.start(b.id, 7.0)
    assert book.next_end_s() == clock.now + 5
    clock.now += 5
    assert [lease.id for lease in book.expired()] == [a.id]
    book.start(a.id, 3.0)
    assert book.expired() == [] and book.next_end_s() == clock.now + 2


def test_an_id_that_is_taken_is_drawn_again() -> None:
    drawn = iter([7, 7, 7, 8])
    book, _ = leases(draw=lambda: next(drawn))
    assert [lease.id for _ in range(2) if (lease := book.grant(1)) is not None] == [7, 8]


def test_ids_have_64_random_bits() -> None:
    book, _ = leases(max_bytes=1000, max_count=1000)
    ids = [lease.id for _ in range(200) if (lease := book.grant(1)) is not None]
    assert len(set(ids)) == 200
    assert all(0.2 < sum(id >> bit & 1 for id in ids) / 200 < 0.8 for bit in range(64))
