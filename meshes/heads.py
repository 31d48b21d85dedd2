"""Head layout: any number of query and KV heads on any tensor-parallel size.

A device can only run the program that all devices run, so every device gets the same shape: `kv_per_device` KV slots
with `group` query slots each. Where heads do not divide, KV heads are *replicated* into the spare slots, their query
heads are split over the replicas, and query slots left over hold zeros (their rows of the output projection are zero
too). With the 9 query and 3 KV heads of SmolLM2 on 8 devices:

    device       0    1    2    3    4    5    6    7
    KV slot      0    0    0    1    1    1    2    2      8 slots for 3 heads: 3 + 3 + 2
    query slots  0,-  1,-  2,-  3,-  4,-  5,-  6,7  8,-    group = ceil(3 / 2) = 2

What crosses between two pools is each true KV head once, from its owner slot (the first one).
"""

from __future__ import annotations

import dataclasses
import functools

EMPTY = -1


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """Which true head sits in which slot. Slot s belongs to device s // kv_per_device of the model axis.

    `kv_slots[s]` is a true KV head; `q_slots[s * group + g]` is a true query head or EMPTY.
    """

    num_heads: int
    num_kv_heads: int
    tp: int
    kv_per_device: int
    group: int
    kv_slots: tuple[int, ...]
    q_slots: tuple[int, ...]

    @property
    def q_per_device(self) -> int:
        """Query slots per device."""
        return self.kv_per_device * self.group

    @property
    def num_kv_slots(self) -> int:
        """KV slots over the model axis: the global size of the pool's KV-head axis."""
        return self.tp * self.kv_per_device

    def device_kv(self, device: int) -> tuple[int, ...]:
        """True KV heads of one device's slots, in order."""
        return self.kv_slots[device * self.kv_per_device : (device + 1) * self.kv_per_device]

    def device_q(self, device: int) -> tuple[int, ...]:
        """True query heads (or EMPTY) of one device's slots, in order."""
        return self.q_slots[device * self.q_per_device : (device + 1) * self.q_per_device]

    def owner(self, kv_head: int) -> int:
        """The slot that a true KV head is read from."""
        return self.kv_slots.index(kv_head)


@functools.cache
def head_layout(num_heads: int, num_kv_heads: int, tp: int) -> HeadLayout:
    """The layout of `num_heads` query and `num_kv_heads` KV heads on `tp` devices, with the fewest KV slots.

    Raises ValueError where the head counts are no grouped-query attention at all.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads or tp < 1:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}, and {tp=} at least 1")
    true_group = num_heads // num_kv_heads
    per_device = -(-num_kv_heads // tp)
    slots = per_device * tp
    replicas = [slots // num_kv_heads + (h < slots % num_kv_heads) for h in range(num_kv_heads)]
    group = -(-true_group // min(replicas))
    kv_slots: list[int] = []
    q_slots: list[int] = []
    for head, count in enumerate(replicas):
        queries = list(range(head * true_group, (head + 1) * true_group))
        share = -(-true_group // count)  # spread evenly, so that no replica is full while another is empty
        for r in range(count):
            mine = queries[r * share : (r + 1) * share]
            kv_slots.append(head)
            q_slots.extend(mine + [EMPTY] * (group - len(mine)))
    return HeadLayout(num_heads, num_kv_heads, tp, per_device, group, tuple(kv_slots), tuple(q_slots))
