"""How a command reaches the cluster that another command of this machine holds: one JSON object a line, over a Unix
socket in the cluster's folder.

    {"do": "status", "after": 7}    {"do": "scale", "counts": {"decode": 2}}    {"do": "end"}

The answer is the status, or {"error": ..., "code": ...}.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import socket
import socketserver
import threading
from collections.abc import Mapping
from typing import Any

from jaxpd.errors import InvalidArgument, JaxpdError, NotFound, Unavailable
from serving.launch.controller import Controller, Status, UnitStatus

SOCKET = "control.sock"
ANSWER_S = 10.0


class ControlSocket:
    """Answers for a controller until it is closed."""

    def __init__(self, folder: pathlib.Path, controller: Controller) -> None:
        path = folder / SOCKET
        path.unlink(missing_ok=True)  # of a command that was killed: the caller holds the folder's lock
        self._path = path

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    self.wfile.write(json.dumps(_answer(controller, line)).encode() + b"\n")

        self._server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="control", daemon=True).start()

    def close(self) -> None:
        """Takes no more calls."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


class LocalCluster:
    """The cluster of this name on this machine. Each call raises NotFound when none runs."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        self._path = folder / SOCKET
        self._name = name

    def status(self, after: int = 0) -> Status:
        """See `Controller.status`."""
        return self._ask({"do": "status", "after": after})

    def scale(self, counts: Mapping[str, int]) -> Status:
        """See `Controller.scale`. Raises InvalidArgument as well."""
        return self._ask({"do": "scale", "counts": dict(counts)})

    def end(self) -> Status:
        """See `Controller.end`."""
        return self._ask({"do": "end"})

    def _ask(self, question: Mapping[str, Any]) -> Status:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_S)
            try:
                connection.connect(str(self._path))
                connection.sendall(json.dumps(question).encode() + b"\n")
                line = connection.makefile("rb").readline()
            except (FileNotFoundError, ConnectionError):
                line = b""
        if not line:
            raise NotFound(f"no cluster {self._name} runs on this machine; start one with: jaxpd up", field="name")
        return _status(json.loads(line))


def _answer(controller: Controller, line: bytes) -> dict[str, Any]:
    try:
        question = json.loads(line)
        after = 0
        match question:
            case {"do": "status"}:
                after = int(question.get("after", 0))
            case {"do": "scale", "counts": counts}:
                controller.scale({str(role): int(n) for role, n in counts.items()})
            case {"do": "end"}:
                controller.end()
            case _:
                raise InvalidArgument("the question must be status, scale or end")
        return dataclasses.asdict(controller.status(after))
    except JaxpdError as error:
        return {"error": str(error), "code": error.code, "field": error.field}


def _status(answer: dict[str, Any]) -> Status:
    if "error" in answer:
        kind = {cls.code: cls for cls in (InvalidArgument, NotFound, Unavailable)}.get(answer["code"], JaxpdError)
        raise kind(answer["error"], field=answer["field"])
    units = tuple(UnitStatus(**unit) for unit in answer.pop("units"))
    events = tuple((int(number), str(text)) for number, text in answer.pop("events"))
    return Status(units=units, events=events, **answer)
