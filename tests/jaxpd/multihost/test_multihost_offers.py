"""A follower's part of hand-offs: its pieces are offered, ended or dropped as the leader says, and given back."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpd.errors import FailedPrecondition
from jaxpd.multihost.descriptors import (
    CloseTransport,
    Descriptor,
    DropPiece,
    EndOffer,
    Freed,
    Offered,
    OfferPiece,
    OpenTransport,
)
from jaxpd.multihost.offers import FollowerOffers
from meshes.devices import assign_devices
from meshes.heads import head_layout
from meshes.sharding import replica_mesh
from meshes.spec import MeshSpec
from meshes.transfer.link import JaxLink
from meshes.transfer.move import receivers

LAYOUT = head_layout(4, 2, 2)
SHAPE = (2, 3, 4, 8)
NBYTES = 2 * 2 * 3 * 4 * 8 * 4


def piece() -> tuple[jax.Array, ...]:
    (mesh,), _ = assign_devices((MeshSpec(2, 1),), (), jax.devices())
    on = NamedSharding(replica_mesh(mesh, 0), PartitionSpec("model"))
    values = np.stack([np.full(SHAPE, head, np.float32) for head in (3, 4)])
    return (jax.device_put(values, on),)


class Follower:
    def __init__(self) -> None:
        self.said: queue.Queue[Descriptor] = queue.Queue()
        self.offers = FollowerOffers("127.0.0.1", range(0, 1), send=self.said.put)
        self.offers.make(OpenTransport(1, 1, NBYTES, 8, 30.0))

    def offered(self, number: int, id: int) -> Offered:
        self.offers.hold(number, [piece()], LAYOUT)
        self.offers.make(OfferPiece(1, number, id))
        said = self.said.get(timeout=10)
        assert isinstance(said, Offered), said
        return said


@pytest.fixture
def follower() -> Iterator[Follower]:
    follower = Follower()
    yield follower
    follower.offers.close()


def test_its_heads_can_be_pulled_until_the_leader_ends_the_offer(follower: Follower) -> None:
    said = follower.offered(7, 99)
    assert (said.transport, said.offer) == (1, 99)
    (mesh,), _ = assign_devices((MeshSpec(1, 1),), (), jax.devices())
    targets = receivers(LAYOUT, head_layout(4, 2, 1), replica_mesh(mesh, 0))
    wanted = [
        jax.ShapeDtypeStruct((1, *SHAPE), np.float32, sharding=jax.sharding.SingleDeviceSharding(target))
        for target in targets
    ]
    link = JaxLink()
    got = link.pull(said.address, said.key, wanted).take()
    assert [float(head.ravel()[0]) for head in got] == [3, 4]
    link.close()
    follower.offers.make(EndOffer(1, 99, "acked", "acknowledged"))
    assert follower.said.get(timeout=10) == Freed(1, 99, "acked", "acknowledged")
    follower.offers.make(EndOffer(1, 99, "acked", "acknowledged"))
    assert follower.said.empty()


def test_what_does_not_fit_is_said_to_the_leader(follower: Follower) -> None:
    follower.offered(1, 10)
    follower.offers.hold(2, [piece()], LAYOUT)
    follower.offers.make(OfferPiece(1, 2, 11))
    said = follower.said.get(timeout=10)
    assert isinstance(said, Freed) and (said.offer, said.end) == (11, "failed")
    follower.offers.make(EndOffer(1, 10, "aborted", ""))
    assert follower.said.get(timeout=10) == Freed(1, 10, "aborted", "aborted by the prefill side")
    follower.offered(3, 12)


def test_what_is_dropped_is_gone(follower: Follower) -> None:
    follower.offers.hold(1, [piece()], LAYOUT)
    follower.offers.make(DropPiece(1))
    with pytest.raises(KeyError):
        follower.offers.make(OfferPiece(1, 1, 10))


def test_a_transport_that_is_closed_ends_its_offers_and_takes_no_more(follower: Follower) -> None:
    follower.offered(1, 10)
    follower.offers.make(CloseTransport(1))
    said = follower.said.get(timeout=10)
    assert isinstance(said, Freed) and said.end == "closed"
    follower.offers.hold(2, [piece()], LAYOUT)
    follower.offers.make(OfferPiece(1, 2, 11))
    assert follower.said.empty(), "the leader knows that it is closed"


def test_a_follower_without_a_port_says_which_flag_to_change() -> None:
    link = JaxLink()
    port = int(link.address.rpartition(":")[2])
    offers = FollowerOffers("127.0.0.1", range(port, port + 1), send=lambda _: None)
    with pytest.raises(FailedPrecondition, match=f"--transfer-listen 127.0.0.1:{port}"):
        offers.make(OpenTransport(1, 1, NBYTES, 8, 30.0))
    link.close()
