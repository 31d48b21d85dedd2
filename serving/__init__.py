"""The network side of jaxpd. The life of one request, from the socket to the token:

1.  `grpc_server` owns the port (`tls` its certificate). A `GenerateRequest` message arrives and one task starts for it.
    `interceptors` find out whose API key it brings (`callers`) and give it an id, and are the last to see it: whatever
    goes wrong below leaves as a status with a readable text.
2.  `wire` reads the message into a `messages.GenerateRequest`, where "not set" is None and never zero. A field it does
    not know is refused.
3.  `gateway` fills in the options (the default of max_tokens, a drawn seed), turns text or chat into token ids
    (`jaxpd.text`; in a thread when it is long) and checks all of it against the model's limits. From here on the
    request is a `jaxpd.request.Request`, and the engine speaks token ids only.
4.  `Engine.submit` (`jaxpd.engine`) queues it, or refuses it when the queue is full. Before that, its caller's limits
    and its deadline are looked at (`callers`, `pace`). The first message, what was understood, goes out.
5.  A pool of role prefill computes the prompt and samples the first token; `meshes.transfer` moves the KV pages to a
    pool of role decode, which makes one token a step. (In the modes that share a mesh one pool does both.)
6.  After each step the pool's thread hands all events of the step to `Gateway.on_events`: one hop onto the event loop,
    where each event wakes its request's reader.
7.  The reader takes what has piled up for it and turns ids into text (`jaxpd.text.TextStream`: never half a character,
    never the beginning of a stop string); `grpc_server` writes it as one message. A slow reader so gets fewer and
    longer messages, and holds up nobody.
8.  A stop string ends the request here, by `Engine.abort`; everything else ends it in the engine. The last message says
    why, with token counts and the time each stage took.
9.  A client that cancels, leaves or times out cancels the task of step 1; leaving the stream aborts the request, and
    its pages are free again.

`server` is the process round all this: bind, start, ready, drain, stop. `health` and `control` answer questions about
it, `open_inference` takes the requests of KServe's clients, `client` is the other end of the wire. Where one process is
not enough, a router takes the engine's place in step 4: of a request's engine the gateway asks no more than `submit`
and `abort`.
"""
