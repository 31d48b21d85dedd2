"""Bytes that a compiled TPU program moves to and from HBM, counted from its optimised HLO text.

XLA's own "bytes accessed" adds up the operands and results of every instruction wherever they lie: a weight that is
brought to VMEM ahead of time and multiplied there counts three times. Here only what lies in HBM counts: the layout of
an array in the text says where it lies (`S(1)` is VMEM, `S(2)` and up are semaphores and scalars).

An operand of a fusion that is only sliced inside counts with the slices, one that is updated in place with the
update. The body of a loop counts as often as the text says that it runs, once where it does not say. Of a Pallas kernel
only the operands and results beside the page pool count: what it moves of the pool is counted from its DMAs
(`roofline.py`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict

_LINE = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_NOTHING_MOVES = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "partition-id", "after-all"}
_SLICES = {"slice", "dynamic-slice", "gather"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One instruction of a computation."""

    name: str
    operation: str
    result: str  # its type, as text
    inside: str  # what stands between the parentheses
    rest: str  # attributes
    root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.-]+)", self.inside)


def hbm_bytes(text: str, pool_bytes: int) -> dict[str, int]:
    """Bytes moved per execution, by the kind of instruction: reads of operands and writes of results in HBM.

    `pool_bytes`: size of the page pool on a device; arrays of a kernel that are as large are left out.
    """
    computations, entry = _computations(text)
    moved: dict[str, int] = defaultdict(int)
    _count(computations, entry, 1, moved, pool_bytes)
    return dict(moved)


def _computations(text: str) -> tuple[dict[str, list[Line]], str]:
    computations: dict[str, list[Line]] = {}
    entry, current = "", ""
    for row in text.splitlines():
        head = _HEAD.match(row)
        if head:
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
            continue
        match = _LINE.match(row)
        if match and current:
            inside, rest = _split(match[5])
            computations[current].append(Line(match[2], match[4], match[3], inside, rest, bool(match[1])))
    return computations, entry


def _split(tail: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes a call, and what follows."""
    depth, end = 1, len(tail)
    for i, letter in enumerate(tail):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            end = i
            break
    return tail[:end], tail[end + 1 :]


def _size(kind: str) -> int:
    """Bytes in HBM of a type: of all its arrays, if it is a tuple."""
    total = 0
    for dtype, dims, layout in _ARRAY.findall(kind):
        if re.search(r"S\(\d+\)", layout or ""):
            continue
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
        total += math.prod(int(d) for d in dims.split(",") if d) * bits // 8
    return total


def _count(computations: dict[str, list[Line]], name: str, times: int, moved: dict[str, int], pool_bytes: int) -> None:
    lines = computations[name]
    types = {line.name: line.result for line in lines}
    for line in lines:
        if line.operation in _NOTHING_MOVES or line.operation.endswith("-done"):
            continue
        if line.operation in ("while", "call", "conditional"):
            rounds = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line.rest)
            for called in re.findall(r"(?:body|to_apply|branch_computations)=\{?%?([\w.-]+)", line.rest):
                _count(computations, called, times * (int(rounds[1]) if rounds else 1), moved, pool_bytes)
        elif line.operation == "custom-call" and "tpu_custom_call" in line.rest:
            sizes = [_size(kind) for kind in (line.result, *(types.get(one, "") for one in line.operands))]
            moved["kernel operands"] += times * sum(size for size in sizes if size < pool_bytes)
        elif line.operation in ("copy-start", "slice-start"):
            # (source, destination, ...): read where it lies in HBM, write likewise; of a slice, only the slice.
            arrays = _ARRAY.findall(line.result)
            source, target = _shaped(arrays[0]), _shaped(arrays[1])
            amount = min(_anywhere(arrays[0]), _anywhere(arrays[1]))
            moved[line.operation] += times * amount * (bool(_size(source)) + bool(_size(target)))
        else:
            fused = re.search(r"calls=%?([\w.-]+)", line.rest)
            inner = computations.get(fused[1]) if fused else None
            moved[_label(line, inner)] += times * _moved_by(line, inner, types)


def _label(line: Line, inner: list[Line] | None) -> str:
    if inner is not None and any(one.operation in ("dot", "convolution") for one in inner):
        return "matmul"
    return line.operation


def _shaped(array: tuple[str, str, str]) -> str:
    return f"{array[0]}[{array[1]}]{array[2]}"


def _anywhere(array: tuple[str, str, str]) -> int:
    return _size(f"{array[0]}[{array[1]}]")


def _moved_by(line: Line, inner: list[Line] | None, types: dict[str, str]) -> int:
    if inner is None:
        sizes = [_size(types.get(operand, "")) for operand in line.operands]
        if line.operation in _SLICES and sizes:
            sizes[0] = min(sizes[0], _in_hbm(line.result))
        return sum(sizes) + _size(line.result)
    root = next(one for one in inner if one.root)
    updated = root.operation == "dynamic-update-slice"
    parameters = {int(one.inside): one.name for one in inner if one.operation == "parameter"}
    total = 0
    for position, operand in enumerate(line.operands):
        size, name = _size(types.get(operand, "")), parameters[position]
        users = [one for one in inner if name in one.operands]
        if size and all(one.operation in _SLICES and one.operands[0] == name for one in users):
            size = min(size, sum(_in_hbm(one.result) for one in users))
        elif updated and users == [root] and root.operands[0] == name:
            size = 0
        total += size
    if updated and _size(line.result):
        return total + _in_hbm(next(one.result for one in inner if one.name == root.operands[1]))
    return total + _size(line.result)


def _in_hbm(kind: str) -> int:
    """Bytes of a type, had it to be moved: those of an array inside a fusion, which lies nowhere."""
    return _size(re.sub(r"S\(\d+\)", "", kind))
