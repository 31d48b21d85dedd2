"""Mesh specs: `8x1` is 8-way tensor parallel by 1 data replica, `4x1,4x1` is two such pools.

The grammar has room for a third factor, pipeline parallelism, which is recognised and refused by name.
"""

from __future__ import annotations

import dataclasses
import re

MAX_DEVICES = 65_536  # above any slice there is today: a larger product is a slip of the keyboard
_FORM = 'expected TPxDP (tensor parallel by data parallel), for example "8x1", or "4x1,4x1" for two pools'


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """One pool's mesh: `tp` devices along the axis `model`, `dp` replicas along the axis `data`."""

    tp: int
    dp: int

    def __post_init__(self) -> None:
        if wrong := _wrong(self.tp, self.dp):
            raise ValueError(f"mesh spec {self}: {wrong}")

    @property
    def num_devices(self) -> int:
        """Devices of the pool."""
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"{self.tp}x{self.dp}"


def parse_mesh_specs(text: str, *, name: str = "mesh spec") -> tuple[MeshSpec, ...]:
    """The pools that `text` describes, in order; `name` (a flag, say) begins the error messages.

    Blanks around numbers and an upper-case X are accepted. Raises ValueError saying what was given, what form is
    expected and an example.
    """
    return tuple(_parse_one(part, text, name) for part in text.split(","))


def format_mesh_specs(specs: tuple[MeshSpec, ...]) -> str:
    """The inverse of `parse_mesh_specs`."""
    return ",".join(map(str, specs))


def _parse_one(part: str, text: str, name: str) -> MeshSpec:
    given = f'{name} "{text if len(text) <= 60 else text[:57] + "..."}"'
    factors = [f.strip() for f in part.strip().lower().split("x")]
    if not all(re.fullmatch(r"[0-9]+", f) for f in factors):
        raise ValueError(f"{given} does not parse: {_FORM}")
    if len(factors) == 3:
        raise ValueError(
            f"{given}: a third factor means pipeline parallelism, which is not served yet; leave it out: {_FORM}"
        )
    if len(factors) != 2:
        raise ValueError(f"{given} has {len(factors)} factor{'s' * (len(factors) > 1)}: {_FORM}")
    tp, dp = (int(f.lstrip("0")[:9] or "0") for f in factors)  # nine digits are already too many
    if wrong := _wrong(tp, dp):
        raise ValueError(f"{given}: {wrong}")
    return MeshSpec(tp, dp)


def _wrong(tp: int, dp: int) -> str | None:
    if tp < 1 or dp < 1:
        return f"both factors must be at least 1; {_FORM}"
    if tp * dp > MAX_DEVICES:
        return f"more than {MAX_DEVICES} devices in one pool; {_FORM}"
    return None
