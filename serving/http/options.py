"""What may be set of the HTTP front."""

from __future__ import annotations

import dataclasses
import pathlib

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Times in seconds. A body is held until its request has been answered, hence the limit of all together.

    `head_s` is for a request's first line and headers, `body_s` for its body, both whole; `stalled_s` is how long a
    client may take nothing of what is ready for it, `idle_s` how long a connection may wait for the next request.
    """

    page: bool = True  # at /
    profile_dir: pathlib.Path | None = None  # where profiles go; None: there are none
    max_body_bytes: int = 16 * MIB
    max_bodies_bytes: int = 256 * MIB
    max_head_bytes: int = 64 * 1024
    max_connections: int = 4096
    head_s: float = 20.0
    body_s: float = 60.0
    stalled_s: float = 60.0
    idle_s: float = 75.0
