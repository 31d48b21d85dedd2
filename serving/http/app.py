"""The FastAPI application: every route of the HTTP front round one gateway."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from jaxpd.version import __version__
from serving.callers import Keys
from serving.gateway import Gateway
from serving.http import errors, live, page, system
from serving.http.middleware import ApiKeys, Bodies, RequestIds
from serving.http.openai import chat, completions, extras
from serving.http.options import HttpOptions
from serving.http.ready import Ready
from serving.metrics import Source

# Answered without a key: probes, scrapers and the page itself. Everything else is guarded, also what comes later.
# `/live` is for the page, and asks for a key itself.
OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/favicon.ico", "/live")
OPEN_FOLDERS = ("/page/",)


def make_app(
    gateway: Gateway,
    *,
    keys: Keys,
    metrics_render: Callable[[str], tuple[bytes, str]] | None = None,
    options: HttpOptions | None = None,
    ready: Ready | None = None,
) -> FastAPI:
    """All routes. `metrics_render` gets an `accept` header and gives a body and its content type."""
    options = options or HttpOptions()
    app = _empty_app()
    # What is asked for most comes first: routes are looked at one by one.
    app.include_router(completions.make_router(gateway))
    app.include_router(chat.make_router(gateway))
    app.include_router(extras.make_router(gateway))
    app.include_router(system.make_router(gateway, ready or Ready(gateway, ready=True), metrics_render, options))
    if options.page:
        app.include_router(page.make_router())
        app.include_router(live.make_router(gateway, keys))
    # The last one added is the first to see a request.
    app.add_middleware(Bodies, most=options.max_body_bytes, most_together=options.max_bodies_bytes)
    app.add_middleware(ApiKeys, keys=keys, open_paths=OPEN_PATHS, open_folders=OPEN_FOLDERS)
    app.add_middleware(RequestIds)
    return app


def make_system_app(
    source: Source,
    *,
    keys: Keys,
    metrics_render: Callable[[str], tuple[bytes, str]] | None = None,
    options: HttpOptions | None = None,
    ready: Ready | None = None,
) -> FastAPI:
    """The routes for those who run a server, without those of its clients: for a process that has none, such as a
    worker. Arguments are those of `make_app`."""
    options = options or HttpOptions()
    app = _empty_app()
    app.include_router(system.make_router(source, ready or Ready(source, ready=True), metrics_render, options))
    app.add_middleware(Bodies, most=options.max_body_bytes, most_together=options.max_bodies_bytes)
    app.add_middleware(ApiKeys, keys=keys, open_paths=OPEN_PATHS, open_folders=())
    app.add_middleware(RequestIds)
    return app


def _empty_app() -> FastAPI:
    # The documentation pages load scripts from elsewhere; the description itself is served.
    app = FastAPI(title="jaxpd", version=__version__, docs_url=None, redoc_url=None, responses=errors.DESCRIBED)
    errors.install(app)
    return app
