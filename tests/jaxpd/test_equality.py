"""The first law in the engine: greedy tokens are the reference's, whatever the mode, the meshes and the settings.

One test over a covering selection of all settings: every pair of values that can meet does meet, see `SELECTION`. Each
case asks for the same prompts twice on one engine, so that it is cold and then warm. The tiny models are compared with
what transformers computes (tests/data/README.md), and so is SmolLM2-135M. The ordinary suite runs the main tiny models;
`make reference` all of them and SmolLM2-135M, each with every pair of settings.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.sequence import Sequence, State
from tests.jaxpd.covering import Case, Pair, covering, pairs_of
from tests.jaxpd.few_pages import kv_memory_of

DATA = pathlib.Path(__file__).parent.parent / "data"
Started = Callable[..., Any]
pytestmark = pytest.mark.heavy

# What the meshes of a case are: one that is shared, or those of the prefill pools and of the decode pools.
POOLS: dict[str, tuple[str, ...]] = {
    "chunked": ("2x1",),
    "decoupled": ("1x2",),
    "interleaved": ("2x1",),
    "1p1d": ("2x1", "1x2"),
    "2p1d": ("2x1,1x1", "1x2"),
    "1p2d": ("1x2", "2x1,1x1"),
    "2p2d": ("1x1,2x1", "2x1,1x2"),
}
MAIN_MODELS = ("smollm2", "gemma3")  # grouped heads that nothing divides; a sliding window and two RoPE bases
OTHER_MODELS = ("gemma3-softcap", "llama-bias", "llama2", "llama3", "mistral", "qwen2", "qwen3")
BIG_MODEL = "smollm2-135m"
SETTINGS: dict[str, tuple[Any, ...]] = {
    "pools": tuple(POOLS),
    "budget": (16, 64, 512),
    "cache": (True, False),
    "local": ("never", "24", "auto"),
    "preempted": (False, True),
}
NEW_TOKENS = 24
ONE_STEP = 256  # tokens that hold all tiny prompts together; the positions that the tiny models were made for


def can_meet(case: Case) -> bool:
    """One pool that does both has no other to prefill in."""
    return case["local"] == "never" or len(POOLS[case["pools"]]) == 2


def is_wanted(pair: Pair) -> bool:
    """All pairs but most of the other models': they give way once, and meet what the other pairs leave for them."""
    (first, model), other = pair
    return first != "model" or model not in OTHER_MODELS or other == ("preempted", True)


TINY = covering({"model": MAIN_MODELS + OTHER_MODELS, **SETTINGS}, allowed=can_meet, wanted=is_wanted)
BIG = covering({"model": (BIG_MODEL,), **SETTINGS}, allowed=can_meet)


def named(case: Case, *marks: pytest.MarkDecorator) -> Any:
    """A parameter set with a name that says the case."""
    words = [case["model"], case["pools"], f"budget{case['budget']}", "cache" if case["cache"] else "nocache"]
    words += [f"local{case['local']}"] * (case["local"] != "never") + ["preempted"] * case["preempted"]
    return pytest.param(case, id="-".join(words), marks=marks)


SELECTION = [
    *(named(case) for case in TINY if case["model"] in MAIN_MODELS),
    *(named(case, pytest.mark.slow) for case in TINY if case["model"] in OTHER_MODELS),
    *(named(case, pytest.mark.slow, pytest.mark.timeout(900)) for case in BIG),
]


@pytest.fixture(scope="module")
def tiny_folders(tiny_folders: dict[str, pathlib.Path]) -> dict[str, Any]:
    """SmolLM2-135M besides, which `resolve` knows by its name."""
    return {**tiny_folders, BIG_MODEL: BIG_MODEL}


def references(model: str) -> dict[str, dict[str, Any]]:
    """The prompts of a model and their greedy tokens."""
    if model == BIG_MODEL:
        prompts = json.loads((DATA / "reference" / f"{model}.json").read_text())["prompts"]
        return {p["label"]: p for p in prompts}
    return {p["name"]: p for p in json.loads((DATA / "tiny" / model / "expected.json").read_text())["prompts"]}


def settings(case: Case, longest: int) -> tuple[tuple[str | None, str | None], dict[str, Any]]:
    """Meshes and configuration of a case whose longest prompt has `longest` tokens."""
    least = ONE_STEP if case["budget"] >= ONE_STEP and not case["preempted"] else 0  # the limit of a step, too
    config: dict[str, Any] = {
        "max_model_len": max(-(-(longest + NEW_TOKENS) // 16) * 16, least),
        "max_num_batched_tokens": case["budget"],
        "prefix_cache": case["cache"],
    }
    if case["local"] != "never":
        config["local_prefill"] = case["local"]
    meshes = POOLS[case["pools"]]
    if len(meshes) == 2:
        return (meshes[0], meshes[1]), config
    return (None, None), {**config, "mode": case["pools"], "mesh": meshes[0]}


@pytest.mark.parametrize("case", SELECTION)
def test_greedy_tokens_are_the_reference(
    case: Case, started: Started, tiny_folders: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = references(case["model"])
    longest = max(len(p["prompt_ids"]) for p in prompts.values())
    meshes, config = settings(case, longest)
    copies = 1
    if case["preempted"]:  # pages for the longest sequence and hardly more, where the pages are largest
        pages = config["max_model_len"] // 16 + 2
        few = kv_memory_of(pages, tiny_folders[case["model"]], prefill_mesh=meshes[0], decode_mesh=meshes[1], **config)
        config |= {"reserve_tokens": 1, "kv_memory": few}
        # So many that each replica that decodes gets more than it can hold, also where copies share what is cached.
        copies = 8 if case["model"] == BIG_MODEL and len(POOLS[case["pools"]][-1].split(",")) > 1 else 4
    back_to_queue = count_preemptions(monkeypatch)
    running = started(case["model"], *meshes, **config)
    by_length = sorted(prompts.items(), key=lambda item: -len(item[1]["prompt_ids"]))
    for turn in ("cold", "warm"):
        answers = {
            (name, copy): running.submit(f"{name}-{turn}-{copy}", prompt["prompt_ids"], max_tokens=NEW_TOKENS)
            for copy in range(copies)
            for name, prompt in by_length
        }
        running.wait(600 if case["model"] == BIG_MODEL else 60)
        for (name, _), answer in answers.items():
            assert answer.token_ids == prompts[name]["greedy_ids"][:NEW_TOKENS], f"{turn} {name}"
            if case["local"].isdigit():
                crossed = answer.finish.timings.transfer_s is not None
                if len(prompts[name]["prompt_ids"]) <= int(case["local"]):
                    assert not crossed, name
                elif not case["cache"] and copies == 1:  # what is cached does not count
                    assert crossed, name
        hits = sum(answer.finish.usage.cached_tokens for answer in answers.values())
        if not case["cache"]:
            assert hits == 0
        elif not case["preempted"] and turn == "warm":  # where pages are short the cache may have lost them again
            assert hits > 0
        running.assert_at_baseline()
    assert bool(back_to_queue) == case["preempted"]
    running.engine.close()


def count_preemptions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a request's id each time one that was admitted goes back to the queue."""
    seen: list[str] = []
    move = Sequence.move

    def counted(self: Sequence, state: State) -> None:
        if state is State.QUEUED:
            seen.append(self.request_id)
        move(self, state)

    monkeypatch.setattr(Sequence, "move", counted)
    return seen


@pytest.mark.parametrize(
    ("cases", "models", "wanted"), [(TINY, MAIN_MODELS + OTHER_MODELS, is_wanted), (BIG, (BIG_MODEL,), lambda _: True)]
)
def test_every_pair_of_settings_that_can_meet_does(
    cases: list[Case], models: tuple[str, ...], wanted: Callable[[Pair], bool]
) -> None:
    """The selection, judged by other code than what chose it: value by value."""
    met = set().union(*map(pairs_of, cases))
    parameters = {"model": models, **SETTINGS}
    for first, second in [(a, b) for i, a in enumerate(parameters) for b in list(parameters)[i + 1 :]]:
        for x in parameters[first]:
            for y in parameters[second]:
                shared = first == "pools" and len(POOLS[x]) == 1
                if (shared and second == "local" and y != "never") or not wanted(((first, x), (second, y))):
                    continue
                assert ((first, x), (second, y)) in met, f"{first} {x} never meets {second} {y}"
    assert len(cases) <= 32


def test_the_tiny_models_are_all_there(tiny_folders: dict[str, Any]) -> None:
    assert {*MAIN_MODELS, *OTHER_MODELS, BIG_MODEL} == set(tiny_folders)
