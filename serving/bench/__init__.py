"""`jaxpd bench serve`: a load generator for any OpenAI server and for jaxpd's gRPC. One run, from flags to table:

1.  `traces` reads a file of real requests, or `lengths` draws sizes; `workload` makes a list of calls of them, each
    with the pieces that its prompt is made of, and `arrivals` says when each is due.
2.  `openai_client` or `grpc_client` connects, asks which model is served, and finds out how the server counts tokens;
    `prompts` turns pieces into token ids or text of the wanted length. Equal pieces give equal tokens.
3.  `run` sends each call when it is due, on one event loop and one task a call. Each answer is a `records.Record`: when
    the call was due, when it was sent, when each message came and how many tokens it held. A failure is a record too.
4.  `measure` turns records into TTFT, TTST, TPOT, ITL, end-to-end time and the attainment of an SLO.
5.  `goodput` repeats 3 and 4 at other rates until it knows the highest that meets the SLO.
6.  `report` writes the table and the JSON, `plots` the picture.

`session` puts these together. The server may be anybody's: nothing here needs JAX.

What is counted, and from when. A call with a due time (a rate, or a trace) arrives when it is due, also where the
client had to hold it back, so that a server that slows its clients down does not look faster by it. A call of a closed
loop arrives when it is sent. A message may hold several tokens: TPOT is the time from the first to the last token over
the tokens after the first, whatever the messages were; for ITL the gap before a message is shared evenly by its tokens
(further tokens of the first message came 0 s after its first), so that the mean ITL of an answer is its TPOT. The gaps
between messages, which a person sees, are reported beside it.
"""
