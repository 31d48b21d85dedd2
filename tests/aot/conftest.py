"""Compiles on two threads what the selected tests ask for, and keeps the results for the table (`make aot`)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks import aot_forward, aot_grid

WORKERS = 2
_kernels: dict[Any, dict[str, Any]] = {}
_forwards: dict[Any, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--aot-json", default=None, help="file for what was compiled, from which the table is made")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Without `-m aot` the files here are not even read: laying out 8B models for the list of cases takes seconds."""
    return True if "not aot" in config.getoption("markexpr") else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--aot-json", default=None)
    if path and (_kernels or _forwards):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        found = {"kernels": list(_kernels.values()), "forwards": list(_forwards.values())}
        pathlib.Path(path).write_text(json.dumps(found, indent=1), encoding="utf-8")


def _selected(request: pytest.FixtureRequest, kind: type) -> list[Any]:
    """The cases of all tests of this session, each once."""
    found: dict[Any, None] = {}
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        found.update({value: None for value in params.values() if isinstance(value, kind)})
    return list(found)


@pytest.fixture(scope="session")
def executor() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def outcome_of(
    request: pytest.FixtureRequest, executor: concurrent.futures.ThreadPoolExecutor
) -> Callable[[aot_grid.Case], aot_grid.Outcome]:
    """What became of a case of the grid."""
    cases = aot_grid.interleaved(_selected(request, aot_grid.Case))
    futures = {case: executor.submit(aot_grid.compile_case, case) for case in cases}

    def outcome(case: aot_grid.Case) -> aot_grid.Outcome:
        result = futures[case].result()
        _kernels[case] = {**dataclasses.asdict(case), "shape": case.shape, **dataclasses.asdict(result)}
        return result

    return outcome


@pytest.fixture(scope="session")
def compiled(
    request: pytest.FixtureRequest, executor: concurrent.futures.ThreadPoolExecutor
) -> Callable[[aot_forward.ForwardCase], aot_forward.CompiledForward]:
    """A compiled `forward`, read."""
    cases = _selected(request, aot_forward.ForwardCase)
    futures = {case: executor.submit(aot_forward.compile_forward, case) for case in cases}

    def read(case: aot_forward.ForwardCase) -> aot_forward.CompiledForward:
        result = futures[case].result()
        _forwards[case] = result.row()
        return result

    return read
