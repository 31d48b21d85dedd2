"""Reads what a compiled program does from its optimised HLO text."""

from __future__ import annotations

import dataclasses
import math
import re

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\(", re.MULTILINE)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_BITS = {"pred": 8}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    operation: str  # "fusion", "custom-call", ...
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape) of the result, or of each part of a tuple
    line: str

    @property
    def aliases_an_operand(self) -> bool:
        """The result takes the place of an operand: nothing is copied."""
        return "output_to_operand_aliasing" in self.line


def instructions(text: str) -> list[Instruction]:
    """All instructions of all computations, those inside fusions too."""
    found = []
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            arrays = tuple(
                (dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(match[2])
            )
            found.append(Instruction(match[1], match[3], arrays, line))
    return found


def makers_of(text: str, dtype: str, shape: tuple[int, ...]) -> list[Instruction]:
    """Instructions a part of whose result is as large as `shape`, with or without axes of size 1, and of that dtype."""
    size = math.prod(shape)
    return [
        one for one in instructions(text) if any(kind == dtype and math.prod(dims) == size for kind, dims in one.arrays)
    ]


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One call of a Pallas kernel."""

    target: str  # "tpu_custom_call", or Mosaic GPU's
    name: str  # the kernel's
    vmem_bytes: int | None  # what the compiler gave it on a TPU; None on a GPU
    vmem_limit_bytes: int | None  # what it was allowed


def kernel_calls(text: str) -> list[KernelCall]:
    """The Pallas kernels of a program, in the order of the text."""
    calls = []
    for one in instructions(text):
        target = re.search(r'custom_call_target="((?:tpu_custom_call|mosaic_gpu|__gpu\$xla\.gpu\.)[^"]*)"', one.line)
        if one.operation == "custom-call" and target:
            name = re.search(r'"kernel_name":"([^"]*)"|op_name="([^"]*)"', one.line)
            label = (name[1] or name[2]) if name else one.name
            allowed, used = _vmem(one.line, "(?<!used_)scoped_"), _vmem(one.line, "used_scoped_")
            # What is used is counted from address 0, and the kernel's part begins where what is allowed does.
            size = sum(used) - allowed[0] if allowed and used else None
            calls.append(KernelCall(target[1], label, size, allowed[1] if allowed else None))
    return calls


def _vmem(line: str, prefix: str) -> tuple[int, int] | None:
    """(offset, bytes) of VMEM (memory space 1) in the list of scoped memory that `prefix` names."""
    found = re.search(rf'"?{prefix}memory_configs":\[([^\]]*)\]', line)
    part = found and re.search(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"', found[1])
    return (int(part[1]), int(part[2])) if part else None
