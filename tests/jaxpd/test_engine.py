"""The engine's promises: one definite answer each, tokens that depend on nothing else, everything given back."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.device import PoolDevice
from jaxpd.engine import Engine
from jaxpd.errors import InvalidArgument, ResourceExhausted, Unavailable
from jaxpd.progress import SilentProgress
from jaxpd.request import FinishReason, Request, SamplingParams
from jaxpd.sampling import Sampled

DATA = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2" / "expected.json"
PROMPTS = {p["name"]: p for p in json.loads(DATA.read_text())["prompts"]}
Started = Callable[..., Any]


@pytest.fixture
def plain(started: Started) -> Any:
    """One prefill and one decode device."""
    return started("smollm2", "1x1", "1x1")


@pytest.mark.parametrize(("prefill", "decode"), [("8x1", "1x4"), ("1x1,2x1", "1x2,3x1")])
def test_tokens_are_the_same_on_every_pair_of_meshes(prefill: str, decode: str, started: Started) -> None:
    running = started("smollm2", prefill, decode)
    for name, prompt in PROMPTS.items():
        running.submit(name, prompt["prompt_ids"], max_tokens=24)
    running.wait()
    for name, prompt in PROMPTS.items():
        assert running.answers[name].token_ids == prompt["greedy_ids"], name
    running.assert_at_baseline()


def test_a_request_does_not_depend_on_what_else_runs(plain: Any) -> None:
    params: dict[str, Any] = {"max_tokens": 12, "temperature": 1.3}
    for i, (name, prompt) in enumerate(PROMPTS.items()):
        plain.submit(f"{name}-together", prompt["prompt_ids"], seed=i, **params)
    plain.wait()
    for i, (name, prompt) in enumerate(PROMPTS.items()):
        alone = plain.submit(f"{name}-alone", prompt["prompt_ids"], seed=i, **params)
        plain.wait()
        assert alone.token_ids == plain.answers[f"{name}-together"].token_ids
    assert len({tuple(a.token_ids) for a in plain.answers.values()}) == len(PROMPTS)


def test_seeded_sampling_is_the_same_on_every_mesh(plain: Any, started: Started) -> None:
    other = started("smollm2", "4x1", "2x2")
    ids = PROMPTS["len17"]["prompt_ids"]
    for running in (plain, other):
        running.submit("sampled", ids, max_tokens=16, temperature=0.8, seed=7)
        running.wait()
    assert plain.answers["sampled"].token_ids == other.answers["sampled"].token_ids
    assert plain.answers["sampled"].token_ids != PROMPTS["len17"]["greedy_ids"][:16]


def test_one_token_finishes_in_the_prefill_pool(plain: Any) -> None:
    answer = plain.submit("one", PROMPTS["len5"]["prompt_ids"], max_tokens=1)
    plain.wait()
    assert answer.token_ids == PROMPTS["len5"]["greedy_ids"][:1]
    assert answer.finish.reason is FinishReason.LENGTH
    assert answer.finish.timings.transfer_s is None
    plain.assert_at_baseline()


@pytest.mark.parametrize("how", ["eos", "stop_token"])
def test_a_first_token_that_ends_it_is_never_handed_off(how: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = PROMPTS["len40"]["greedy_ids"][0]
    offers: list[int] = []
    [decode] = plain.engine._mover.reservations.decode
    monkeypatch.setattr(decode, "offer", lambda *a, **k: offers.append(1))
    monkeypatch.setattr(decode.device, "step", lambda *a, **k: offers.append(2))
    options: dict[str, Any] = {"stop_token_ids": (first,)}
    if how == "eos":
        config = plain.engine.checkpoint.config
        monkeypatch.setitem(config.__dict__, "eos_token_ids", (first,))
        options = {"ignore_eos": False}
    answer = plain.submit("first", PROMPTS["len40"]["prompt_ids"], max_tokens=8, **options)
    plain.wait()
    assert answer.token_ids == [first]
    assert answer.finish.reason is FinishReason.STOP and answer.finish.stop_token_id == first
    assert not offers
    plain.assert_at_baseline()


def test_a_stop_token_in_the_decode_pool_drops_the_surplus_token(plain: Any) -> None:
    greedy = PROMPTS["len17"]["greedy_ids"]
    stop = next(t for t in greedy[2:] if t not in greedy[:2])
    answer = plain.submit("stop", PROMPTS["len17"]["prompt_ids"], max_tokens=24, stop_token_ids=(stop,))
    plain.wait()
    assert answer.token_ids == greedy[: greedy.index(stop) + 1]
    assert answer.finish.usage.completion_tokens == len(answer.token_ids)


def test_timings_cover_the_stages(plain: Any) -> None:
    answer = plain.submit("timed", PROMPTS["len40"]["prompt_ids"], max_tokens=8)
    plain.wait()
    t = answer.finish.timings
    parts = (t.queue_s, t.prefill_s, t.transfer_s, t.transfer_exposed_s, t.decode_s, t.ttft_s, t.ttst_s)
    assert all(part is not None and part >= 0 for part in parts)
    assert t.ttft_s == pytest.approx(t.queue_s + t.prefill_s, abs=1e-6)
    assert t.ttst_s > t.ttft_s + t.transfer_exposed_s


def test_bad_requests_are_refused_and_hurt_nobody(plain: Any) -> None:
    good = plain.submit("good", PROMPTS["len100"]["prompt_ids"], max_tokens=24)
    bad: list[tuple[list[int], dict[str, Any], str]] = [
        ([], {}, "prompt"),
        ([10**9], {}, "prompt_ids"),
        ([-1], {}, "prompt_ids"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1] * 150, {"max_tokens": 11}, "max_tokens"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"stop_token_ids": (10**9,)}, "stop_token_ids"),
    ]
    for prompt, params, field in bad:
        with pytest.raises(InvalidArgument) as caught:
            plain.submit("bad", prompt, **params)
        assert caught.value.field == field
    twin = Request(request_id="good", prompt_ids=(1,), params=SamplingParams(seed=0), arrival_s=time.monotonic())
    with pytest.raises(InvalidArgument, match="good"):
        plain.engine.submit(twin)
    plain.wait()
    assert good.token_ids == PROMPTS["len100"]["greedy_ids"]


def test_the_longest_legal_request_runs(plain: Any) -> None:
    answer = plain.submit("longest", [1] * 100, max_tokens=60)
    plain.wait()
    assert len(answer.token_ids) == 60
    plain.assert_at_baseline()


def test_more_work_than_the_bound_is_refused_at_once(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1", max_queued_requests=3)
    accepted, refused = 0, 0
    for i in range(40):
        try:
            running.submit(f"r{i}", PROMPTS["len100"]["prompt_ids"], max_tokens=24)
            accepted += 1
        except ResourceExhausted as error:
            assert "max-queued-requests" in error.message and error.retry_after_s > 0
            refused += 1
    running.wait()
    assert refused and accepted + refused == 40
    assert all(a.token_ids == PROMPTS["len100"]["greedy_ids"] for a in running.answers.values())
    running.assert_at_baseline()


def test_admission_waits_for_pages_and_always_lets_one_run(started: Started) -> None:
    """A pool with room for one longest sequence only: everything still runs, one after the other."""
    page_bytes = started("smollm2", "1x1", "1x1").engine.limits.decode[0].page_bytes
    running = started("smollm2", "1x1", "1x1", kv_memory=10 * page_bytes)
    assert running.engine.limits.decode[0].num_pages == 10
    for i in range(6):
        running.submit(f"long{i}", [i + 1] * 130, max_tokens=30)
        running.submit(f"short{i}", PROMPTS["len5"]["prompt_ids"], max_tokens=24)
    running.wait()
    for i in range(6):
        assert running.answers[f"short{i}"].token_ids == PROMPTS["len5"]["greedy_ids"]
    running.assert_at_baseline()


def test_abort_in_every_state_frees_everything(plain: Any) -> None:
    for delay_ms in [0, 0, 1, 2, 4, 8, 16, 32]:
        answer = plain.submit(f"abort{delay_ms}-{time.monotonic_ns()}", PROMPTS["len100"]["prompt_ids"], max_tokens=60)
        name = next(reversed(plain.answers))
        time.sleep(delay_ms / 1000)
        plain.engine.abort(name)
        plain.engine.abort(name)  # twice is harmless
        assert answer.ended.wait(20)
        assert answer.finish.reason in (FinishReason.ABORT, FinishReason.LENGTH)
        plain.assert_at_baseline()
    assert any(a.finish.reason is FinishReason.ABORT for a in plain.answers.values())
    assert plain.engine.abort("nobody") is False


def test_a_failing_step_answers_its_requests_and_the_pool_goes_on(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the device is injected in one decode step: an error for who was in it, service for who comes after."""
    device = plain.engine._mover.reservations.decode[0].device
    real, armed = device.step, [True]

    def failing(shape: Any, rows: Any) -> jax.Array:
        if armed.pop() if armed else False:
            device.pages.delete()  # what a failed donating program leaves behind
            raise RuntimeError("secret internals")
        return real(shape, rows)

    monkeypatch.setattr(device, "step", failing)
    victim = plain.submit("victim", PROMPTS["len17"]["prompt_ids"], max_tokens=24)
    plain.wait()
    assert victim.finish.reason is FinishReason.ERROR
    assert victim.finish.error is not None and "secret" not in victim.finish.error.message
    plain.assert_at_baseline()
    after = plain.submit("after", PROMPTS["len17"]["prompt_ids"], max_tokens=24)
    plain.wait()
    assert after.token_ids == PROMPTS["len17"]["greedy_ids"]


def test_a_failed_transfer_is_an_error_for_its_request_alone(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshes.transfer.move import move_heads

    armed = [True]

    def failing(*args: Any) -> Any:
        if armed.pop() if armed else False:
            raise RuntimeError("the link is down")
        return move_heads(*args)

    monkeypatch.setattr("meshes.transfer.in_process.move_heads", failing)
    victim = plain.submit("victim", PROMPTS["len17"]["prompt_ids"], max_tokens=24)
    assert victim.ended.wait(20)
    other = plain.submit("other", PROMPTS["len40"]["prompt_ids"], max_tokens=24)
    plain.wait()
    assert victim.finish.reason is FinishReason.ERROR and len(victim.token_ids) == 1
    assert other.token_ids == PROMPTS["len40"]["greedy_ids"]
    plain.assert_at_baseline()


def test_nothing_is_compiled_after_ready(started: Started, compilations: Any) -> None:
    """Every prompt length and every number of concurrent requests, greedy and sampled, on even and uneven meshes."""
    for prefill, decode in (("1x1", "1x1"), ("4x1", "2x2")):
        running = started("smollm2", prefill, decode, precompile=True)
        compilations.count = 0
        for length in (1, 15, 16, 17, 31, 33, 64, 65, 150):
            for width in (1, 3, 9):
                for i in range(width):
                    name = f"{length}-{width}-{i}"
                    running.submit(name, [i + 1] * length, max_tokens=9 - i % 2, temperature=float(i % 2))
                running.wait()
        running.engine.abort(name)
        running.assert_at_baseline()
        assert compilations.count == 0
    jax.jit(lambda x: x + np.float32(compilations.count))(1.0)
    assert compilations.count == 1  # the counter does count


@pytest.mark.parametrize(("prefill", "decode"), [("1x1", "1x1"), ("4x1", "2x2"), ("1x2", "4x1")])
def test_the_hand_off_never_reads_an_array_to_the_host(
    prefill: str, decode: str, started: Started, host_reads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read in a whole request is its steps' tokens: one array a step and not one more for the hand-off."""
    running = started("smollm2", prefill, decode)
    steps: list[Sampled] = []
    real = PoolDevice.step

    def counted(self: PoolDevice, *args: Any) -> Sampled:
        steps.append(real(self, *args))
        return steps[-1]

    monkeypatch.setattr(PoolDevice, "step", counted)
    host_reads.count = host_reads.largest_put = 0
    running.submit("watched", PROMPTS["len40"]["prompt_ids"], max_tokens=4)
    running.wait()
    assert running.answers["watched"].token_ids == PROMPTS["len40"]["greedy_ids"][:4]
    assert host_reads.count <= len(steps)
    one_head = running.engine.limits.decode[0].page_bytes  # at least: three pages of a head or more
    assert 0 < host_reads.largest_put < one_head  # metadata and page ids go up, KV does not
    before = host_reads.count
    jax.device_put(jax.device_put(np.zeros((8, 4)), _cut(8)), _cut(4)).block_until_ready()  # positive control
    assert host_reads.count > before


def _cut(count: int) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:count]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))


def test_drain_finishes_what_runs_and_admits_nothing(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1", max_queued_requests=5)
    answer = running.submit("last", PROMPTS["len100"]["prompt_ids"], max_tokens=24)
    assert running.engine.drain(60.0) is True
    assert answer.token_ids == PROMPTS["len100"]["greedy_ids"]
    with pytest.raises(Unavailable, match="draining"):
        running.submit("late", [1], max_tokens=1)
    running.engine.close()
    running.engine.close()
    with pytest.raises(Unavailable, match="closed"):
        running.submit("later", [1], max_tokens=1)


def test_close_ends_running_requests(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1", max_queued_requests=6)
    answers = [running.submit(f"r{i}", PROMPTS["len100"]["prompt_ids"], max_tokens=60) for i in range(5)]
    running.engine.close()
    assert all(a.finish.reason is FinishReason.ABORT for a in answers)


def test_a_closed_engine_holds_no_device_memory(tiny_folders: dict[str, Any]) -> None:
    def held() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    before = held()
    config = EngineConfig(prefill_mesh="1x1", decode_mesh="1x1", max_model_len=64, precompile=False)
    engine = Engine(resolve(str(tiny_folders["smollm2"]), progress=SilentProgress()), config, on_events=lambda _: None)
    engine.start()
    assert held() > before + 1_000_000
    engine.close()
    assert held() <= before
    engine.close()
    with pytest.raises(Unavailable, match="closed"):
        engine.submit(Request(request_id="late", prompt_ids=(3,), params=SamplingParams(max_tokens=2), arrival_s=0.0))
