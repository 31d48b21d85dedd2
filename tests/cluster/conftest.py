"""Clusters that tests share, and the record of what cells of the failure matrix took."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.fullness import PAGES
from tests.cluster.harness import SMALL, Cluster
from tests.cluster.reference import MODEL, answer_to
from tests.cluster.report import machine
from tests.cluster.stages import TOKENS, VERY_LONG_TOKENS, long_prompt, short_prompt, very_long_answer
from tests.jaxpd.few_pages import kv_memory_of

BUILD = pathlib.Path(__file__).parent.parent.parent / "build"


class Clusters:
    """One that cells of the matrix share for as long as each leaves it whole."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._made = 0
        self._cluster: Cluster | None = None

    def get(self) -> Cluster:
        """Two prefill workers and two decode workers with few pages, and hooks in all of them."""
        if self._cluster is None:
            self._made += 1
            asked = ((long_prompt(), TOKENS), (short_prompt(), 8), (very_long_answer(), VERY_LONG_TOKENS))
            for prompt, tokens in asked:
                answer_to(prompt, tokens)  # seconds of the oracle, which requests that are on their way do not have
            kv_memory = kv_memory_of(PAGES, MODEL, role="decode", mesh="1x1", max_model_len=256)
            cluster = Cluster(
                self._folder / f"cluster{self._made}",
                prefill=["2x1", "2x1"],
                decode=["1x1", "1x1"],
                flags=SMALL,
                role_flags={"decode": ("--kv-memory", kv_memory, "--reserve-tokens", 16)},
                faulty=True,
                cache=self._folder / "programs",
            )
            self._cluster = cluster.__enter__()
        return self._cluster

    def discard(self, error: BaseException | None = None) -> None:
        """Ends it, and shows its logs where a test has failed."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.__exit__(None if error is None else type(error), error, None)


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """The cluster of a module."""
    made = Clusters(tmp_path_factory.mktemp("clusters"))
    try:
        yield made
    finally:
        made.discard()


@pytest.fixture(scope="module")
def record() -> Iterator[list[dict[str, Any]]]:
    """What the cells of a module took, written to build/failures.json at its end."""
    cells: list[dict[str, Any]] = []
    began_s = time.monotonic()
    yield cells
    BUILD.mkdir(exist_ok=True)
    result = {"machine": machine(), "seconds": time.monotonic() - began_s, "cells": cells}
    (BUILD / "failures.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
