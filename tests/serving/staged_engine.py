"""The scripted engine with stages that can be seen: queue, chunks of the prompt, hand-off, decode, and pages."""

from __future__ import annotations

import dataclasses
import time
from types import ModuleType
from typing import Any

from jaxpd.life import Stage
from jaxpd.request import Event, FinishReason, TokensEvent
from jaxpd.stats import EngineStats, Hold, ReplicaStats, SequenceStats

QUEUE_STEPS, CHUNKS, TRANSFER_STEPS = 2, 4, 2
PREFILL_PAGES, DECODE_PAGES, SLOTS, PAGE = 48, 96, 8, 16


def staged_engine(scripted: ModuleType) -> Any:
    """A subclass of `scripted.ScriptedEngine`; every stage takes so many of its steps."""

    class StagedEngine(scripted.ScriptedEngine):  # type: ignore[misc, name-defined]
        def submit(self, request: Any) -> None:
            super().submit(request)
            for running in self._samples(request.request_id):
                running.age, running.replica = 0, len(self.submitted) % 2
                del running.life.moments[1:]  # it waits in the queue first

        def _samples(self, request_id: str) -> list[Any]:
            return [running for (name, _), running in list(self._running.items()) if name == request_id]

        def _step(self, running: Any) -> list[Event]:
            if running.aborted:
                return [self._finish(running, FinishReason.ABORT)]
            life, prompt = running.life, running.request.prompt_ids
            running.age += 1
            step = running.age - QUEUE_STEPS
            if step < 0:
                return []
            if step == 0:
                life.mark(Stage.ADMITTED)
                return []
            if step <= CHUNKS:
                if step == 1:
                    life.mark(Stage.PREFILL_START)
                life.mark(Stage.CHUNK, tokens=-(-len(prompt) // CHUNKS))
                if step == 2:
                    life.mark(Stage.OFFERED)
                return []
            if running.made == 0:
                life.mark(Stage.PREFILL_END)
                return [self._token(running)]
            if step <= CHUNKS + 1 + TRANSFER_STEPS:
                return []
            if running.made == 1:
                for stage in (Stage.TRANSFERRED, Stage.ACCEPTED, Stage.DECODE_START):
                    life.mark(stage)
            if self.fail_with is not None and prompt[0] == ord("!") and running.made == 3:
                return [self._finish(running, FinishReason.ERROR, error=self.fail_with)]
            events: list[Event] = [self._token(running)]
            if running.made == running.request.params.max_tokens:
                events.append(self._finish(running, FinishReason.LENGTH))
            return events

        def _token(self, running: Any) -> TokensEvent:
            prompt, made = running.request.prompt_ids, running.made
            running.made += 1
            running.life.token_times.append(time.monotonic())
            ids = (prompt[made % len(prompt)],)
            name, sample = running.request.request_id, running.sample
            return TokensEvent(request_id=name, first_index=made, token_ids=ids, sample=sample)

        def _finish(self, running: Any, reason: FinishReason, **more: Any) -> Any:
            return dataclasses.replace(super()._finish(running, reason, **more), timings=running.life.timings())

        def stats(self) -> EngineStats:
            with self._changed:
                shown = [self._shown(running) for running in self._running.values()]
            free = {("prefill", 0): PREFILL_PAGES, ("decode", 0): DECODE_PAGES, ("decode", 1): DECODE_PAGES}
            slots = dict.fromkeys(free, SLOTS)
            for hold in (hold for seq in shown for hold in seq.holds):
                free[hold.role, hold.replica] = max(free[hold.role, hold.replica] - hold.pages, 0)
                slots[hold.role, hold.replica] = max(slots[hold.role, hold.replica] - 1, 0)
            replicas = tuple(
                ReplicaStats(
                    role=role,
                    pool=0,
                    replica=replica,
                    free_pages=free[role, replica],
                    num_pages=PREFILL_PAGES if role == "prefill" else DECODE_PAGES,
                    free_slots=slots[role, replica],
                    num_slots=SLOTS,
                    cached_pages=min(len(self.submitted), 6),
                )
                for role, replica in free
            )
            states: dict[str, int] = {}
            for seq in shown:
                states[seq.state] = states.get(seq.state, 0) + 1
            staged = sum(seq.state == "offered" for seq in shown) * 3 * 2**18
            return EngineStats(states=states, replicas=replicas, staging_bytes=staged, sequences=tuple(shown))

        def _shown(self, running: Any) -> SequenceStats:
            params, prompt = running.request.params, len(running.request.prompt_ids)
            step = getattr(running, "age", 0) - QUEUE_STEPS
            chunks = min(max(step, 0), CHUNKS)
            where = getattr(running, "replica", 0)
            prompt_pages, pages = -(-prompt // PAGE), -(-(prompt + params.max_tokens) // PAGE)
            prefill = Hold(
                role="prefill", pool=0, replica=0, pages=prompt_pages, filled=prompt_pages * chunks // CHUNKS
            )
            landed = prompt_pages * max(chunks - 1, 0) // CHUNKS
            computed = prompt * chunks // CHUNKS
            holds: tuple[Hold, ...] = ()
            if step < 0:
                state = "queued"
            elif running.made == 0:
                state = "prefilling"
                holds = (prefill, Hold(role="decode", pool=0, replica=where, pages=pages, filled=landed))
            elif running.made == 1:
                state, holds = "offered", (Hold(role="decode", pool=0, replica=where, pages=pages, filled=landed),)
            else:
                filled = -(-(prompt + running.made) // PAGE)
                state, holds = "decoding", (Hold(role="decode", pool=0, replica=where, pages=pages, filled=filled),)
            return SequenceStats(
                request_id=running.request.request_id,
                sample=running.sample,
                state=state,
                prompt_tokens=prompt,
                computed=computed,
                tokens=running.made,
                holds=holds,
            )

    return StagedEngine
