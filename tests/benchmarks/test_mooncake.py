"""The benchmark of the prefix cache: its oracles against brute force, and the policy against its oracles."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mooncake import BLOCK, Prompt, clairvoyant, infinite, infinite_blocks, read
from benchmarks.prefix_cache import findable, replay
from jaxpd.cache.keys import Chain

ROOT = pathlib.Path(__file__).parent.parent.parent


def prompts(shapes: list[tuple[list[int], int]]) -> list[Prompt]:
    """Prompts from (branches taken, tokens in the last block); a block's id stands for the branches up to it."""
    ids: dict[tuple[int, ...], int] = {}
    made = []
    for branches, last in shapes:
        paths = [tuple(branches[: i + 1]) for i in range(len(branches))]
        blocks = tuple(ids.setdefault(path, len(ids)) for path in paths)
        made.append(Prompt((len(blocks) - 1) * BLOCK + last, blocks))
    return made


SHAPES = st.lists(
    st.tuples(st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=3), st.sampled_from([1, 200, 256, 511, 512])),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([64, 512]), st.integers(1, 4))
def test_a_pool_for_everything_finds_what_brute_force_finds(
    shapes: list[tuple[list[int], int]], page_size: int, in_flight: int
) -> None:
    requests = prompts(shapes)
    tokens = [request.tokens().tolist() for request in requests]
    expected = 0
    for number, mine in enumerate(tokens):  # the longest common prefix with an earlier prompt, in whole pages of both
        pages = 0
        for other in tokens[:number]:
            common = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
            common = min(len(mine), len(other)) if common is None else common
            pages = max(pages, min(common, len(mine) - 1) // page_size)
        expected += pages
    assert infinite(requests, page_size) == expected
    chains = [Chain(page_size, ids) for ids in tokens]
    everything = sum(-(-chain.length // page_size) for chain in chains)
    found = replay(chains, everything, in_flight)
    assert (found.hit, found.evicted, found.refused) == (expected, 0, 0)
    assert found.queried == sum(map(findable, chains))
    assert clairvoyant(chains, everything) == expected


def test_by_hand() -> None:
    requests = prompts([([0, 0], 100), ([0, 0], 100), ([0, 1], 512), ([0, 1], 512)])
    assert infinite(requests, 512) == 1 + 1 + 1  # the last prompt's last page is left to compute
    assert infinite_blocks(requests) == 2 + 1 + 2
    chains = [Chain(512, request.tokens()) for request in requests]
    assert [findable(chain) for chain in chains] == [1, 1, 1, 1]
    small = replay(chains, 1, 1)
    assert (small.hit, small.queried, small.refused) == (0, 4, 4)


def test_who_knows_the_future_keeps_what_comes_back() -> None:
    requests = prompts([([0], 512), ([1], 512), ([2], 512), ([0, 5], 1), ([1, 5], 1), ([0, 6], 1)])
    chains = [Chain(512, request.tokens()) for request in requests]
    assert (replay(chains, 2, 1).hit, clairvoyant(chains, 2)) == (0, 1)
    assert (replay(chains, 3, 1).hit, clairvoyant(chains, 3)) == (2, 3)


def write(path: pathlib.Path, requests: list[Prompt]) -> pathlib.Path:
    rows = [{"timestamp": 0, "input_length": r.length, "output_length": 1, "hash_ids": r.blocks} for r in requests]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_trace_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    requests = prompts([([0, 0], 100), ([0, 1], 512)])
    assert read(write(tmp_path / "trace.jsonl", requests)) == requests


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "no requests"),
        ([Prompt(513, (0,))], "1 ids for 513 tokens"),
        ([Prompt(1024, (0, 1)), Prompt(512, (1,))], "line 2: id 1 follows None, and 0 elsewhere"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: pathlib.Path, requests: list[Prompt], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        read(write(tmp_path / "trace.jsonl", requests))


def test_other_files_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("TIMESTAMP,ContextTokens\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"line 1: not a Mooncake trace.*FAST25-release"):
        read(path)
    with pytest.raises(SystemExit, match=r"No such file.*FAST25-release"):
        read(tmp_path / "missing.jsonl")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.prefix_cache", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)


def test_the_command_says_where_traces_are_and_runs_on_one(tmp_path: pathlib.Path) -> None:
    without = run()
    assert without.returncode == 2 and "FAST25-release/traces" in without.stderr
    requests = prompts([([i % 7, 0, i % 3], 300) for i in range(60)])
    done = run(str(write(tmp_path / "trace.jsonl", requests)), "--no-write")
    assert done.returncode == 0, done.stderr
    assert "every pool that holds a whole trace finds what an infinite cache finds" in done.stdout
