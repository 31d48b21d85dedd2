"""Before any test touches JAX: CPU with 16 virtual devices. Fixtures that several packages' tests share."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax._src import array as jax_array

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)

DATA = pathlib.Path(__file__).parent / "data"


class Counter:
    """How often something happened since the test began."""

    count = 0
    largest_put = 0  # bytes of the largest host array given to `jax.device_put`


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts arrays that are read into host memory: through `ArrayImpl._value`, or sent on as a host array.

    An array on a single CPU device can be read through the buffer protocol, which is not counted; but what was read has
    to be put somewhere again, and a host array given to `jax.device_put` is.
    """
    counter = Counter()
    read = jax_array.ArrayImpl._value.fget  # type: ignore[attr-defined]
    put = jax.device_put

    def counted(array: jax.Array) -> object:
        counter.count += 1
        return read(array)

    def counted_put(x: object, *args: object, **kwargs: object) -> object:
        host = [np.asarray(leaf).nbytes for leaf in jax.tree.leaves(x) if not isinstance(leaf, jax.Array)]
        counter.largest_put = max([counter.largest_put, *host])
        return put(x, *args, **kwargs)

    monkeypatch.setattr(jax_array.ArrayImpl, "_value", property(counted))
    monkeypatch.setattr(jax, "device_put", counted_put)
    return counter


_compiling: list[Counter] = []


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        for counter in _compiling:
            counter.count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.fixture
def compilations() -> Iterator[Counter]:
    """Counts programs that XLA compiles (or takes from the disk cache), in any thread."""
    counter = Counter()
    _compiling.append(counter)
    yield counter
    _compiling.remove(counter)


@pytest.fixture(scope="session")
def tiny_folders() -> dict[str, pathlib.Path]:
    """Tiny random checkpoints by name; tests/data/README.md says how they were made."""
    return {path.name: path for path in sorted((DATA / "tiny").iterdir()) if path.is_dir()}
