"""A worker that is several processes: one mesh over the devices of all, joined by `jax.distributed`.

    process 0, the leader                                  every other process, a follower
    ---------------------                                  -------------------------------
    join: jax.distributed, an address and a key       <--> join                                   joining.py
    listens                                           <--- connects, proves that it has the key   channel.py
    Engine: the memory plan, sent as `Setup`          ---> the same programs, its own weights     follower.py
      waits for all, then `Begin`                     <--- `Ready`
    LeaderDevice: a call, sent as a descriptor        ---> the same call                          descriptors.py
      and made: the devices of all meet in the collectives of its program
    RemoteTransport: a piece is offered               ---> its own shards are offered             offers.py
      one offer, with the addresses of all            <--- where they can be pulled
    close: `Goodbye`                                  ---> it ends

The leader alone has an engine: it decides, it reads what is sampled, it speaks to the router and to peers. Followers
make the calls that it makes, in its order, and never answer a step; so a step costs one small message.

Descriptors go over TCP and not through a JAX collective, since a collective that misses a process waits for ever. Each
end says something every half second; silence of `silence_s` (5 s), or the end of the connection, means that the other
one is gone, and that is the end of the whole worker (watch.py):

    leader     answers all its requests with an error, takes no new ones, and its process ends with EXIT_BROKEN
    follower   its process ends with EXIT_BROKEN

A thread inside a collective cannot be freed; other threads answer, and then the process ends under it. Whoever started
the processes starts all of them again. jax.distributed has heartbeats too (`joining.JAX_SILENCE_S`), which kill a
process without a word; they are slower, and are there for what happens before this connection is made.
"""

EXIT_BROKEN = 3  # another process of the worker was lost, or failed
