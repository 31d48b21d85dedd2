"""jaxpd.v1.Worker: what routers and other workers may ask of a worker, over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from jaxpd.errors import FailedPrecondition, Internal, InvalidArgument, JaxpdError, Unavailable
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.wire import refuse_unknown_fields
from serving.worker import session as sessions
from serving.worker.description import Description, description_to_proto
from serving.worker.peers import Peers, first_of
from serving.worker.reading import STATES
from serving.worker.wire import OLDEST_PROTOCOL, PROTOCOL
from serving.worker.worker import Worker

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Worker"].full_name
LAST_WORDS_S = 1.0  # for the end of a session to leave


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """The service; `peers` is None until the engine is there, and for ever in a worker that takes no hand-offs."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.peers: Peers | None = None
        self._described: tuple[Description, pb.DescribeResponse] | None = None

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        """The worker and its model, once it is loaded."""
        refuse_unknown_fields(request)
        description = self._worker.description
        if self._described is None or self._described[0] is not description:
            self._described = description, await asyncio.to_thread(description_to_proto, description)
        return self._described[1]

    async def SetDraining(
        self, request: pb.SetDrainingRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetDrainingResponse:
        """Take nothing new, or take it again."""
        refuse_unknown_fields(request)
        return pb.SetDrainingResponse(state=STATES[self._worker.set_draining(request.draining)])

    async def Session(
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.WorkerMessage, None]:
        """A router's session, until its stream ends, or it is silent."""
        description = self._worker.description
        first = await first_of(request_iterator)
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("the first message of a session must be a hello")
        check_protocol(first.hello)
        with self._worker.session(first.hello.router or context.peer()) as session:
            yield pb.WorkerMessage(welcome=description_to_proto(description, tokenizer=False))
            tasks = [
                asyncio.create_task(self._listen(session, request_iterator), name="jaxpd-session"),
                asyncio.create_task(_end_at_last(session, asyncio.current_task()), name="jaxpd-session-end"),
            ]
            try:
                async with contextlib.aclosing(session.messages()) as messages:
                    async for message in messages:
                        yield message
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)  # nobody reads from the stream any more

    async def _listen(self, session: sessions.Session, messages: AsyncIterator[pb.RouterMessage]) -> None:
        """Hears what the router says; the end of that is the end of the session."""
        try:
            async for message in messages:
                self._worker.hear(session, message)
            session.end()
        except JaxpdError as error:
            session.end(error)
        except (grpc.aio.BaseError, asyncio.CancelledError):
            session.end(Unavailable("the stream has ended"))
        except Exception:
            logger.exception("the session of router %s failed", session.router)
            session.end(Internal("internal error; the worker's log says more"))

    async def Peer(
        self, request_iterator: AsyncIterator[pb.PeerMessage], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.PeerMessage, None]:
        """Hand-offs of another worker, until its stream ends, or it is silent."""
        description = self._worker.description
        if self.peers is None or not self.peers.takes:
            raise FailedPrecondition(
                f"this is a {description.role.value} worker, which takes no hand-offs; only decode workers do"
            )
        async with contextlib.aclosing(self.peers.accept(request_iterator)) as messages:
            async for message in messages:
                yield message


async def _end_at_last(session: sessions.Session, call: asyncio.Task[None] | None) -> None:
    """Ends a call that waits for a router to read, when there is no use in that any more."""
    await session.over.wait()
    await asyncio.sleep(LAST_WORDS_S)
    if call is not None:
        call.cancel()


def check_protocol(hello: pb.RouterHello) -> int:
    """The version of the protocol that both speak. Raises FailedPrecondition naming both."""
    version = min(PROTOCOL, hello.protocol)
    if version < max(OLDEST_PROTOCOL, hello.oldest_protocol):
        raise FailedPrecondition(
            f"router {hello.router} speaks session protocol {_span(hello.oldest_protocol, hello.protocol)}, this "
            f"worker {_span(OLDEST_PROTOCOL, PROTOCOL)}: upgrade the older of the two"
        )
    return version


def _span(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"
