"""The `remote` transport: KV from a prefill process to a decode process, pulled over `jax.experimental.transfer`.

    prefill process                         the caller's network              decode process
    ---------------                         --------------------              --------------
    offer(staging, layout)
      settled: put, the lease starts        ---- Offer ------------------->   pull(offer, layout, mesh)
                                                                                its turn: bounded count and bytes
      (data, over the transfer port)        ==== true KV heads ===========>     pulled onto the devices of the plan
                                                                                copied to their other slots, settled
                                                                                done(arrays): into the reserved pages
    offering.ack: withdrawn, freed, done    <--- Ack ----------------------   pulling.taken

The messages (meshes/transfer/messages.py) are plain data; the caller carries them by whatever it has. A mixed worker
does both sides with one transport. What may go wrong, and who notices:

    nobody takes the offer, or the ack is lost     the lease of the offering side
    the peer hangs, stops, or is cut off           the deadline of the pulling side; drop_peer, if the caller knows
    the peer dies                                  its connection ends and the pull fails; the lease over there
    either side aborts                             Refuse or Revoke, or as if it were lost
    a message comes twice or too late              its generation, and that everything ends once: nothing happens

A transport is for one pair of processes: a peer that is stopped in the middle of a pull holds up the transfer server
that it pulls from, and whoever else would pull from it. When a peer is given up, close its transport; when it comes
back, make a new one. The bounds of several transports add up.

One thread does the work of both sides (their `tick`); callers never wait. It calls back outside all locks. Others wait
for arrays and wake it (settle.Waiter, one for each side that has something to do); it goes on where they are stuck.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from meshes.heads import HeadLayout
from meshes.transfer.link import Link
from meshes.transfer.messages import Offer
from meshes.transfer.move import check_layouts, place_heads, receivers, true_heads
from meshes.transfer.offering import Announce, OfferingSide, OfferLimits
from meshes.transfer.offering import Done as OfferDone
from meshes.transfer.pulling import Done as PullDone
from meshes.transfer.pulling import PullingSide, PullLimits
from meshes.transfer.settle import Waiter
from meshes.transfer.shared import Elsewhere, SharedOffering

log = logging.getLogger(__name__)


class RemoteTransport:
    """Both sides of one process. Everything may be called from any thread, also from the call-backs; nothing blocks.

    `elsewhere`: this process is the first of several that hold the staged arrays together (meshes/transfer/shared.py).
    `offering` and `pulling` take the messages of the peers and the caller's aborts; their docstrings say what each
    answers. The transport owns `link` and closes it.
    """

    def __init__(
        self,
        link: Link,
        offers: OfferLimits,
        pulls: PullLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._link = link
        self._news = threading.Condition()
        self._woken = False
        self._closing = False
        self._waiters = [Waiter(self._wake, name) for name in ("jaxpd-remote-staged", "jaxpd-remote-pulled")]
        computed, arrived = (waiter.wait_for for waiter in self._waiters)
        self._shared: SharedOffering | None = None
        if elsewhere is None:
            self.offering = OfferingSide(link, offers, clock=clock, wake=self._wake, wait_for=computed)
        else:
            self.offering = self._shared = SharedOffering(
                link, offers, elsewhere, clock=clock, wake=self._wake, wait_for=computed
            )
        self.pulling = PullingSide(link, pulls, clock=clock, wake=self._wake, wait_for=arrived)
        self._thread = threading.Thread(target=self._run, name="jaxpd-remote", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Of this process's transfer server."""
        return self._link.address

    def offer(
        self, staging: tuple[jax.Array, ...], src: HeadLayout, *, announce: Announce, done: OfferDone
    ) -> int | None:
        """Offers a staged piece: `src.kv_per_device` arrays [tp, L, N, S, W], cut along `model` on axis 0.

        They may still be computed. Returns the offer's id; None: no room, nothing was taken. `announce` gets the
        message for the peer when the piece can be pulled, `done` is called once, when its memory is free. Raises
        ValueError where arrays and layout do not belong together, RuntimeError when closed.
        """
        if self._shared is not None:
            return self._shared.offer_piece(staging, src, announce, done)
        nbytes = sum(array.nbytes for array in staging)
        return self.offering.offer(true_heads(staging, src), src, nbytes, announce, done)

    def pull(
        self, offer: Offer, dst: HeadLayout, dst_mesh: Mesh, done: PullDone, *, timeout_s: float | None = None
    ) -> bool:
        """Fetches an offered piece into a replica's layout: `dst.kv_per_device` arrays [tp, L, N, S, W] on `dst_mesh`.

        `dst_mesh` is 1 x tp. It may take `timeout_s` (None: as in the limits), but never longer than the lease. `done`
        is called once, with settled arrays or the error; then call `pulling.taken`. The arrays may share buffers, so do
        not donate them. False: the offer is known already. Raises ValueError where the KV heads do not fit (answer with
        a Refuse), RuntimeError when closed.
        """
        check_layouts(offer.layout, dst, dst_mesh)
        place = functools.partial(place_heads, src=offer.layout, dst=dst, dst_mesh=dst_mesh)
        targets = receivers(offer.layout, dst, dst_mesh)
        return self.pulling.pull(offer, targets, place, done, timeout_s=timeout_s)

    def close(self) -> None:
        """Ends everything: all offers are withdrawn, all pulls fail, and everybody is called. Idempotent."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with self._news:
            self._woken = True
            self._news.notify_all()

    def _run(self) -> None:
        try:
            while not self._closing:
                waits = [self.offering.tick(), self.pulling.tick()]
                with self._news:
                    if not self._woken and not self._closing:
                        self._news.wait(min((w for w in waits if w is not None), default=None))
                    self._woken = False
        except Exception:
            log.exception("the thread of the remote transport failed: everything on its way ends")
        finally:
            self.offering.close()
            self.pulling.close()
            self._link.close()
            for waiter in self._waiters:
                waiter.close()
