"""A follower: it makes the calls that its leader makes, on its part of the mesh.

    meet --> Setup --> compile, load its weights --> Ready --> [descriptor: the same call] ... --> Goodbye: returns
                                                                  |
                                        leader lost, or a call failed: the process ends with EXIT_BROKEN

The leader ends a follower. A signal to end that comes from elsewhere waits for it, so that a launcher which stops all
processes at once does not take the followers from a leader that still answers its requests; the second one ends it.
"""

from __future__ import annotations

import collections
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import jax
import numpy as np

from jaxpd.batch import BatchShape
from jaxpd.checkpoints.fingerprint import fingerprint
from jaxpd.checkpoints.placement import load_params
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.config import EngineConfig
from jaxpd.device import Forwarded, PoolDevice
from jaxpd.errors import FailedPrecondition, JaxpdError
from jaxpd.multihost import EXIT_BROKEN
from jaxpd.multihost.channel import Channel
from jaxpd.multihost.descriptors import (
    Begin,
    CloseTransport,
    Descriptor,
    DropPiece,
    EndOffer,
    Failed,
    Forward,
    Gather,
    Goodbye,
    OfferPiece,
    OpenTransport,
    Ready,
    Sample,
    Score,
    SetSlot,
    Setup,
    Step,
    decode,
    encode,
)
from jaxpd.multihost.offers import FollowerOffers
from jaxpd.multihost.watch import Watched
from jaxpd.programs import Programs, ProgramSpec
from jaxpd.progress import Progress
from jaxpd.startup import use_compile_cache
from jaxpd.version import __version__
from meshes.devices import shared_mesh
from meshes.sharding import ShardingRules
from meshes.spec import MeshSpec

log = logging.getLogger(__name__)


def follow(
    channel: Channel,
    resolve: Callable[[], Checkpoint],
    config: EngineConfig,
    *,
    progress: Progress,
    transfer_host: str = "127.0.0.1",
    transfer_ports: range = range(0, 1),
) -> None:
    """Serves the leader at the other end of `channel` until it says goodbye. Call it from the main thread.

    `resolve` finds the checkpoint, while the leader already hears that this process lives. `transfer_host` and
    `transfer_ports` are where this process's transfer servers listen (offers.py). The process ends by itself, with
    EXIT_BROKEN, where the leader is lost or a call fails.
    """
    inbox: queue.SimpleQueue[Descriptor] = queue.SimpleQueue()
    leader = Watched(
        "leader",
        channel,
        on_message=lambda message: inbox.put(decode(message)),
        on_end=lambda reason: _end(f"the leader is lost: {reason}"),
    )
    _wait_for_the_leader()
    leader.start()
    try:
        checkpoint = resolve()
        setup = inbox.get()
        if isinstance(setup, Goodbye):
            return
        assert isinstance(setup, Setup), "the leader begins with it"
        offers = FollowerOffers(transfer_host, transfer_ports, send=lambda it: leader.send(encode(it)))
        calls = _Calls(_device(setup, checkpoint, config, progress), offers)
        leader.send(encode(Ready()))
        log.info("process %d follows", jax.process_index())
        while not isinstance(descriptor := inbox.get(), Goodbye):
            if isinstance(descriptor, Begin):
                leader.expect(descriptor.silence_s)
            else:
                calls.make(descriptor)
    except Exception as error:
        log.exception("a follower cannot go on")
        reason = error.message if isinstance(error, JaxpdError) else f"{type(error).__name__}: {error}"
        leader.send(encode(Failed(reason)))
        _end(reason)
    offers.close()
    leader.close()


def _device(setup: Setup, checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> PoolDevice:
    model = fingerprint(checkpoint)
    if (setup.version, setup.model) != (__version__, model):
        raise FailedPrecondition(
            f"the leader has jaxpd {setup.version} and a model with the fingerprint {setup.model}, this process jaxpd "
            f"{__version__} and one with {model}: start all processes of a worker with the same ones",
            field="model",
        )
    use_compile_cache(config.compile_cache)
    rules, dtype = ShardingRules(), np.dtype(setup.dtype)
    mesh = shared_mesh(MeshSpec(*setup.mesh), jax.devices(), weights_fit_one_device=True)
    spec = ProgramSpec(
        config=checkpoint.config,
        mesh=mesh,
        dtype=dtype,
        num_pages=setup.num_pages,
        page_size=setup.page_size,
        num_slots=setup.num_slots,
        shapes=tuple(BatchShape(*shape) for shape in setup.shapes),
        rules=rules,
        kernels=setup.kernels,
    )
    programs, kinds = Programs(), {"gathers": setup.role == "prefill", "scatters": False, "scores": True}
    if config.precompile:
        tasks = list(programs.compile_tasks(spec, **kinds))
        with (
            progress.stage("compiling", total=float(len(tasks)), unit="programs") as stage,
            ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="jaxpd-compile") as executor,
        ):
            for (name, _), _ in zip(tasks, executor.map(lambda task: task[1](), tasks), strict=True):
                stage.advance(1.0, name)
    else:
        programs.compile_later(spec, **kinds)
    (params,) = load_params(checkpoint.source, checkpoint.config, [mesh], dtype=dtype, rules=rules, progress=progress)
    return PoolDevice(spec, params, programs)


class _Calls:
    """Descriptors made into calls, in the main thread."""

    def __init__(self, device: PoolDevice, offers: FollowerOffers) -> None:
        self._device = device
        self._offers = offers
        self._unsampled: collections.deque[Forwarded] = collections.deque()

    def make(self, descriptor: Descriptor) -> None:
        device = self._device
        match descriptor:
            case Step(shape, packed):
                device.step(BatchShape(*shape), packed)
            case Forward(shape, packed):
                self._unsampled.append(device.forward(BatchShape(*shape), packed))
            case Sample(mask_RBW):
                device.sample(self._unsampled.popleft(), mask_RBW)
            case SetSlot(replica, slot, options_K, counts_V):
                device.set_slot(replica, slot, options_K, counts_V)
            case Score():
                device.score(descriptor.replica, descriptor.row, descriptor.targets.tolist())
            case Gather(first, replica, page_ids):
                self._offers.hold(first, device.gather(replica, page_ids), device.spec.layout.heads)
            case OpenTransport() | CloseTransport() | OfferPiece() | EndOffer() | DropPiece():
                self._offers.make(descriptor)
            case other:
                raise ValueError(f"the leader sent a {type(other).__name__}")


def _wait_for_the_leader() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    asked: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if asked:
            _end(f"asked to end twice ({signal.Signals(number).name})")
        asked.append(number)
        print("jaxpd: this process ends when the leader of the worker does (once more to end it now)", file=sys.stderr)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _end(reason: str) -> NoReturn:
    """Ends the process under whatever thread is stuck in a collective."""
    print(f"jaxpd: error: {reason}; this process ends, the whole worker has to be started again", file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_BROKEN)
