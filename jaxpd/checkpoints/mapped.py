"""Memory-mapped files: giving back the pages that reading brought in."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np


def give_back_pages(views: Iterable[np.ndarray]) -> None:
    """Lets the system drop the file pages behind `views` (any arrays made by `np.frombuffer` of a read-only mmap).

    The views stay valid: reading them again reads the file again. Without it the pages count as the process's memory
    until something else needs them.
    """
    maps: dict[int, mmap.mmap] = {}
    for view in views:
        owner: object = view
        while isinstance(owner, np.ndarray | memoryview):
            owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
        if isinstance(owner, mmap.mmap):
            maps[id(owner)] = owner
    if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows and some BSDs
        for mapped in maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)
