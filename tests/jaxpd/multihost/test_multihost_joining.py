"""The flags of a worker of several processes: what cannot be is refused by name, before JAX starts."""

from __future__ import annotations

import pytest

from jaxpd.errors import InvalidArgument
from jaxpd.multihost.joining import Processes, check, processes_of

TWO = Processes(coordinator="10.0.0.5:1234", num_processes=2, process_id=1)


def test_none_of_the_flags_is_one_process() -> None:
    assert processes_of(None, None, None) is None
    assert processes_of("10.0.0.5:1234", 2, 1) == TWO


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("10.0.0.5:1234", None, None), "--coordinator 10.0.0.5:1234 .* needs --num-processes and --process-id too"),
        ((None, 2, 0), "--num-processes 2, --process-id 0 .* needs --coordinator too"),
        (("10.0.0.5", 2, 0), '--coordinator "10.0.0.5" must be HOST:PORT'),
        (("10.0.0.5:0", 2, 0), "must be HOST:PORT"),
        (("10.0.0.5:1", 1, 0), "--num-processes 1 must be at least 2"),
        (("10.0.0.5:1", 2, 2), "--process-id 2 must be from 0 to 1"),
    ],
)
def test_flags_that_do_not_fit_are_named(flags: tuple, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        processes_of(*flags)


def test_hosts() -> None:
    assert TWO.host == "10.0.0.5" and not TWO.leads
    assert Processes(coordinator="[fd00::5]:1", num_processes=2, process_id=0).host == "fd00::5"


def test_devices_of_each_process() -> None:
    assert check(TWO, "prefill", "2x1") == 1
    assert check(TWO, "mixed", "4x2") == 4


@pytest.mark.parametrize(
    ("role", "mesh", "message"),
    [
        ("prefill", "3x1", "--mesh 3x1 .* 2 processes .* divide evenly"),
        ("mixed", "2x1,2x1", "must be one mesh"),
        ("mixed", "two", "does not parse"),
        ("prefill", None, "needs --mesh"),
        ("decode", "2x1", "a decode worker is one process: start 2 of them"),
    ],
)
def test_meshes_and_roles_that_do_not_fit_are_named(role: str, mesh: str | None, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check(TWO, role, mesh)
