"""The router: the fronts and the gateway of a server, with workers in place of the engine.

What happens to one request, by file:

1.  `engine` is what the gateway calls, from any thread: `RouterEngine.submit` carries it onto the event loop.
2.  `requests` asks the roster (`jaxpd.routing`) for a prefill and a decode replica, which are charged at once, draws an
    id for the hand-off of each sample, and sends both legs; a mixed worker gets the request whole.
3.  `session` is the stream to one worker: legs and aborts out, events and readings in. Silence means that it is gone.
4.  `legs` makes one answer of what both workers say (its nouns: `attempt`): token 0 from the one, the rest from the
    other. `judging` says what a failure means: again elsewhere, on elsewhere behind the tokens so far, or an error.
5.  `ending` makes the last event of a sample: as if it had been made in one place, by this process's clock.

`fleet` knows the workers (joined, ready, draining, gone, refused since they differ), `places` numbers their pools,
`merged` and `counts` are what metrics and the page show of them. `service` is jaxpd.v1.Router, at the control port;
`process` puts all of it into `serving.server`, which serves a router as it serves an engine.
"""
