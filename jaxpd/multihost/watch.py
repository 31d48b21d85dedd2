"""Both ends of a channel, watched: messages as they come, signs of life both ways, and one word when it ends.

    start --> [receiving, a sign of life every BEAT_S] --> ended: nothing came for `silence_s`, or the connection ended
                                                      \\-> closed by this end: no word

While programs are compiled and weights are read a process may be busy for long with what no other thread can interrupt.
Nobody waits for an answer then, so the bound is START_SILENCE_S until all are ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from jaxpd.multihost.channel import Channel, ChannelEnded

log = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 5.0
START_SILENCE_S = 60.0


class Watched:
    """A channel with its threads. `on_message` gets messages in order, `on_end` the reason, once and last."""

    def __init__(
        self, name: str, channel: Channel, *, on_message: Callable[[bytes], None], on_end: Callable[[str], None]
    ) -> None:
        self.name = name
        self._channel = channel
        self._on_message = on_message
        self._on_end = on_end
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"jaxpd-{name}-{what}", daemon=True)
            for what, target in (("receive", self._receive), ("beat", self._beat))
        ]

    def start(self) -> None:
        """Starts receiving and saying that this end lives."""
        for thread in self._threads:
            thread.start()

    def send(self, message: bytes) -> None:
        """Sends a message, from any thread. What cannot be sent is lost; `on_end` says so."""
        try:
            self._channel.send(message)
        except ChannelEnded as error:
            self._end(str(error))

    def expect(self, silence_s: float) -> None:
        """The bound from now on."""
        self._channel.expect(silence_s)

    def close(self) -> None:
        """Ends it without a word. Idempotent."""
        self._over.set()
        self._channel.close()

    def _receive(self) -> None:
        try:
            while not self._over.is_set():
                if message := self._channel.receive():
                    self._on_message(message)
        except ChannelEnded as error:
            self._end(str(error))
        except Exception as error:
            log.exception("a message of %s was not understood", self.name)
            self._end(f"a message of it was not understood ({type(error).__name__})")

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self.send(b"")

    def _end(self, reason: str) -> None:
        with _ending:
            if self._over.is_set():
                return
            self._over.set()
        self._channel.close()
        self._on_end(reason)


_ending = threading.Lock()  # two threads of a channel may see its end at once
