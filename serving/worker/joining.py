"""A worker tells routers where it is, again and again: one that starts later, or anew, finds out soon."""

from __future__ import annotations

import asyncio
import logging

import grpc

from serving.cluster import Cluster
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc

logger = logging.getLogger(__name__)

EVERY_S = 2.0


async def join(router: str, address: str, cluster: Cluster, *, every_s: float = EVERY_S) -> None:
    """Says Join to one router, for ever; the log says when that begins to work and when it stops."""
    joined: bool | None = None
    async with cluster.channel(router) as channel:
        stub = worker_pb2_grpc.RouterStub(channel)
        while True:
            try:
                await stub.Join(pb.JoinRequest(address=address), metadata=cluster.metadata, timeout=every_s)
            except grpc.aio.AioRpcError as error:
                if joined is not False:
                    logger.warning(
                        "router %s cannot be joined yet (%s: %s); trying again",
                        router,
                        error.code().name,
                        error.details(),
                    )
                joined = False
            else:
                if joined is not True:
                    logger.info("joined router %s as %s", router, address)
                joined = True
            await asyncio.sleep(every_s)
