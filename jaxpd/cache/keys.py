"""Names of page contents: a chained hash, so that equal keys mean equal tokens from the first one on.

    root   = H("root", page size, salt)
    key[i] = H("page", key[i-1] or root, the page's token ids as little-endian int32)

H is BLAKE2b cut to 128 bits: among 2**40 pages two keys coincide by chance with probability 2**-49, and the token ids
need not be kept to compare them. Sequences with different salts (one a tenant) have no key in common, so that neither
can find, or measure by its latency, what the other has asked. Only full pages have a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 16
_TOKEN = np.dtype("<i4")


class Chain:
    """The keys of one growing token sequence, each computed once; every cache with this page size can be asked with it.

    Belongs to one thread at a time. `keys[i]` names tokens `[0, (i + 1) * page_size)`.
    """

    def __init__(self, page_size: int, tokens: Sequence[int] | np.ndarray = (), *, salt: str = "") -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, it must be at least 1")
        self.page_size = page_size
        self.salt = salt
        self.keys: list[bytes] = []
        self.length = 0  # tokens
        self._last = _digest(b"root", page_size.to_bytes(8, "little") + salt.encode())
        self._tail: list[int] = []  # token ids after the last full page
        self.extend(tokens)

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends token ids (all below 2**31); hashes the pages that they fill."""
        self.length += len(tokens)
        if len(self._tail) + len(tokens) < self.page_size:  # one token of a decode step: nearly always
            self._tail.extend(tokens)
            return
        ids = np.asarray(tokens, _TOKEN)
        if self._tail:
            ids = np.concatenate((np.asarray(self._tail, _TOKEN), ids))
        data, full = ids.tobytes(), len(ids) // self.page_size * self.page_size
        size = self.page_size * _TOKEN.itemsize
        for start in range(0, full * _TOKEN.itemsize, size):
            self._last = _digest(b"page", self._last + data[start : start + size])
            self.keys.append(self._last)
        self._tail = ids[full:].tolist()


def _digest(kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=kind).digest()
