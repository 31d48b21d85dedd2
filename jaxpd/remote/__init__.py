"""The hand-off between engines in different processes: one that prefills, one that decodes, and a peer between them.

    prefill engine (prefill.py)                   peer (serving.worker)               decode engine (decode.py)
    ---------------------------                                                       -------------------------
    submit(request, PrefillLeg)                                                       submit(request, DecodeLeg)
    its turn is near: ask              --- Reserve ------------------------------->   reserve, when there is room
    computed as soon as it has both    <-- Reserved (pages that it has) -----------
    chunk by chunk: gather, offer      --- Piece (offers) ------------------------>   pull, settle, scatter
                                       <-- Ack ------------------------------------
    first token read, HandedOff        --- FirstToken ---------------------------->   with all pages there: decode it

Nobody waits for a peer for ever. What it does not say, the end of its stream says (`lost`), or a lease, or a deadline;
then its sequences end with HandoffFailed, here and there, and whoever sent them sends them elsewhere.
"""
