"""Snapshots for the router's tests: one worker with what a test cares about, and random clusters."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from jaxpd.policies.fit import Fit
from jaxpd.policies.workers import Asked, Replica, Role, State, Worker

PAGE = 16


def asked(prompt_tokens: int = 1000, **rest: Any) -> Asked:
    return Asked(prompt_tokens=prompt_tokens, page_size=PAGE, **rest)


def worker(name: str, role: str = "prefill", *, state: str = "ready", **rest: Any) -> Worker:
    """With one replica; what a `Replica` has is for that one, the rest for the worker."""
    own = {key: rest.pop(key) for key in list(rest) if key in Replica.__dataclass_fields__}
    replica = Replica(**{"total_pages": 1000, "free_pages": 1000, **own})
    return Worker(name=name, role=Role(role), state=State(state), replicas=(replica,), **rest)


def measured(per_unit_s: float, fixed_s: float = 0.0, runs: int = 20) -> Fit:
    """A fit that is sure of a line."""
    fit = Fit()
    for i in range(runs):
        units = 100 * (1 + i % 5)
        fit = fit.learn(units, fixed_s + per_unit_s * units)
    return fit


_FITS = st.sampled_from([Fit(), measured(1e-3), measured(1e-2, 0.05), measured(1e-4, runs=3)])
_REPLICAS = st.builds(
    Replica,
    total_pages=st.integers(0, 100),
    free_pages=st.integers(0, 100),
    hit_pages=st.integers(0, 70),
    pending_tokens=st.integers(0, 20_000),
    context_tokens=st.integers(0, 20_000),
    queued=st.integers(0, 6),
    running=st.integers(0, 6),
    head_tokens=st.integers(0, 500),
    head_s=st.floats(0, 3),
    idle_s=st.sampled_from([0.0, 1.0, 100.0, float("inf")]),
    last_chosen=st.integers(0, 9),
)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Worker, ...]:
    """Up to five workers in any state, of any role, some of them barred or full."""
    return tuple(
        Worker(
            name=f"w{i}",
            role=draw(st.sampled_from(list(Role))),
            state=draw(st.sampled_from([State.READY, *State])),
            replicas=tuple(draw(st.lists(_REPLICAS, min_size=1, max_size=3))),
            slots=draw(st.integers(1, 12)),
            queue_limit=draw(st.integers(1, 8)),
            prefill_barred_s=draw(st.sampled_from([0.0, 0.0, 2.5, 1000.0])),
            decode_barred_s=draw(st.sampled_from([0.0, 0.0, 2.5])),
            prefill=draw(_FITS),
            transfer=draw(_FITS),
            step=draw(_FITS),
        )
        for i in range(draw(st.integers(0, 5)))
    )


def requests() -> st.SearchStrategy[Asked]:
    """With and without bounds, some of them tried before."""
    return st.builds(
        Asked,
        prompt_tokens=st.integers(1, 1200),
        answer_tokens=st.integers(1, 300),
        page_size=st.just(PAGE),
        page_bytes=st.sampled_from([0, 1000]),
        waited_s=st.floats(0, 2),
        ttft_slo_s=st.sampled_from([None, 0.01, 1.0, 10.0]),
        ttst_slo_s=st.sampled_from([None, 0.01, 10.0]),
        tpot_slo_s=st.sampled_from([None, 1e-3, 0.1]),
        avoid=st.frozensets(st.sampled_from(["w0", "w1", "w2"]), max_size=2),
    )
