"""A link over which no array moves: the test says what arrives, and when; and a clock that it sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from meshes.heads import head_layout
from meshes.transfer.messages import Offer

LAYOUT = head_layout(4, 2, 2)
SHAPE = (1, 2, 3, 4, 8)
NBYTES = 2 * 2 * 3 * 4 * 8 * 4  # of an offer: two true heads, float32


class FakeClock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass(eq=False)
class FakeArray:
    """What the transport asks of an array."""

    ready: bool = True
    error: Exception | None = None
    shape: tuple[int, ...] = SHAPE
    dtype: str = "float32"

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> FakeArray:
        assert self.ready, "somebody waits for what is not there"
        if self.error is not None:
            raise self.error
        return self


def heads(**kwargs: Any) -> list[Any]:
    """The true heads of an offer with `LAYOUT`."""
    return [FakeArray(**kwargs) for _ in range(LAYOUT.num_kv_heads)]


@dataclasses.dataclass(eq=False)
class FakePull:
    """A pull that settles when the test calls `arrive` or `fail`."""

    address: str
    key: int
    wanted: list[jax.ShapeDtypeStruct]
    arrays: list[Any] | None = None
    error: Exception | None = None
    taken: int = 0

    def arrive(self, **kwargs: Any) -> None:
        self.arrays = heads(**kwargs)

    def fail(self, error: Exception | None = None) -> None:
        self.error = error or RuntimeError("Connection closed")

    def settled(self) -> bool:
        return self.arrays is not None or self.error is not None

    def wait(self) -> None:
        assert self.settled(), "this would hang"
        if self.error is not None:
            raise self.error

    def take(self) -> list[Any]:
        self.taken += 1
        if self.error is not None:
            raise self.error
        assert self.arrays is not None, "taken before it was settled"
        return self.arrays


class FakeLink:
    """Remembers what it was told."""

    address = "10.0.0.1:7"

    def __init__(self) -> None:
        self.there: dict[int, list[Any]] = {}
        self.withdrawn: list[int] = []
        self.pulls: list[FakePull] = []
        self.cuts: list[str] = []
        self.broken: Exception | None = None
        self.closed = False

    def put(self, key: int, arrays: Sequence[Any]) -> None:
        if self.broken is not None:
            raise self.broken
        assert all(array.ready and array.error is None for array in arrays), "a server must not get such arrays"
        assert key not in self.there
        self.there[key] = list(arrays)

    def withdraw(self, key: int) -> None:
        if self.broken is not None:
            raise self.broken
        self.there.pop(key, None)
        self.withdrawn.append(key)

    def pull(self, address: str, key: int, wanted: Sequence[jax.ShapeDtypeStruct]) -> FakePull:
        if self.broken is not None:
            raise self.broken
        self.pulls.append(FakePull(address, key, list(wanted)))
        return self.pulls[-1]

    def cut(self, address: str) -> None:
        self.cuts.append(address)

    def close(self) -> None:
        self.closed = True


def make_offer(id: int, *, generation: int = 1, lease_s: float = 30.0, address: str = "10.0.0.2:7") -> Offer:
    """An offer of `NBYTES` bytes."""
    return Offer(id, generation, id + 100, address, LAYOUT, SHAPE, "float32", lease_s)
