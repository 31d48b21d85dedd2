"""What the two sides of the remote transport say to each other. Nothing is sent here: the caller carries the messages.

    offering side                                   pulling side
        Offer    "this piece lies ready"     --->
                                             <---      Ack      "I have it": its staging is free
                                             <---      Refuse   "I shall not take it": likewise
        Revoke   "it is no longer there"     --->

A message may arrive twice, late or never. Each names the piece by its id and the offering by its generation: an id
that was offered again has a higher one, and what is said about an earlier generation means nothing any more. Times on
the wire are durations; each side counts them on its own monotonic clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from meshes.heads import HeadLayout

KEY_BITS = 64


@dataclasses.dataclass(frozen=True)
class Source:
    """True KV heads of a piece that lie ready at one transfer server, in this order. Whoever knows the key can pull."""

    address: str
    key: int = dataclasses.field(repr=False)
    heads: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Offer:
    """One staged piece that can be pulled: some pages of all layers, cut into true KV heads.

    `key` names the data to the transfer server, and whoever knows it can pull, so it is not shown. `shape` is that of
    one head, [1, L, N, S, W]; there are `layout.num_kv_heads` of them. Where the offering worker is several processes,
    `elsewhere` says which heads the others have; those that it does not name are at `address`. Raises ValueError where
    a field makes no sense.
    """

    id: int
    generation: int  # 1 for the first offering of the id
    key: int = dataclasses.field(repr=False)
    address: str  # of the offering side's transfer server
    layout: HeadLayout  # how the offering side cuts KV heads
    shape: tuple[int, ...]
    dtype: str
    lease_s: float  # it can be pulled for so long
    elsewhere: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.id < 1 << KEY_BITS and 0 <= self.key < 1 << KEY_BITS):
            raise ValueError(f"the id {self.id} and the key of an offer must be unsigned numbers of {KEY_BITS} bits")
        if self.generation < 1 or not 0 < self.lease_s < math.inf:
            raise ValueError(f"offer {self.id:016x}: {self.generation=} and {self.lease_s=} must be positive")
        if len(self.shape) < 1 or self.shape[0] != 1 or min(self.shape) < 1:
            raise ValueError(f"offer {self.id:016x}: a head has the shape [1, L, N, S, W], not {self.shape}")
        try:
            jnp.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"offer {self.id:016x}: {self.dtype!r} is no dtype of this process") from None
        named = [head for source in self.elsewhere for head in source.heads]
        if len(set(named)) < len(named) or not set(named) <= set(range(self.layout.num_kv_heads)):
            raise ValueError(
                f"offer {self.id:016x}: heads elsewhere are {named}, of {self.layout.num_kv_heads} each once at most"
            )

    @property
    def sources(self) -> Sequence[Source]:
        """Where its heads are: every true KV head once."""
        named = {head for source in self.elsewhere for head in source.heads}
        rest = tuple(head for head in range(self.layout.num_kv_heads) if head not in named)
        return (Source(self.address, self.key, rest), *self.elsewhere) if rest else self.elsewhere

    @property
    def nbytes(self) -> int:
        """Bytes that cross: every true KV head once."""
        return self.layout.num_kv_heads * math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Ack:
    """The pulling side has the piece, settled and in its pages."""

    id: int
    generation: int


@dataclasses.dataclass(frozen=True)
class Refuse:
    """The pulling side will not take the piece (any more); `reason` is one line for a log."""

    id: int
    generation: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Revoke:
    """The offering side has taken the piece back: its sequence was aborted, or the lease has ended."""

    id: int
    generation: int
    reason: str
