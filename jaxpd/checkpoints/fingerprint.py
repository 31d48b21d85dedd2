"""What tells two checkpoints apart without reading them: a hash of what decides KV, and of a little of every weight.

Workers that hand KV to each other compare it. It is the same for the same checkpoint in other folders, and in another
file format that keeps names and values. Of safetensors a few memory pages of each weight are read, so that 100 GB take
a second or so; formats whose weights are not views of their file (quantised GGUF, Orbax) are read once more. It is no
defence against who makes another one on purpose.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from jaxpd.checkpoints.source import Checkpoint

SAMPLES = 64  # values of each weight, spread over it, first and last among them
# Of the configuration: neither what a prompt may hold nor what ends an answer changes what a page of KV holds.
NOT_KV = ("max_position", "bos_token_id", "eos_token_ids", "final_softcap", "tie_embeddings")


def fingerprint(checkpoint: Checkpoint) -> str:
    """32 hex digits. Raises InvalidArgument where a weight cannot be read."""
    config = dataclasses.asdict(checkpoint.config)
    digest = hashlib.sha256(repr(sorted((k, v) for k, v in config.items() if k not in NOT_KV)).encode())
    source = checkpoint.source
    for name in sorted(source.names()):
        values = source.read(name)
        digest.update(f"{name} {values.shape}".encode())
        digest.update(sampled(values).tobytes())
    source.release()
    return digest.hexdigest()[:32]


def sampled(values: np.ndarray) -> np.ndarray:
    """SAMPLES values of an array, or all of a smaller one, in float32."""
    flat = values.reshape(-1)  # a view, as weights come in rows
    places = np.unique(np.linspace(0, max(flat.size - 1, 0), SAMPLES).round().astype(np.int64))
    return flat[places[: flat.size]].astype(np.float32)
