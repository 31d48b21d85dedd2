"""Counts the bytes of the DMAs that an interpreted TPU kernel executes, to hold to them what it says that it moves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from jax._src.pallas.mosaic.interpret import interpret_pallas_call


@dataclasses.dataclass
class Dmas:
    """How many DMAs ran, and the bytes that they copied."""

    count: int = 0
    num_bytes: int = 0


@contextlib.contextmanager
def counting_dmas() -> Iterator[Dmas]:
    """Counts while it is open. Blocks that Pallas itself moves by a `BlockSpec` are no DMAs of the kernel's."""
    seen = Dmas()
    # The interpreter has no hook for it; `execute_read` is where a DMA takes up its data, on jax 0.10.2 and 0.12.
    read = interpret_pallas_call.DMA.execute_read

    def counted(dma: interpret_pallas_call.DMA) -> None:
        read(dma)
        seen.count += 1
        seen.num_bytes += dma.data_size

    interpret_pallas_call.DMA.execute_read = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        interpret_pallas_call.DMA.execute_read = read  # type: ignore[method-assign]
