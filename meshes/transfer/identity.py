"""The hand-shake: what two processes must have in common before KV goes from one to the other.

What has to be equal is compared when they meet, not when the first client waits. What may differ (the
tensor-parallel size, say: the plan takes care of it) is not in here.
"""

from __future__ import annotations

import dataclasses

# Of the messages and of the bytes that cross. One version back is understood, so that workers can be upgraded one after
# the other.
PROTOCOL = 1
OLDEST_PROTOCOL = 1


class IdentityMismatch(ValueError):
    """Two processes cannot hand over to each other; the message names both values and the cure."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a worker says about itself."""

    model: str  # hash of the weights and the configuration that decide what a KV page holds
    dtype: str  # of the KV pages
    page_size: int  # tokens
    num_layers: int
    num_heads: int  # of queries, true
    num_kv_heads: int  # true
    lanes: int  # of a slot in a page, K and V together
    streams: int  # of its transfer server (`JaxLink`): with fewer than its peer has, a process dies at the first pull
    protocol: int = PROTOCOL  # the newest that it speaks
    oldest_protocol: int = OLDEST_PROTOCOL  # and the oldest


COMPARED = {  # in the order in which they are compared: the first difference explains those that follow from it
    "model": ("model (hash)", "load the same checkpoint, in the same revision, in both"),
    "dtype": ("KV dtype", "start both with the same --dtype"),
    "page_size": ("page size", "start both with the same --page-size"),
    "num_layers": ("number of layers", "load the same checkpoint in both"),
    "num_heads": ("number of query heads", "load the same checkpoint in both"),
    "num_kv_heads": ("number of KV heads", "load the same checkpoint in both"),
    "lanes": ("lanes of a KV slot", "load the same checkpoint in both, with the same version of jaxpd"),
    "streams": ("number of transfer streams", "start both with the same number"),
}


def agree(ours: Identity, theirs: Identity, peer: str) -> int:
    """The protocol version that both speak. `peer` names the other process in the error.

    Raises IdentityMismatch where they cannot hand over to each other, naming the first difference with both values.
    """
    version = min(ours.protocol, theirs.protocol)
    if version < max(ours.oldest_protocol, theirs.oldest_protocol):
        raise IdentityMismatch(
            f"{peer} speaks hand-off protocol {_span(theirs)}, this process {_span(ours)}: upgrade the older of the two"
        )
    for field, (words, cure) in COMPARED.items():
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise IdentityMismatch(f"{peer} has {words} {other}, this process {mine}: {cure}")
    return version


def _span(who: Identity) -> str:
    return str(who.protocol) if who.protocol == who.oldest_protocol else f"{who.oldest_protocol} to {who.protocol}"
