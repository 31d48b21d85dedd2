"""How much `kv_memory` makes a pool of a few pages."""

from __future__ import annotations

from typing import Any

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.engine import Engine
from jaxpd.progress import SilentProgress


def kv_memory_of(pages: int, model: Any, **config: Any) -> int:
    """Bytes a device for `pages` pages a replica, in the pool whose pages are largest; others get more of them."""
    checkpoint = resolve(str(model), progress=SilentProgress())
    limits = Engine(checkpoint, EngineConfig(**config), on_events=lambda events: None).limits  # not started
    return pages * max(pool.page_bytes for pool in limits.pools)
