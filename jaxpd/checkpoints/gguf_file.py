"""The GGUF container: metadata and where each tensor lies, from a memory map, in a fraction of a second.

Format (ggml's `docs/gguf.md`, versions 2 and 3, little-endian):

    "GGUF" | u32 version | u64 tensors | u64 metadata entries
    entry*   string key | u32 type | value            string: u64 length, bytes; array: u32 type, u64 length, values
    tensor*  string name | u32 rank | u64 dims, innermost first | u32 type | u64 offset
    padding to `general.alignment` (32), then the tensors' bytes; offsets count from here

The `gguf` package reads the same, but makes NumPy objects of every token of the vocabulary: 3 to 14 s where this takes
about 0.2 s. Dequantising is left to that package.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxpd.errors import InvalidArgument

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: ("B", np.uint8), 1: ("b", np.int8), 2: ("H", np.uint16), 3: ("h", np.int16), 4: ("I", np.uint32),
    5: ("i", np.int32), 6: ("f", np.float32), 7: ("?", np.bool_), 10: ("Q", np.uint64), 11: ("q", np.int64),
    12: ("d", np.float64),
}  # fmt: skip
_MAX_RANK = 4
_DEQUANTISE_AT_ONCE = 1 << 20  # values


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One tensor: `shape` outermost axis first, `kind` ggml's type number, `data` its raw bytes in the file (uint8)."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: np.ndarray


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """`metadata` holds numbers, strings, lists of strings, and NumPy arrays for arrays of numbers."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Reads metadata and the tensor table; tensor bytes stay in the memory map until they are used.

    Raises InvalidArgument when the file is not GGUF, is corrupt, or is shorter than its tensor table says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise InvalidArgument(f"{path} is not a GGUF file (it does not start with 'GGUF')")
        if size < 24:
            raise _corrupt(path, f"it ends after {size} bytes, inside its header")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _parse(path, _Cursor(mapped))
    except (struct.error, UnicodeDecodeError, _Broken) as error:
        raise _corrupt(path, str(error)) from error


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    cursor.at = len(MAGIC)
    version = cursor.number("I")
    if version not in (2, 3):
        hint = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise InvalidArgument(f"{path}: GGUF version {version}{hint} is not supported; convert it to version 3")
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    table = [_tensor_entry(cursor) for _ in range(tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    if alignment < 1:
        raise _Broken(f"general.alignment is {alignment}")
    start = -(-cursor.at // alignment) * alignment
    everything = np.frombuffer(cursor.buffer, np.uint8)
    found: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in table:
        nbytes = _nbytes(path, name, shape, kind)
        begin = start + offset
        if begin + nbytes > everything.size:
            raise _Broken(
                f"tensor {name!r} ends at byte {begin + nbytes}, and the file has {everything.size} (half a download?)"
            )
        found[name] = GGUFTensor(name, shape, kind, everything[begin : begin + nbytes])
    return GGUFFile(path, metadata, found)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    rank = cursor.number("I")
    if not 1 <= rank <= _MAX_RANK:
        raise _Broken(f"tensor {name!r} has {rank} axes")
    dims = tuple(cursor.number("Q") for _ in range(rank))
    return name, dims[::-1], cursor.number("I"), cursor.number("Q")


def _nbytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise InvalidArgument(
            f"{path}: tensor {name!r} has the unknown type number {kind}; a newer `gguf` package may know it"
        ) from None
    if shape[-1] % block:
        raise _Broken(f"tensor {name!r} has rows of {shape[-1]} values, no multiple of its block of {block}")
    return math.prod(shape) // block * block_bytes


def dequantize(tensor: GGUFTensor) -> np.ndarray:
    """The tensor's values in its shape: float32 and float16 as views of the file, other types dequantised to float32.

    Raises InvalidArgument for a type that the `gguf` package cannot dequantise.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    kind = GGMLQuantizationType(tensor.kind)
    if kind == GGMLQuantizationType.F32:
        return tensor.data.view("<f4").reshape(tensor.shape)
    if kind == GGMLQuantizationType.F16:
        return tensor.data.view("<f2").reshape(tensor.shape)
    width = tensor.shape[-1]
    rows = tensor.data.reshape(math.prod(tensor.shape[:-1]), -1)
    values = np.empty((len(rows), width), np.float32)
    step = max(1, _DEQUANTISE_AT_ONCE // max(1, width))  # the package needs twice its result
    try:
        for start in range(0, len(rows), step):
            values[start : start + step] = gguf_dequantize(rows[start : start + step], kind)
        return values.reshape(tensor.shape)
    except NotImplementedError:
        raise InvalidArgument(
            f"tensor {tensor.name!r} is stored as {kind.name}, which cannot be dequantised; use a file of another type"
        ) from None


class _Broken(Exception):
    """Something in the file contradicts itself; becomes an InvalidArgument that names the file."""


def _corrupt(path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"{path} is corrupt or truncated: {why}; fetch it again")


class _Cursor:
    """Reads values one after the other and never beyond the end."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0
        self._size = len(buffer)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.number("Q")
        self._need(length, "a string")
        self.at += length
        return self.buffer[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind][0])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise _Broken(f"unknown metadata type {kind} at byte {self.at}")
        item, length = self.number("I"), self.number("Q")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item][1])
            self._need(length * dtype.itemsize, "an array")
            values = np.frombuffer(self.buffer, dtype, length, self.at)
            self.at += values.nbytes
            return values
        if item != _STRING:  # arrays of arrays are allowed and never used
            raise _Broken(f"an array at byte {self.at} has items of the unknown type {item}")
        return self._strings(length)

    def _strings(self, length: int) -> list[str]:
        """The loop over a vocabulary of 262,144 tokens and 500,000 merges: the one place where speed counts here."""
        unpack, buffer, at, out = struct.Struct("<Q").unpack_from, self.buffer, self.at, []
        for _ in range(length):
            end = at + 8 + unpack(buffer, at)[0]
            if end > self._size:
                raise _Broken(f"a string at byte {at} runs beyond the end")
            out.append(buffer[at + 8 : end].decode("utf-8"))
            at = end
        self.at = at
        return out

    def _need(self, nbytes: int, what: str) -> None:
        if self.at + nbytes > self._size:
            raise _Broken(f"{what} at byte {self.at} runs beyond the end")
