"""What the simulation is given, and what it finds: a cluster with its speeds, outages, and a record of each request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxpd.policies.workers import Reason, Site
from jaxpd.routing.loads import Arrival
from jaxpd.routing.roster import Roster


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds and bytes. The defaults are published fits for a 13B model on one A100 80G, and 200 Gbps.

    The fits are those of DistServe (arXiv:2401.09670), the coefficients in its repository: one GPU, large batches. Its
    model has 819 kB of KV a token; what a step takes for a token of context is scaled down to `Cluster.page_bytes`.
    """

    prefill_s: float = 18.1e-3
    prefill_s_per_token: float = 0.1019e-3
    prefill_s_per_token2: float = 7.12e-9  # times the difference of squares: cached tokens are read, not computed
    step_s: float = 7.17e-3
    step_s_per_sequence: float = 0.158e-3
    step_s_per_context: float = 0.093e-6
    transfer_s: float = 5e-3
    transfer_bytes_per_s: float = 25e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers `p0`, `p1`, ... and `d0`, `d1`, ..., alike but for `slow`, a factor of a worker's times.

    A page's bytes are by default those of an 8B model with 32 layers and 8 KV heads of 128, in 16 bits.
    """

    prefill: int
    decode: int
    replicas: int = 1
    page_size: int = 512
    pages: int = 640  # of one replica
    page_bytes: int = 512 * 131_072
    slots: int = 256
    queue_limit: int = 100_000
    speeds: Speeds = Speeds()
    slow: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Slo:
    """What each request is promised, in seconds; None: nothing. Refusals and failures miss it."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Outage:
    """A worker is killed, and comes back with empty caches under the same name."""

    worker: str
    down_s: float
    up_s: float


@dataclasses.dataclass(kw_only=True)
class Record:
    """What became of one request. Times in seconds from its arrival; None where it did not get so far."""

    arrival: Arrival
    ttft_s: float | None = None
    end_s: float | None = None
    cached_tokens: int = 0
    expected_s: float | None = None  # of the TTFT, where the policy estimated it
    refused: Reason | None = None
    failed: bool = False
    sent: list[tuple[float, Site, Site]] = dataclasses.field(default_factory=list)  # (time, prefill, decode)
    migrations: int = 0

    @property
    def tpot_s(self) -> float | None:
        if self.ttft_s is None or self.end_s is None or self.arrival.answer_tokens < 2:
            return None
        return (self.end_s - self.ttft_s) / (self.arrival.answer_tokens - 1)


@dataclasses.dataclass(frozen=True)
class Result:
    """`busy_s`: seconds that each prefill site computed, those that computed nothing included."""

    records: list[Record]
    busy_s: dict[Site, float]
    roster: Roster


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Times in seconds, over the requests that were answered; `attainment` over all, `kept` over the accepted."""

    requests: int
    refused: int
    failed: int
    hit_rate: float  # of the accepted prompts' tokens
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    attainment: float
    kept: float
    imbalance: float  # the busiest prefill replica's seconds over the mean
    idlest: float  # the idlest one's over the mean


def summarise(result: Result, slo: Slo) -> Summary:
    """The numbers of one run."""
    records, busy_s = result.records, list(result.busy_s.values())
    accepted = [record for record in records if record.refused is None]
    done = [record for record in accepted if record.end_s is not None]
    prompt_tokens = sum(record.arrival.prompt_tokens for record in done)
    ttft_s = sorted(record.ttft_s for record in done if record.ttft_s is not None)
    tpot_s = sorted(record.tpot_s for record in done if record.tpot_s is not None)
    met = sum(meets(record, slo) for record in done)
    mean_s = sum(busy_s) / len(busy_s)
    return Summary(
        requests=len(records),
        refused=len(records) - len(accepted),
        failed=len(accepted) - len(done),
        hit_rate=sum(record.cached_tokens for record in done) / max(prompt_tokens, 1),
        ttft_mean_s=sum(ttft_s) / max(len(ttft_s), 1),
        ttft_p50_s=quantile(ttft_s, 0.50),
        ttft_p99_s=quantile(ttft_s, 0.99),
        tpot_p99_s=quantile(tpot_s, 0.99),
        attainment=met / max(len(records), 1),
        kept=met / max(len(accepted), 1),
        imbalance=max(busy_s) / mean_s if mean_s else 1.0,
        idlest=min(busy_s) / mean_s if mean_s else 1.0,
    )


def meets(record: Record, slo: Slo) -> bool:
    """Whether a request that was answered got what it was promised."""
    late = slo.ttft_s is not None and (record.ttft_s is None or record.ttft_s > slo.ttft_s)
    slow = slo.tpot_s is not None and record.tpot_s is not None and record.tpot_s > slo.tpot_s
    return record.end_s is not None and not late and not slow


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed; 0 where there is none."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0
