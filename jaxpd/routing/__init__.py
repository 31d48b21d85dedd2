"""What a router remembers, so that the policies of `jaxpd.policies.routing` have a snapshot to choose from.

    join, ready                   Roster: workers, their fits and circuit breakers
    request arrives               PrefixIndex: who probably has how much of its prompt
                                  policies: a prefill and a decode site, or a refusal
    dispatched                    Ledger: both sites are charged; PrefixIndex: both will have the prompt
    first token, decoding, end    Ledger: given back, once; Fit: learned; Breaker: told
    drain, gone                   Ledger and PrefixIndex forget the worker

Everything takes the clock as an argument and belongs to one thread. `simulation` drives it with synthetic workers.
"""
