"""jaxpd.v1.Control: what the server is, how full it is, and abort."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc

from jaxpd.errors import InvalidArgument
from jaxpd.version import __version__
from serving.gateway import Gateway, State
from serving.interceptors import this_call
from serving.model import ServedModel
from serving.proto.jaxpd.v1 import control_pb2 as pb
from serving.proto.jaxpd.v1 import control_pb2_grpc
from serving.understand import DEFAULT_MAX_TOKENS
from serving.wire import refuse_unknown_fields

if TYPE_CHECKING:
    from jaxpd.stats import EngineStats

_STATES = {
    State.STARTING: pb.SERVER_STATE_STARTING,
    State.READY: pb.SERVER_STATE_READY,
    State.DRAINING: pb.SERVER_STATE_DRAINING,
}


class ControlServicer(control_pb2_grpc.ControlServicer):
    """jaxpd.v1.Control."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started_s = time.monotonic()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """State and load, in every state."""
        refuse_unknown_fields(request)
        stats = self._gateway.stats()
        return pb.GetServerInfoResponse(
            version=__version__,
            state=_STATES[self._gateway.state],
            uptime_s=time.monotonic() - self._started_s,
            queued_requests=0 if stats is None else stats.queued,
            running_requests=0 if stats is None else stats.running,
            pools=[] if stats is None else _pools(stats, self._gateway.model),
        )

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """The model, once it is loaded."""
        refuse_unknown_fields(request)
        model = self._gateway.model
        return pb.GetModelInfoResponse(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            eos_token_ids=model.eos_token_ids,
            has_tokenizer=model.tokenizer is not None,
            has_chat_template=model.tokenizer is not None and model.tokenizer.has_chat_template,
            dtype=model.dtype,
            page_size=model.page_size,
        )

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends one request; of those of other API keys it knows nothing."""
        refuse_unknown_fields(request)
        if not request.request_id:
            raise InvalidArgument("request_id is missing; name the request to abort", field="request_id")
        return pb.AbortResponse(aborted=self._gateway.abort(request.request_id, this_call().origin.caller))


def _pools(stats: EngineStats, model: ServedModel) -> list[pb.PoolInfo]:
    pools: dict[tuple[str, int], pb.PoolInfo] = {}
    for replica in stats.replicas:
        mesh = model.meshes[replica.role][replica.pool]
        pool = pools.setdefault((replica.role, replica.pool), pb.PoolInfo(role=replica.role, mesh=mesh))
        pool.free_pages.append(replica.free_pages)
        pool.total_pages.append(replica.num_pages)
    return list(pools.values())
