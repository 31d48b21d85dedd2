"""The safetensors container, from a memory map: tensors are views of the file, so that reading one costs nothing.

Format: u64 length of the header (little-endian) | header, a JSON object name -> {dtype, shape, data_offsets: [begin,
end]} | data; offsets count from the end of the header. (The `safetensors` package copies each tensor and reports a
truncated file without its name.)
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxpd.errors import InvalidArgument

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class SafeTensor:
    """One tensor of a file: `data` is its bytes (uint8), `dtype` safetensors' name."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    def values(self) -> np.ndarray:
        """A read-only view in the tensor's own type. Raises InvalidArgument for a type other than F32, F16 and BF16."""
        if self.dtype not in _DTYPES:
            raise InvalidArgument(
                f"{self.path} holds a weight of type {self.dtype}; supported are {', '.join(_DTYPES)} "
                "(quantised checkpoints are not)"
            )
        return self.data.view(_DTYPES[self.dtype]).reshape(self.shape)


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """All tensors of a file, unread. Raises InvalidArgument when it is corrupt or shorter than its header says."""
    size = path.stat().st_size
    if size < 8:
        raise _corrupt(path, f"it has {size} bytes")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, _MAX_HEADER):
            raise _corrupt(path, f"its header should have {length} bytes, and the file has {size}")
        raw = file.read(length)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    everything = np.frombuffer(mapped, np.uint8)
    found: dict[str, SafeTensor] = {}
    try:
        for name, entry in json.loads(raw).items():
            if name == "__metadata__":
                continue
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            if end > size:
                raise _corrupt(path, f"{name} ends at byte {end}, and the file has {size}; the download is incomplete")
            known = _DTYPES.get(dtype)
            if begin > end or (known is not None and end - begin != math.prod(shape) * known.itemsize):
                raise _corrupt(path, f"{name} of shape {shape} and type {dtype} has {end - begin} bytes")
            found[name] = SafeTensor(path, dtype, shape, everything[begin:end])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(path, f"its header does not parse ({error})") from error
    return found


def _corrupt(path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"{path} is corrupt or truncated: {why}; fetch it again")
