"""One process of a worker of several, for tests: `python tests/jaxpd/multihost/worker_process.py SETTINGS`, a JSON.

The leader connects to the test and does what it says; followers follow. See several.py, the other end.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from multiprocessing.connection import Client
from typing import Any

import jax

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.engine import Engine
from jaxpd.multihost import EXIT_BROKEN
from jaxpd.multihost.follower import follow
from jaxpd.multihost.joining import Processes, check, join, meet_followers, meet_leader
from jaxpd.multihost.leader import Followers
from jaxpd.progress import SilentProgress
from jaxpd.remote.messages import Message
from jaxpd.request import Event, TokensEvent
from meshes.transfer.link import JaxLink
from meshes.transfer.offering import OfferLimits
from meshes.transfer.pulling import PullLimits
from meshes.transfer.remote import RemoteTransport


class Leader:
    """An engine that does what comes over a connection."""

    def __init__(self, settings: dict[str, Any], processes: Processes, config: EngineConfig) -> None:
        self._sending = threading.Lock()
        self._to_test = Client(("127.0.0.1", settings["port"]), authkey=bytes.fromhex(settings["key"]))
        channels = meet_followers(processes)
        self._followers = Followers(channels, on_broken=self._on_broken, silence_s=processes.silence_s)
        checkpoint = resolve(settings["folder"], progress=SilentProgress())
        self._engine = Engine(checkpoint, config, on_events=self._on_events, followers=self._followers)
        self._engine.start()
        self._say("ready")
        self.name = "D"
        self.transport: RemoteTransport

    def run(self) -> None:
        while True:
            what, *values = self._to_test.recv()
            getattr(self, f"do_{what}")(*values)
            if what == "close":
                return

    def do_submit(self, *values: Any) -> None:
        self._engine.submit(*values)

    def do_abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def do_stats(self) -> None:
        self._say("stats", self._engine.stats())

    def do_connect(self, lease_s: float) -> None:
        offers, pulls = OfferLimits(max_bytes=1 << 30, lease_s=lease_s), PullLimits(max_bytes=1 << 30)
        self.transport = self._followers.transport(JaxLink(), offers, pulls, streams=1)
        self._engine.side.connected(self)

    def do_message(self, message: Message) -> None:
        self._engine.side.received(self, message)

    def do_lose(self) -> None:
        self._engine.side.lost(self.name, "the test says so")
        self.transport.close()
        self._say("lost")

    def do_close(self) -> None:
        self._engine.close()
        self._say("closed")

    def send(self, message: Message) -> None:
        """As `jaxpd.remote.messages.Peer`."""
        self._say("message", message)

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokensEvent):
                self._say("tokens", event)
            else:
                error = "" if event.error is None else f"{event.error.code}: {event.error.message}"
                self._say("end", event.request_id, event.reason, error)

    def _on_broken(self, reason: str) -> None:
        self._engine.give_up(reason)
        self._say("broken", reason)
        os._exit(EXIT_BROKEN)

    def _say(self, *words: Any) -> None:
        with self._sending:
            self._to_test.send(words)


def main() -> None:
    settings = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    jax.config.update("jax_platforms", "cpu")
    processes, config = Processes(**settings["processes"]), EngineConfig(**settings["config"])
    join(processes, check(processes, config.role or "mixed", config.mesh))
    if processes.leads:
        Leader(settings, processes, config).run()
        return
    follow(
        meet_leader(processes),
        lambda: resolve(settings["folder"], progress=SilentProgress()),
        config,
        progress=SilentProgress(),
    )


if __name__ == "__main__":
    main()
