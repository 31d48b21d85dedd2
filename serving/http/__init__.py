"""The HTTP front: OpenAI's API and what people run beside it, on FastAPI and uvicorn.

    socket -> connection (time limits, size of the head) -> middleware (request id, API key, size of the body)
           -> app (routes) -> openai/ (bodies to requests, messages to bodies) -> serving.gateway

`front` owns the sockets and runs the server on the loop of everything else; `errors` gives every failure the shape that
OpenAI's clients know.
"""
