"""Picks the implementation of an operation by platform, dtype and shape, and says once in the log which and why.

Every operation folder lists its implementations as a tuple of `Implementation`, the best first; `choose` takes the
first that can run the call. A kernel (`tpu.py`, `gpu.py`) is one more entry with the same signature as `reference.py`;
its `refuse` looks at the call and answers why it cannot take it (a head size, a dtype), or None. The interpreted
kernels run the same code on CPU under simulated memory, slowly: they stand last, so that only who names them gets them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.names import AUTO, GPU, GPU_INTERPRET, NAMES, TPU, TPU_INTERPRET, XLA

logger = logging.getLogger(__name__)

EVERYWHERE = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Call:
    """What an implementation may look at before it takes a call: all of it is known while tracing."""

    platform: str  # "cpu", "gpu" or "tpu"
    chip: str  # what JAX calls the device, e.g. "TPU v5 lite" or "NVIDIA H200"; "" where it is not known
    dtype: str  # of the page pool
    operand: str  # dtype of the queries, or of the keys and values to write; that of the pool where pages only move
    shapes: tuple[tuple[str, int], ...]  # by the letters of the dimension key, e.g. (("D", 64), ("S", 16), ("W", 128))

    def __str__(self) -> str:
        shapes = " ".join(f"{name}={size}" for name, size in self.shapes)
        dtypes = self.dtype if self.operand == self.dtype else f"{self.operand} on {self.dtype}"
        return f"{self.chip or self.platform}, {dtypes}, {shapes}"

    def __getitem__(self, dimension: str) -> int:
        return dict(self.shapes)[dimension]


def takes_all(call: Call) -> str | None:
    """The `refuse` of an implementation that runs every call."""
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an operation."""

    name: str  # "xla", "pallas_tpu", ...
    platforms: tuple[str, ...]
    run: Callable[..., Any]
    why: str  # half a sentence for the log: what makes it the choice
    refuse: Callable[[Call], str | None] = takes_all

    def objection(self, call: Call) -> str | None:
        """Why it cannot run the call, or None."""
        if call.platform not in self.platforms:
            return f"it runs on {', '.join(self.platforms)}, not on {call.platform}"
        return self.refuse(call)


Kernel = tuple[Callable[..., Any], Callable[[Call], str | None]]  # `run`, which takes `interpret` too, and `refuse`


def implementations(
    xla: Callable[..., Any], *, tpu: Kernel | None = None, gpu: Kernel | None = None
) -> tuple[Implementation, ...]:
    """The implementations of an operation, best first, from its XLA reference and its kernels."""
    kernels: list[Implementation] = []
    interpreted: list[Implementation] = []
    for platform, kernel, name, name_interpreted in (
        ("tpu", tpu, TPU, TPU_INTERPRET),
        ("gpu", gpu, GPU, GPU_INTERPRET),
    ):
        if kernel is not None:
            run, refuse = kernel
            what = f"the Pallas kernel for {platform.upper()}"
            kernels.append(Implementation(name, (platform,), run, what, refuse))
            slow = functools.partial(run, interpret=True)
            interpreted.append(Implementation(name_interpreted, ("cpu",), slow, f"{what}, interpreted", refuse))
    reference = Implementation(XLA, EVERYWHERE, xla, "the XLA reference, which runs everywhere")
    return (*kernels, reference, *interpreted)


def target() -> tuple[str, str]:
    """(platform, chip) of the program being traced: the mesh's where it says so (compiling for hardware that is not
    there), else those of the default device or backend."""
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = getattr(jax.config, "jax_default_device", None)
    if described is not None and described.platform:
        platform, chip = described.platform, described.device_kind
    elif isinstance(device, str):
        platform, chip = device, ""
    else:
        device = device or jax.local_devices()[0]
        platform, chip = device.platform, device.device_kind
    return ("gpu" if platform in ("cuda", "rocm") else platform), chip or ""


def choose(
    operation: str,
    implementations: tuple[Implementation, ...],
    requested: str,
    *,
    dtype: Any,
    shapes: dict[str, int],
    operand: Any = None,
) -> Implementation:
    """The implementation that runs this call.

    `requested` is "auto" (the first that can) or a name. An operation that lacks one of `NAMES` takes "auto" for it, so
    that one name can be asked of a whole model. Raises ValueError for a name that does not exist, and for one that
    cannot run the call, with its reason. `dtype` is the pool's, `operand` that of what it meets (`Call`).
    """
    if requested in NAMES and requested not in [i.name for i in implementations]:
        requested = AUTO
    platform, chip = target()
    call = Call(platform, chip, str(dtype), str(dtype if operand is None else operand), tuple(shapes.items()))
    return _choose(operation, implementations, requested, call)


@functools.cache
def _choose(operation: str, implementations: tuple[Implementation, ...], requested: str, call: Call) -> Implementation:
    names = [i.name for i in implementations]
    if requested != AUTO and requested not in names:
        raise ValueError(f"implementation={requested!r} of {operation} is unknown: use {AUTO!r} or one of {names}")
    passed_over: list[str] = []
    for implementation in implementations:
        if requested not in (AUTO, implementation.name):
            continue
        objection = implementation.objection(call)
        if objection is None:
            why = implementation.why if requested == AUTO else "asked for"
            _log_once(operation, implementation, why, tuple(passed_over), call)
            return implementation
        passed_over.append(f"{implementation.name}: {objection}")
    raise ValueError(
        f"implementation={requested!r} of {operation} cannot run this call ({call}): {'; '.join(passed_over)}; "
        f"use {AUTO!r} or another of {names}"
    )


_logged: set[tuple[str, str, str, tuple[str, ...]]] = set()


def _log_once(operation: str, chosen: Implementation, why: str, passed_over: tuple[str, ...], call: Call) -> None:
    """One line for each choice and reason, not for each of the many shapes that end the same way."""
    key = (operation, chosen.name, why, passed_over)
    if key not in _logged:
        _logged.add(key)
        notes = f"; not {'; not '.join(passed_over)}" if passed_over else ""
        logger.info("%s runs as %s: %s%s (%s)", operation, chosen.name, why, notes, call)
