"""Every architecture against transformers: logits to 1e-4, and greedy tokens through prefill, hand-off and decode."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxpd.batch import BatchShape, Row, pack
from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.device import PoolDevice
from jaxpd.limits import Limits
from jaxpd.progress import SilentProgress
from jaxpd.startup import build_pools, place
from meshes.sharding import DATA as DATA_AXIS

TINY = sorted(p.name for p in (pathlib.Path(__file__).parent.parent / "data" / "tiny").iterdir() if p.is_dir())
# Uneven cuts where they hurt most: TP above, below and not dividing the head counts.
PAIRS = {"smollm2": ("3x1", "2x2"), "gemma3": ("2x1", "1x2"), "qwen2": ("1x2", "4x1"), "llama2": ("2x1", "1x1")}


def expected(folder: pathlib.Path) -> tuple[list[dict[str, Any]], Any]:
    """(prompts, arrays of logits by prompt name)."""
    return json.loads((folder / "expected.json").read_text())["prompts"], np.load(folder / "expected.npz")


def device_of(folder: pathlib.Path, mesh: str) -> tuple[PoolDevice, Limits]:
    """A prefill pool's device side, with buckets of 32 and 160 tokens and 8 rows."""
    checkpoint = resolve(str(folder), progress=SilentProgress())
    config = EngineConfig(
        prefill_mesh=mesh, max_model_len=160, max_num_batched_tokens=160, max_num_seqs=8, precompile=False
    )
    placement = place(checkpoint, config)
    pools = build_pools(placement, checkpoint, config, owner=None, progress=SilentProgress())  # type: ignore[arg-type]
    return pools[0].device, placement.limits


def logits_of(device: PoolDevice, shape: BatchShape, prompts: list[list[int]]) -> np.ndarray:
    """Logits [len(prompts), V] after each prompt, every prompt a row of one forward."""
    rows, page = [], 0
    for prompt in prompts:
        count = -(-len(prompt) // device.spec.page_size)
        pages = np.arange(page, page + count, dtype=np.int32)
        page += count
        rows.append(Row(prompt, len(prompt), pages, slot=0, output_index=0, seed=0, temperature=0.0))
    packed = jax.device_put(pack(shape, [rows]), device.spec.on(jax.sharding.PartitionSpec(DATA_AXIS)))
    logits, device.pages, _ = device.programs.forward[shape](device.params, device.pages, device.last_tokens, packed)
    return np.asarray(logits)[0, : len(prompts), : device.spec.config.vocab_size]


@pytest.mark.parametrize("name", TINY)
def test_logits_equal_transformers(name: str, tiny_folders: dict[str, pathlib.Path]) -> None:
    folder = tiny_folders[name]
    device, limits = device_of(folder, PAIRS.get(name, ("1x1", ""))[0].split("x")[0] + "x1")
    prompts, arrays = expected(folder)
    largest = limits.prefill[0].shapes[-1]
    for prompt in prompts:
        ids, want = prompt["prompt_ids"], arrays[prompt["name"]]
        if prompt["logits"] == "all":  # every position is the end of a prefix
            got = np.concatenate([logits_of(device, largest, [ids[: i + 1]]) for i in range(len(ids))])
        else:
            got, want = logits_of(device, largest, [ids]), want.reshape(1, -1)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4, err_msg=f"{name} {prompt['name']}")


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_through_the_hand_off(
    name: str, started: Callable[..., Any], tiny_folders: dict[str, pathlib.Path]
) -> None:
    prompts, _ = expected(tiny_folders[name])
    running = started(name, *PAIRS.get(name, ("1x1", "1x1")))
    for prompt in prompts:
        running.submit(prompt["name"], prompt["prompt_ids"], max_tokens=len(prompt["greedy_ids"]))
    running.wait()
    for prompt in prompts:
        assert running.answers[prompt["name"]].token_ids == prompt["greedy_ids"], prompt["name"]
    running.assert_at_baseline()
