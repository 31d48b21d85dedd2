"""`JaxLink`: what the real transfer server makes of the verbs, with two links in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from meshes.transfer.link import JaxLink, Pull

PATIENCE_S = 60.0
SHAPE = (1, 64)


@pytest.fixture
def ends() -> Iterator[tuple[JaxLink, JaxLink]]:
    here, there = JaxLink(), JaxLink()
    yield here, there
    here.close()
    there.close()


def array(value: float, device: int) -> jax.Array:
    return jax.block_until_ready(jax.device_put(np.full(SHAPE, value, np.float32), jax.devices()[device]))


def wanted(*devices: int) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=SingleDeviceSharding(jax.devices()[device]))
        for device in devices
    ]


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that"
        time.sleep(0.002)


def taken(pull: Pull) -> list[jax.Array]:
    until(pull.settled)
    return pull.take()


def hangs(pull: Pull) -> bool:
    time.sleep(0.1)
    return not pull.settled()


def test_arrays_of_several_devices_arrive_on_those_that_are_named(ends: tuple[JaxLink, JaxLink]) -> None:
    here, there = ends
    there.put((1 << 64) - 1, [array(i, i) for i in range(4)])
    got = taken(here.pull(there.address, (1 << 64) - 1, wanted(7, 7, 6, 5)))
    assert [device.id for a in got for device in a.devices()] == [7, 7, 6, 5]
    assert [float(a[0, 0]) for a in got] == [0, 1, 2, 3]


def test_a_pull_that_comes_first_waits_for_the_arrays(ends: tuple[JaxLink, JaxLink]) -> None:
    here, there = ends
    pull = here.pull(there.address, 1, wanted(0))
    assert hangs(pull)
    there.put(1, [array(5, 3)])
    assert float(taken(pull)[0][0, 0]) == 5


def test_a_pull_of_what_was_withdrawn_fails_at_once_and_the_next_arrives(ends: tuple[JaxLink, JaxLink]) -> None:
    here, there = ends
    there.put(1, [array(1, 0)])
    there.withdraw(1)
    there.withdraw(2)  # never put
    for key in (1, 2):
        with pytest.raises(Exception, match="out of range"):
            taken(here.pull(there.address, key, wanted(0)))
        assert here._connections == {}, "a connection on which something failed is not used again"
    there.put(1, [array(6, 0)])
    assert float(taken(here.pull(there.address, 1, wanted(0)))[0][0, 0]) == 6


def test_a_withdrawn_pull_that_waits_fails(ends: tuple[JaxLink, JaxLink]) -> None:
    here, there = ends
    pull = here.pull(there.address, 1, wanted(0))
    assert hangs(pull)
    there.withdraw(1)
    with pytest.raises(Exception, match="out of range"):
        taken(pull)


def test_a_healthy_pull_beside_one_that_hangs_arrives(ends: tuple[JaxLink, JaxLink]) -> None:
    here, there = ends
    hanging, healthy = (here.pull(there.address, key, wanted(0)) for key in (1, 2))
    there.put(2, [array(2, 0)])
    assert float(taken(healthy)[0][0, 0]) == 2 and hangs(hanging)
    there.put(1, [array(1, 0)])
    assert float(taken(hanging)[0][0, 0]) == 1


def restarted(address: str) -> JaxLink:
    """A new link at the address of a closed one, whose port is free a moment later."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return JaxLink(address)
        except OSError:
            assert time.monotonic() < end_s, "the port of a closed link is still taken"
            time.sleep(0.02)


def test_a_peer_that_was_started_again_is_found_again(ends: tuple[JaxLink, JaxLink]) -> None:
    here, there = ends
    there.put(1, [array(1, 0)])
    taken(here.pull(there.address, 1, wanted(0)))
    here.cut(there.address)
    there.close()
    again = restarted(there.address)
    again.put(2, [array(2, 0)])
    assert float(taken(here.pull(again.address, 2, wanted(0)))[0][0, 0]) == 2
    again.close()


def test_cutting_a_peer_ends_what_is_under_way_from_it_alone(ends: tuple[JaxLink, JaxLink]) -> None:
    here, there = ends
    third = JaxLink()
    doomed, other = here.pull(there.address, 1, wanted(0)), here.pull(third.address, 1, wanted(0))
    assert hangs(doomed)
    here.cut(there.address)
    here.cut("10.1.1.1:1")  # nobody it knows
    with pytest.raises(Exception, match="INTERNAL"):
        taken(doomed)
    third.put(1, [array(4, 0)])
    assert float(taken(other)[0][0, 0]) == 4
    there.put(2, [array(2, 0)])
    assert float(taken(here.pull(there.address, 2, wanted(0)))[0][0, 0]) == 2, "a cut is not a ban"
    third.close()


def test_closing_ends_what_is_under_way_and_what_waits(ends: tuple[JaxLink, JaxLink]) -> None:
    here, there = ends
    pull = here.pull(there.address, 1, wanted(0))
    there.put(2, [array(1, 0)])
    assert hangs(pull)
    here.close()
    here.close()
    with pytest.raises(Exception, match="INTERNAL"):
        taken(pull)
    for call in (lambda: here.put(1, [array(1, 0)]), lambda: here.pull(there.address, 2, wanted(0))):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    here.withdraw(1)


def test_a_host_that_is_not_there_is_waited_for_until_it_is_cut(ends: tuple[JaxLink, JaxLink]) -> None:
    here, _ = ends
    pull = here.pull("127.0.0.1:1", 1, wanted(0))
    assert hangs(pull)
    here.cut("127.0.0.1:1")
    until(pull.settled)


def test_a_port_that_is_taken(ends: tuple[JaxLink, JaxLink]) -> None:
    with pytest.raises(OSError, match="cannot listen at 127.0.0.1:.*choose another port"):
        JaxLink(ends[0].address)


@pytest.mark.parametrize("address", ["localhost:1", "10.0.0.1", "10.0.0.1:x", "10.0.0.1:70000", ":1", "[::1]"])
def test_an_address_must_be_numeric(address: str, ends: tuple[JaxLink, JaxLink]) -> None:
    with pytest.raises(ValueError, match="numeric address and a port"):
        JaxLink(address)
    with pytest.raises(ValueError, match="numeric address and a port"):
        ends[0].pull(address, 1, wanted(0))


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_every_interface_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="every interface"):
        JaxLink(address)


def test_streams_are_needed() -> None:
    with pytest.raises(ValueError, match="streams=0"):
        JaxLink(streams=0)


def test_several_streams() -> None:
    here, there = JaxLink(streams=3), JaxLink(streams=3)
    there.put(1, [array(i, 0) for i in range(8)])
    assert [float(a[0, 0]) for a in taken(here.pull(there.address, 1, wanted(*range(8))))] == list(range(8))
    here.close()
    there.close()
