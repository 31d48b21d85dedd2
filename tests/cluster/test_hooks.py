"""The rules of the hooks: what is held, lost or doubled, and that everything else passes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from jaxpd.remote.messages import FirstToken, Reserve, Reserved
from meshes.transfer.messages import Ack
from tests.cluster.hooks import Hooks


@pytest.fixture
def told() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def hooks(told: list[dict[str, Any]]) -> Hooks:
    return Hooks(lambda **values: told.append(values))


def pass_all(hooks: Hooks, *messages: Any, way: str = "in") -> list[Any]:
    """What came through, now or when it is let go later."""
    came: list[Any] = []
    for message in messages:
        hooks.passing(way, message, functools.partial(came.append, message))
    return came


def test_a_hold_takes_one_hand_off_until_it_is_released(hooks: Hooks, told: list[dict[str, Any]]) -> None:
    hooks.hold(what="FirstToken", way="in")
    came = pass_all(hooks, Reserve(1), FirstToken(1, 7), FirstToken(2, 8))
    assert came == [Reserve(1), FirstToken(2, 8)]
    assert {"event": "held", "what": "FirstToken", "handoff": 1} in told
    assert pass_all(hooks, FirstToken(3, 9), way="out") == [FirstToken(3, 9)]
    hooks.release()
    assert came == [Reserve(1), FirstToken(2, 8), FirstToken(1, 7)]
    assert pass_all(hooks, FirstToken(1, 7)) == [FirstToken(1, 7)]


def test_a_disarmed_hold_takes_nobody(hooks: Hooks) -> None:
    hooks.hold(what="Reserved")
    hooks.disarm()
    assert pass_all(hooks, Reserved(1, 0)) == [Reserved(1, 0)]


def test_lost_and_doubled(hooks: Hooks) -> None:
    hooks.drop(what="Ack")
    hooks.duplicate(what="Reserve")
    assert pass_all(hooks, Ack(1, 1), Reserve(5), Ack(2, 1)) == [Reserve(5), Reserve(5), Ack(2, 1)]
    hooks.clear()
    assert pass_all(hooks, Ack(1, 1), Reserve(5)) == [Ack(1, 1), Reserve(5)]


def test_the_last_message_once_more(hooks: Hooks) -> None:
    assert not hooks.repeat(what="Ack")
    came = pass_all(hooks, Ack(1, 1), Ack(2, 1))
    assert hooks.repeat(what="Ack")
    assert came == [Ack(1, 1), Ack(2, 1), Ack(2, 1)]
