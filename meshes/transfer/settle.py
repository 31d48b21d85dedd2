"""Waiting for arrays without being stuck: asked again and again, never waited for.

A pull that hangs cannot be interrupted, and neither can a thread inside `block_until_ready`. So one thread asks all
arrays in turn whether they are there, and a deadline is a comparison. JAX has no call-back for this.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax

SOONEST_S, LATEST_S = 1e-4, 5e-3
SHARE = 0.02  # asked again after this share of the time that it has taken so far: what is found late is 2% late


def are_ready(arrays: Iterable[jax.Array]) -> bool:
    """Whether all have arrived or failed."""
    return all(array.is_ready() for array in arrays)  # type: ignore[attr-defined]


def failure(arrays: Iterable[jax.Array]) -> Exception | None:
    """What went wrong with arrays that are ready; None: nothing, they may be given to any program."""
    try:
        jax.block_until_ready(list(arrays))
    except Exception as error:  # JaxRuntimeError, or what else a plugin raises: it belongs to these arrays alone
        return error
    return None


def ask_again_s(age_s: float) -> float:
    """Seconds until the next question about something that has been on its way for `age_s`."""
    return min(max(SHARE * age_s, SOONEST_S), LATEST_S)
