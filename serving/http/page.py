"""The page at `/`: fixed files from serving/web, read once, with what a browser needs to cache and to trust them.

The page runs no inline script, loads nothing from elsewhere and cannot make markup of text: the policy sent along
forbids all three, so an answer of the model stays text whatever it holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxpd.errors import NotFound

FILES = ("index.html", "style.css", "page.js", "net.js", "chat.js", "picture.js", "timeline.js")
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",  # the icon stands in the page itself
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


@dataclasses.dataclass(frozen=True)
class Asset:
    """One file of the page. `etag` changes with its contents."""

    body: bytes
    content_type: str
    etag: str


def make_router() -> APIRouter:
    """`GET /` and `GET /page/{name}`; both answer HEAD and `If-None-Match`. Another name is NotFound."""
    router = APIRouter(include_in_schema=False)
    assets = load_assets()

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return respond(assets["index.html"], request.headers.get("if-none-match"))

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            raise NotFound("the page has no such file")
        return respond(assets[name], request.headers.get("if-none-match"))

    return router


def load_assets() -> dict[str, Asset]:
    """Every file of the page, by name."""
    folder = importlib.resources.files("serving") / "web"
    assets = {}
    for name in FILES:
        body = (folder / name).read_bytes()
        content_type = f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        assets[name] = Asset(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return assets


def respond(asset: Asset, if_none_match: str | None) -> Response:
    """The file, or 304 where the browser has it. It asks each time: a new version of the server is seen at once."""
    headers = {
        "etag": asset.etag,
        "cache-control": "no-cache",
        "content-security-policy": CONTENT_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
    }
    known = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.content_type, headers=headers)
