"""OpenAI's API over the gateway.

schema, unserved    what a client may send, and what is refused by name
asked               its options as a `serving.messages.GenerateRequest`
completions, chat   the two routes: whole answers and streams
render              pieces of answers: log probabilities, usage, timings
answering           sends an answer, and aborts the request when the client leaves
"""
