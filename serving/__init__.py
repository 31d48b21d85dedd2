"""The network side of jaxpd. The life of one request, from the socket to the token:

1.  A front owns a port: `grpc_server` that of gRPC, `http/front` that of HTTP. A message arrives and one task starts
    for it. `interceptors` (gRPC) and `http/middleware` ask for the API key (`callers`), give the request an id, and are
    the last to see it: whatever goes wrong below leaves as a status with a readable text.
2.  `wire` (gRPC), `open_inference` (KServe's protocol) or `http/openai` reads the message into a
    `messages.GenerateRequest`, where "not set" is None and never zero. What it cannot serve it refuses by name.
3.  `gateway` fills in the options (`understand`: the default of max_tokens, a drawn seed), turns text or chat into
    token ids (`jaxpd.text`; in a thread when it is long), checks all of it against the model's limits and the caller's,
    and from here on the request is a `jaxpd.request.Request`: the engine speaks token ids only.
4.  `Engine.submit` (`jaxpd.engine`) queues it, or refuses it when the queue is full; in a thread where a grammar has to
    be compiled. The first message, what was understood, goes out.
5.  A pool of role prefill computes the prompt and samples the first token; `meshes.transfer` moves the KV pages to a
    pool of role decode, which makes one token a step. (In the modes that share a mesh one pool does both.)
6.  After each step the pool's thread hands all events of the step to `Gateway.on_events`: one hop onto the event loop,
    where each event wakes its request's reader. With many streams they are woken together, and more rarely.
7.  The reader (`stream`) takes what has piled up for it and turns ids into text (`jaxpd.text.AnswerText`: never half a
    character, never the beginning of a stop string). Over HTTP a chat's text then goes through `parsing`, which tells
    reasoning, content and tool calls apart. A slow reader gets fewer and longer messages, and holds up nobody.
8.  A stop string ends a sample here, by `Engine.abort`; everything else ends it in the engine. The last message of each
    sample says why, with token counts and the time each stage took.
9.  A client that cancels, leaves or times out cancels the task of step 1; leaving the stream aborts the request, and
    its pages are free again.

Observers (`observer`) hear of each step: `metrics`, `tracing` and `logs`, put together by `seeing`. `server` is the
process round all this: bind, start, ready, drain, stop; `background` is the same in a thread. `health` and `control`
answer questions about it, `http/live` shows it to the page (`web`). `client` is the other end of gRPC, and `bench` a
thousand clients at once. Where one process is not enough, a router takes the engine's place in step 4: of a request's
engine the gateway asks no more than `submit` and `abort`.
"""
