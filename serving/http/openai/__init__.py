"""OpenAI's API over the gateway.

    schema, unserved             what a client may send, and what is refused by name
    asked                        its options as those of a `serving.messages.GenerateRequest`
    completions, chat, extras    the routes
    render, chat_reply           pieces of answers: log probabilities, usage, timings, messages and deltas
    sse                          the events of a stream
    answering                    sends an answer, and aborts the request when the client leaves

Nothing in here knows how tokens are made, or who else asks.
"""
