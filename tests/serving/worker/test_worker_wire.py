"""What crosses a session or a peer stream comes out as it went in."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpd.cache.prefix import PrefixStats
from jaxpd.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HandoffFailed,
    Internal,
    InvalidArgument,
    JaxpdError,
    NotFound,
    ResourceExhausted,
    TooLong,
    Unauthenticated,
    Unavailable,
)
from jaxpd.life import Life, Moment, Stage
from jaxpd.policies.workers import Role
from jaxpd.remote.messages import FirstToken, Forget, Message, NotReserved, Piece, Reserve, Reserved
from jaxpd.request import (
    DecodeLeg,
    FinishEvent,
    FinishReason,
    PrefillLeg,
    Request,
    SamplingParams,
    Timings,
    TokenLogprobs,
    TokensEvent,
    Usage,
)
from jaxpd.stats import EngineStats, ReplicaStats
from jaxpd.structured import CHOICE, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX, StructuredOutput
from meshes.heads import head_layout
from meshes.transfer.identity import Identity
from meshes.transfer.messages import Ack, Offer, Refuse, Revoke, Source
from serving.gateway import State
from serving.model import ServedModel
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.worker.description import Description, description_from_proto, description_to_proto
from serving.worker.reading import Reading, reading_from_proto, reading_to_proto
from serving.worker.wire import (
    Started,
    event_from_proto,
    events_from_proto,
    events_to_proto,
    failure_from_proto,
    failure_to_proto,
    request_from_proto,
    request_to_proto,
    start_from_proto,
    start_to_proto,
)
from serving.worker.wire_peer import PeerHello, hello_from_proto, hello_to_proto, peer_from_proto, peer_to_proto

bits64 = st.integers(0, 2**64 - 1)
int31 = st.integers(0, 2**31 - 1)
counts = st.integers(0, 10_000)
seconds = st.floats(0, 1e6)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
tokens = st.lists(int31, max_size=5).map(tuple)
reals = st.floats(allow_nan=False, allow_infinity=False)


def crossed(message: Any) -> Any:
    """As the other process reads it."""
    return type(message).FromString(message.SerializeToString())


structured = st.one_of(
    st.none(),
    st.just(StructuredOutput(kind=JSON_OBJECT)),
    st.builds(StructuredOutput, kind=st.sampled_from([JSON_SCHEMA, REGEX, GRAMMAR]), text=text),
    st.builds(StructuredOutput, kind=st.just(CHOICE), choices=st.lists(text, max_size=3).map(tuple)),
)
params = st.builds(
    SamplingParams,
    max_tokens=int31,
    n=int31,
    temperature=reals,
    top_k=int31,
    top_p=reals,
    min_p=reals,
    repetition_penalty=reals,
    presence_penalty=reals,
    frequency_penalty=reals,
    logit_bias=st.dictionaries(int31, reals, max_size=3),
    min_tokens=int31,
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    seed=st.none() | st.integers(0, 2**32 - 1),
    stop=st.lists(text, max_size=3).map(tuple),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
    structured=structured,
)
requests = st.builds(
    Request,
    request_id=text,
    prompt_ids=tokens,
    params=params,
    arrival_s=st.just(12.5),
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=text,
    outputs=tokens,
)
handoffs = st.lists(bits64, max_size=3).map(tuple)


def test_every_field_of_the_parameters_is_tried() -> None:
    """What is added to a request later has to cross, too."""
    drawn = {"max_tokens", "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"}
    drawn |= {"frequency_penalty", "logit_bias", "min_tokens", "logprobs", "prompt_logprobs", "seed", "stop"}
    drawn |= {"stop_token_ids", "ignore_eos", "structured"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == drawn
    drawn = {"request_id", "prompt_ids", "params", "arrival_s", "priority", "cache_salt", "outputs"}
    assert {field.name for field in dataclasses.fields(Request)} == drawn


@settings(deadline=None)
@given(requests)
def test_requests_cross(request: Request) -> None:
    assert request_from_proto(crossed(request_to_proto(request)), arrival_s=12.5) == request


@settings(deadline=None)
@given(
    requests,
    st.one_of(st.none(), st.builds(PrefillLeg, peer=text, handoffs=handoffs), st.builds(DecodeLeg, handoffs=handoffs)),
    text,
)
def test_legs_cross(request: Request, leg: PrefillLeg | DecodeLeg | None, instance: str) -> None:
    started = Started(request=request, leg=leg, decode_instance=instance if isinstance(leg, PrefillLeg) else "")
    assert start_from_proto(crossed(start_to_proto(started)), arrival_s=12.5) == started


def test_a_leg_of_a_newer_router_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="request one .* upgrade the workers first"):
        start_from_proto(pb.Start(request=pb.EngineRequest(request_id="one")), arrival_s=0.0)


scores = st.lists(
    st.builds(TokenLogprobs, logprob=reals, top=st.lists(st.tuples(int31, reals), max_size=2).map(tuple)),
    min_size=1,
    max_size=3,
).map(tuple)
tokens_events = st.builds(
    TokensEvent,
    request_id=text,
    first_index=int31,
    token_ids=tokens,
    logprobs=st.none() | scores,
    prompt_logprobs=st.none() | scores,
    sample=int31,
)


@settings(deadline=None)
@given(st.lists(tokens_events, max_size=3))
def test_tokens_cross(events: list[TokensEvent]) -> None:
    assert events_from_proto(crossed(events_to_proto(events)), started_s={}) == events


errors = st.one_of(
    st.builds(
        lambda cls, message, field: cls(message, field=field),
        st.sampled_from(
            [InvalidArgument, TooLong, NotFound, Unauthenticated, FailedPrecondition, Unavailable, DeadlineExceeded]
            + [Internal]
        ),
        text,
        st.none() | text.filter(bool),
    ),
    st.builds(lambda message, s: ResourceExhausted(message, retry_after_s=s), text, seconds),
    st.builds(HandoffFailed, text.filter(bool), text),
)


@settings(deadline=None)
@given(errors)
def test_errors_cross(error: JaxpdError) -> None:
    back = failure_from_proto(crossed(failure_to_proto(error)))
    assert type(back) is type(error) and vars(back) == vars(error)


def test_an_error_of_a_newer_worker_is_internal() -> None:
    back = failure_from_proto(pb.Failure(code="DATA_LOSS", message="gone"))
    assert type(back) is Internal and back.message == "gone"


finishes = st.builds(
    FinishEvent,
    request_id=st.just("r"),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]),
    usage=st.builds(Usage, prompt_tokens=int31, completion_tokens=int31, cached_tokens=int31),
    timings=st.just(Timings()),
    stop_token_id=st.none() | int31,
    sample=int31,
)


@settings(deadline=None)
@given(finishes)
def test_ends_cross(event: FinishEvent) -> None:
    (back,) = events_from_proto(crossed(events_to_proto([event])), started_s={"r": 3.0})
    assert isinstance(back, FinishEvent) and back.life is not None and back.life.reason == event.reason.value
    assert dataclasses.replace(back, life=None) == event


def life() -> Life:
    """Of a sequence that arrived at 100 s of its worker's clock."""
    stages = (Stage.ARRIVED, Stage.ADMITTED, Stage.CHUNK, Stage.FINISHED)
    return Life(moments=[Moment(stage, 100.0 + i, 7 * (stage is Stage.CHUNK)) for i, stage in enumerate(stages)])


def test_a_life_is_told_on_the_clock_of_who_hears_of_it() -> None:
    event = FinishEvent(
        request_id="r",
        reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        timings=Timings(),
        life=life(),
    )
    message = crossed(events_to_proto([event]))
    assert [moment.at_s for moment in message.events[0].ended.moments] == [0.0, 1.0, 2.0, 3.0]
    (back,) = events_from_proto(message, started_s={"r": 5000.0})
    assert isinstance(back, FinishEvent) and back.life is not None
    assert back.life.moments == [Moment(m.stage, m.at_s + 4900.0, m.tokens) for m in life().moments]
    assert back.timings.queue_s == 1.0


def test_a_hand_off_crosses() -> None:
    event = FinishEvent(
        request_id="r",
        reason=FinishReason.HANDED_OFF,
        usage=Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=4),
        timings=Timings(),
        sample=2,
        life=life(),
    )
    (back,) = events_from_proto(crossed(events_to_proto([event])), started_s={"r": 100.0})
    assert isinstance(back, FinishEvent) and back.life is not None
    assert (back.reason, back.sample, back.usage.cached_tokens) == (FinishReason.HANDED_OFF, 2, 4)
    assert back.life.moments == life().moments


def test_an_error_has_a_reason_whatever_the_worker_says() -> None:
    ended = event_from_proto(pb.Event(ended=pb.Ended(reason="FINISH_REASON_ERROR")), started_s={})
    assert isinstance(ended, FinishEvent) and isinstance(ended.error, Internal)
    failed = FinishEvent(
        request_id="r",
        reason=FinishReason.ERROR,
        usage=Usage(prompt_tokens=1, completion_tokens=0),
        timings=Timings(),
        error=HandoffFailed("copy", "a page did not arrive"),
    )
    (back,) = events_from_proto(crossed(events_to_proto([failed])), started_s={})
    assert isinstance(back, FinishEvent) and isinstance(back.error, HandoffFailed) and back.error.reason == "copy"
    assert event_from_proto(pb.Event(), started_s={}) is None


replicas = st.builds(
    ReplicaStats,
    role=st.sampled_from(["prefill", "decode", "mixed"]),
    pool=counts,
    replica=counts,
    free_pages=counts,
    num_pages=counts,
    free_slots=counts,
    num_slots=counts,
    pinned_pages=counts,
    cached_pages=counts,
    prefix=st.builds(PrefixStats, queried=counts, hit=counts, evicted=counts),
    preempted=counts,
)


@settings(deadline=None)
@given(
    st.sampled_from(State),
    counts,
    counts,
    st.lists(replicas, max_size=3).map(tuple),
    st.integers(0, 2**60),
    st.dictionaries(st.sampled_from(["copy", "step", "lost"]), st.integers(1, 9)),
    st.lists(st.tuples(counts, seconds), max_size=3).map(tuple),
)
def test_readings_cross(
    state: State,
    queued: int,
    running: int,
    rooms: tuple[ReplicaStats, ...],
    staged: int,
    failures: dict[str, int],
    steps: tuple[tuple[int, float], ...],
) -> None:
    stats = EngineStats(
        states={"queued": queued, "prefilling": running},
        replicas=rooms,
        staging_bytes=staged,
        crossed_bytes=2 * staged,
        handoff_failures=failures,
    )
    back = reading_from_proto(crossed(reading_to_proto(Reading(state=state, stats=stats, steps=steps))))
    assert (back.state, back.steps) == (state, steps)
    assert (back.stats.queued, back.stats.running) == (queued, running)
    fields = ("replicas", "staging_bytes", "crossed_bytes", "handoff_failures")
    assert all(getattr(back.stats, field) == getattr(stats, field) for field in fields)
    assert [dataclasses.asdict(r) for r in back.stats.replicas] == [dataclasses.asdict(r) for r in rooms]


identities = st.builds(
    Identity,
    model=text,
    dtype=text,
    page_size=int31,
    num_layers=int31,
    num_heads=int31,
    num_kv_heads=int31,
    lanes=int31,
    streams=int31,
    protocol=int31,
    oldest_protocol=int31,
)
models = st.builds(
    ServedModel,
    name=text,
    architecture=text,
    vocab_size=int31,
    max_model_len=int31,
    eos_token_ids=tokens,
    dtype=text,
    page_size=int31,
    meshes=st.dictionaries(
        st.sampled_from(["prefill", "decode", "mixed"]),
        st.lists(st.sampled_from(["8x1", "1x2"]), min_size=1, max_size=3).map(tuple),
    ),
    tokenizer=st.none(),
    mode=text,
)
descriptions = st.builds(
    Description,
    version=text,
    instance=text,
    role=st.sampled_from(Role),
    identity=identities,
    model=models,
    replicas=int31,
    pages=int31,
    slots=int31,
    queue_limit=int31,
    page_bytes=st.integers(0, 2**60),
)


@settings(deadline=None)
@given(descriptions)
def test_descriptions_cross(description: Description) -> None:
    assert description_from_proto(crossed(description_to_proto(description))) == description


def described(model: ServedModel) -> Description:
    identity = Identity("hash", "float32", 16, 2, 4, 2, 128, 1)
    sizes: dict[str, Any] = dict(replicas=1, pages=9, slots=4, queue_limit=8, page_bytes=1024)
    return Description(version="1", instance="i", role=Role.MIXED, identity=identity, model=model, **sizes)


def test_a_tokenizer_crosses_whole_or_not_at_all(scripted: ModuleType) -> None:
    description = described(scripted.served_model(scripted.byte_tokenizer()))
    back = description_from_proto(crossed(description_to_proto(description)))
    assert back.model.tokenizer is not None and description.model.tokenizer is not None
    chat = [{"role": "user", "content": "naïve?"}]
    assert back.model.tokenizer.apply_chat_template(chat) == description.model.tokenizer.apply_chat_template(chat)
    assert back.model.tokenizer.decode([104, 105, 256]) == "hi" and back.model.tokenizer.eos_token_ids == (256,)
    welcome = description_to_proto(description, tokenizer=False)
    assert description_from_proto(crossed(welcome)) == described(scripted.served_model(None))


def test_a_role_of_a_newer_worker_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"worker abc \(jaxpd 9.9\) .*number 7.*upgrade"):
        description_from_proto(pb.DescribeResponse(version="9.9", instance="abc", role=7))  # type: ignore[arg-type]


layouts = st.sampled_from([head_layout(9, 3, 8), head_layout(4, 2, 1), head_layout(8, 8, 2)])
# All of them have heads 0 and 1.
elsewhere = st.permutations([0, 1]).flatmap(
    lambda heads: st.sampled_from([(), (heads[:1],), (heads,), (heads[:1], heads[1:])]).flatmap(
        lambda parts: st.tuples(*(st.builds(Source, text, bits64, st.just(tuple(part))) for part in parts))
    )
)
offers = st.builds(
    Offer,
    id=bits64,
    generation=st.integers(1, 2**62),
    key=bits64,
    address=text,
    layout=layouts,
    shape=st.lists(st.integers(1, 2**40), max_size=4).map(lambda rest: (1, *rest)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    lease_s=st.floats(0.001, 1e6),
    elsewhere=elsewhere,
)
messages = st.one_of(
    st.builds(Reserve, bits64),
    st.builds(Reserved, bits64, int31),
    st.builds(NotReserved, bits64, text),
    st.builds(Piece, bits64, int31, int31, st.lists(offers, max_size=3).map(tuple)),
    st.builds(FirstToken, bits64, int31),
    st.builds(Forget, bits64, text),
    st.builds(Ack, bits64, int31),
    st.builds(Refuse, bits64, int31, text),
    st.builds(Revoke, bits64, int31, text),
)


@settings(deadline=None)
@given(messages)
def test_words_of_a_hand_off_cross(message: Message) -> None:
    assert peer_from_proto(crossed(peer_to_proto(message))) == message


@settings(deadline=None)
@given(identities, text, text)
def test_hellos_of_peers_cross(identity: Identity, instance: str, address: str) -> None:
    hello = PeerHello(instance=instance, identity=identity, transfer_address=address)
    message = crossed(hello_to_proto(hello))
    assert hello_from_proto(message.hello) == hello and peer_from_proto(message) is None


def test_an_offer_that_makes_no_sense_is_no_message() -> None:
    offer = pb.Offer(id=1, generation=1, num_heads=3, num_kv_heads=2, tp=1, shape=[1, 2], dtype="float32", lease_s=1)
    with pytest.raises(ValueError, match="num_heads"):
        peer_from_proto(pb.PeerMessage(piece=pb.Piece(offers=[offer])))
    assert peer_from_proto(pb.PeerMessage(ping=pb.Ping())) is None
