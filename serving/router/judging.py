"""What a failure says: about which worker, whether to try elsewhere, and who is better left out then."""

from __future__ import annotations

from jaxpd.errors import HandoffFailed, JaxpdError
from jaxpd.policies.breaker import Outcome, outcome
from jaxpd.policies.workers import Leg
from serving.router.attempt import Attempt, Sample

# What one worker says of a hand-off when the other one, or the way between them, is to blame (jaxpd.errors).
LINK = frozenset(("copy", "peer", "lease"))
# What it says where the other one is well, but does not have it (any more).
NOT_THERE = frozenset(("refused",))


def verdict(attempt: Attempt, leg: Leg, error: JaxpdError | None) -> tuple[Leg, Outcome, frozenset[str]]:
    """Whom a failure speaks about, what it says, and who is better left out; `error` is None without an answer."""
    names = {Leg.PREFILL: attempt.prefill, Leg.DECODE: attempt.decode}
    if isinstance(error, HandoffFailed) and not attempt.whole:
        if error.reason in LINK:
            at = Leg.DECODE if leg is Leg.PREFILL else Leg.PREFILL
            return at, Outcome.FAULT, frozenset(names.values())
        if error.reason in NOT_THERE:
            at = Leg.DECODE if leg is Leg.PREFILL else Leg.PREFILL
            return at, Outcome.BUSY, frozenset((names[at],))
        if error.reason == "lost":  # what it had of the prompt from before: it is well, and can begin again
            return leg, Outcome.BUSY, frozenset()
    what = outcome(None if error is None else error.code)
    return leg, what, frozenset((names[leg],))


def avoids(sample: Sample, avoid: frozenset[str], *, again: bool) -> tuple[frozenset[str], ...]:
    """Without all that have failed it; else without those of now, one after the other; else, where they may be asked
    `again`, with them."""
    sets = [sample.avoid, avoid, *(frozenset((name,)) for name in sorted(avoid))]
    if again:
        sets.append(frozenset())
    return tuple(dict.fromkeys(sets))
