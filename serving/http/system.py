"""Routes for those who run a server: probes, metrics, what it is, and profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxpd.errors import FailedPrecondition
from jaxpd.version import __version__
from serving.http.errors import json_response
from serving.http.options import HttpOptions
from serving.http.ready import Ready
from serving.metrics import Source


def make_router(
    gateway: Source,
    ready: Ready,
    metrics_render: Callable[[str], tuple[bytes, str]] | None,
    options: HttpOptions,
) -> APIRouter:
    """`/health`, `/ready`, `/metrics`, `/version`, `/server_info`, `/start_profile`, `/stop_profile`."""
    router = APIRouter(tags=["system"])

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """200 while requests are taken; 503 before and after."""
        ready.check()
        return json_response(200, {"status": "ready"})

    @router.get("/version")
    async def version() -> Response:
        """Of jaxpd."""
        return json_response(200, {"version": __version__})

    @router.get("/server_info")
    async def server_info() -> Response:
        """The model, its limits and its meshes."""
        return json_response(200, _server_info(gateway))

    if metrics_render is not None:

        @router.head("/metrics", include_in_schema=False)
        @router.get("/metrics")
        async def metrics(request: Request) -> Response:
            """For Prometheus."""
            body, content_type = await asyncio.to_thread(metrics_render, request.headers.get("accept", ""))
            return Response(body, headers={"content-type": content_type})

    profiles = _Profiles(options.profile_dir)

    @router.post("/start_profile")
    async def start_profile() -> Response:
        """Begins a profile of what the devices and the host do, with jax.profiler."""
        return json_response(200, await profiles.start())

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        """Ends it and writes it down."""
        return json_response(200, await profiles.stop())

    return router


def _server_info(gateway: Source) -> dict[str, Any]:
    model = gateway.model
    return {
        "version": __version__,
        "model": model.name,
        "architecture": model.architecture,
        "mode": model.mode,
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
        "page_size": model.page_size,
        "meshes": {role: list(specs) for role, specs in model.meshes.items()},
        "state": gateway.state.value,
    }


class _Profiles:
    """One profile at a time, since JAX has one profiler."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._running = False
        self._lock = asyncio.Lock()

    async def start(self) -> dict[str, str]:
        """Raises FailedPrecondition where there is no folder for it, or one runs already."""
        folder = self._needed_folder()
        async with self._lock:
            if self._running:
                raise FailedPrecondition("a profile is running already; POST /stop_profile ends it")
            await asyncio.to_thread(_start_trace, folder)
            self._running = True
        return {"status": "started", "folder": folder.name}

    async def stop(self) -> dict[str, str]:
        """Raises FailedPrecondition where none runs."""
        folder = self._needed_folder()
        async with self._lock:
            if not self._running:
                raise FailedPrecondition("no profile is running; POST /start_profile begins one")
            self._running = False
            await asyncio.to_thread(_stop_trace)
        return {"status": "stopped", "folder": folder.name}

    def _needed_folder(self) -> Path:
        if self._folder is None:
            raise FailedPrecondition(
                "profiles are off; start the server with --profile-dir FOLDER", field="profile_dir"
            )
        return self._folder


def _start_trace(folder: Path) -> None:
    import jax

    try:
        folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(str(folder))
    except (OSError, RuntimeError) as error:
        raise FailedPrecondition(f"the profile cannot be started: {type(error).__name__}; see the log") from error


def _stop_trace() -> None:
    import jax

    jax.profiler.stop_trace()
