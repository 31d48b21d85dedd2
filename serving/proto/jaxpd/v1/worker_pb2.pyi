from serving.proto.jaxpd.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_MIXED: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_MIXED: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState

class Identity(_message.Message):
    __slots__ = ("model", "dtype", "page_size", "num_layers", "num_heads", "num_kv_heads", "lanes", "streams", "protocol", "oldest_protocol")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    model: str
    dtype: str
    page_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    lanes: int
    streams: int
    protocol: int
    oldest_protocol: int
    def __init__(self, model: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., lanes: _Optional[int] = ..., streams: _Optional[int] = ..., protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "dtype", "page_size", "tokenizer_json", "tokenizer_config_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    page_size: int
    tokenizer_json: str
    tokenizer_config_json: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., tokenizer_json: _Optional[str] = ..., tokenizer_config_json: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("version", "instance", "role", "identity", "model", "mode", "meshes", "replicas", "pages", "slots", "queue_limit", "page_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MESHES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance: str
    role: WorkerRole
    identity: Identity
    model: Model
    mode: str
    meshes: _containers.RepeatedScalarFieldContainer[str]
    replicas: int
    pages: int
    slots: int
    queue_limit: int
    page_bytes: int
    def __init__(self, version: _Optional[str] = ..., instance: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., mode: _Optional[str] = ..., meshes: _Optional[_Iterable[str]] = ..., replicas: _Optional[int] = ..., pages: _Optional[int] = ..., slots: _Optional[int] = ..., queue_limit: _Optional[int] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class SetDrainingRequest(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: _Optional[bool] = ...) -> None: ...

class SetDrainingResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    def __init__(self, state: _Optional[_Union[WorkerState, str]] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "start", "abort", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    start: Start
    abort: Abort
    ping: Ping
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("protocol", "oldest_protocol", "router")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    oldest_protocol: int
    router: str
    def __init__(self, protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ..., router: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Start(_message.Message):
    __slots__ = ("request", "whole", "prefill", "decode")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    request: EngineRequest
    whole: WholeLeg
    prefill: PrefillLeg
    decode: DecodeLeg
    def __init__(self, request: _Optional[_Union[EngineRequest, _Mapping]] = ..., whole: _Optional[_Union[WholeLeg, _Mapping]] = ..., prefill: _Optional[_Union[PrefillLeg, _Mapping]] = ..., decode: _Optional[_Union[DecodeLeg, _Mapping]] = ...) -> None: ...

class WholeLeg(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillLeg(_message.Message):
    __slots__ = ("decode_address", "decode_instance", "handoffs")
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    decode_address: str
    decode_instance: str
    handoffs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, decode_address: _Optional[str] = ..., decode_instance: _Optional[str] = ..., handoffs: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeLeg(_message.Message):
    __slots__ = ("handoffs",)
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    handoffs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handoffs: _Optional[_Iterable[int]] = ...) -> None: ...

class EngineRequest(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "sampling", "stopping", "logprobs", "prompt_logprobs", "priority", "cache_salt", "outputs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingOptions
    stopping: _inference_pb2.StoppingOptions
    logprobs: int
    prompt_logprobs: int
    priority: int
    cache_salt: str
    outputs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingOptions, _Mapping]] = ..., stopping: _Optional[_Union[_inference_pb2.StoppingOptions, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., outputs: _Optional[_Iterable[int]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "sample")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample: int
    def __init__(self, request_id: _Optional[str] = ..., sample: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("welcome", "events", "reading")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    welcome: DescribeResponse
    events: Events
    reading: Reading
    def __init__(self, welcome: _Optional[_Union[DescribeResponse, _Mapping]] = ..., events: _Optional[_Union[Events, _Mapping]] = ..., reading: _Optional[_Union[Reading, _Mapping]] = ...) -> None: ...

class Events(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("tokens", "handed_off", "ended")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    tokens: NewTokens
    handed_off: HandedOff
    ended: Ended
    def __init__(self, tokens: _Optional[_Union[NewTokens, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ...) -> None: ...

class NewTokens(_message.Message):
    __slots__ = ("request_id", "sample", "first_index", "token_ids", "logprobs", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., sample: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("request_id", "sample", "cached_tokens", "moments")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample: int
    cached_tokens: int
    moments: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Moment]
    def __init__(self, request_id: _Optional[str] = ..., sample: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., moments: _Optional[_Iterable[_Union[_inference_pb2.Moment, _Mapping]]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("request_id", "sample", "reason", "stop_token_id", "usage", "failure", "moments")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample: int
    reason: _inference_pb2.FinishReason
    stop_token_id: int
    usage: _inference_pb2.Usage
    failure: Failure
    moments: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Moment]
    def __init__(self, request_id: _Optional[str] = ..., sample: _Optional[int] = ..., reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., moments: _Optional[_Iterable[_Union[_inference_pb2.Moment, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "field", "retry_after_s", "handoff_reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_REASON_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    field: str
    retry_after_s: float
    handoff_reason: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., handoff_reason: _Optional[str] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("state", "queued", "running", "staging_bytes", "crossed_bytes", "replicas", "handoff_failures", "steps")
    class HandoffFailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    CROSSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FAILURES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    queued: int
    running: int
    staging_bytes: int
    crossed_bytes: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaReading]
    handoff_failures: _containers.ScalarMap[str, int]
    steps: _containers.RepeatedCompositeFieldContainer[StepReading]
    def __init__(self, state: _Optional[_Union[WorkerState, str]] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., crossed_bytes: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaReading, _Mapping]]] = ..., handoff_failures: _Optional[_Mapping[str, int]] = ..., steps: _Optional[_Iterable[_Union[StepReading, _Mapping]]] = ...) -> None: ...

class ReplicaReading(_message.Message):
    __slots__ = ("role", "pool", "replica", "free_pages", "num_pages", "free_slots", "num_slots", "pinned_pages", "cached_pages", "prefix_queried", "prefix_hit", "prefix_evicted", "preempted")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_EVICTED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    role: str
    pool: int
    replica: int
    free_pages: int
    num_pages: int
    free_slots: int
    num_slots: int
    pinned_pages: int
    cached_pages: int
    prefix_queried: int
    prefix_hit: int
    prefix_evicted: int
    preempted: int
    def __init__(self, role: _Optional[str] = ..., pool: _Optional[int] = ..., replica: _Optional[int] = ..., free_pages: _Optional[int] = ..., num_pages: _Optional[int] = ..., free_slots: _Optional[int] = ..., num_slots: _Optional[int] = ..., pinned_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., prefix_queried: _Optional[int] = ..., prefix_hit: _Optional[int] = ..., prefix_evicted: _Optional[int] = ..., preempted: _Optional[int] = ...) -> None: ...

class StepReading(_message.Message):
    __slots__ = ("sequences", "step_s")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    sequences: int
    step_s: float
    def __init__(self, sequences: _Optional[int] = ..., step_s: _Optional[float] = ...) -> None: ...

class PeerMessage(_message.Message):
    __slots__ = ("hello", "ping", "reserve", "piece", "first_token", "revoke", "forget", "reserved", "not_reserved", "ack", "refuse")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    NOT_RESERVED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    ping: Ping
    reserve: Reserve
    piece: Piece
    first_token: FirstToken
    revoke: Revoke
    forget: Forget
    reserved: Reserved
    not_reserved: NotReserved
    ack: Ack
    refuse: Refuse
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., not_reserved: _Optional[_Union[NotReserved, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("instance", "identity", "transfer_address")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    identity: Identity
    transfer_address: str
    def __init__(self, instance: _Optional[str] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., transfer_address: _Optional[str] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("handoff",)
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    handoff: int
    def __init__(self, handoff: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("handoff", "hit_pages")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    HIT_PAGES_FIELD_NUMBER: _ClassVar[int]
    handoff: int
    hit_pages: int
    def __init__(self, handoff: _Optional[int] = ..., hit_pages: _Optional[int] = ...) -> None: ...

class NotReserved(_message.Message):
    __slots__ = ("handoff", "reason")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handoff: int
    reason: str
    def __init__(self, handoff: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("handoff", "first", "count", "offers")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    handoff: int
    first: int
    count: int
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    def __init__(self, handoff: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("handoff", "token")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    handoff: int
    token: int
    def __init__(self, handoff: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class Forget(_message.Message):
    __slots__ = ("handoff", "reason")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handoff: int
    reason: str
    def __init__(self, handoff: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("id", "generation", "key", "address", "num_heads", "num_kv_heads", "tp", "shape", "dtype", "lease_s", "elsewhere")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    key: int
    address: str
    num_heads: int
    num_kv_heads: int
    tp: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    lease_s: float
    elsewhere: _containers.RepeatedCompositeFieldContainer[Source]
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ..., key: _Optional[int] = ..., address: _Optional[str] = ..., num_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., tp: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., lease_s: _Optional[float] = ..., elsewhere: _Optional[_Iterable[_Union[Source, _Mapping]]] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("address", "key", "heads")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    address: str
    key: int
    heads: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, address: _Optional[str] = ..., key: _Optional[int] = ..., heads: _Optional[_Iterable[int]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("id", "generation")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("id", "generation", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    reason: str
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("id", "generation", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    reason: str
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("name", "address", "role", "state", "meshes", "reading", "silent_s", "trouble", "legs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESHES_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    role: WorkerRole
    state: str
    meshes: _containers.RepeatedScalarFieldContainer[str]
    reading: Reading
    silent_s: float
    trouble: str
    legs: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., state: _Optional[str] = ..., meshes: _Optional[_Iterable[str]] = ..., reading: _Optional[_Union[Reading, _Mapping]] = ..., silent_s: _Optional[float] = ..., trouble: _Optional[str] = ..., legs: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker", "draining")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    worker: str
    draining: bool
    def __init__(self, worker: _Optional[str] = ..., draining: _Optional[bool] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...
