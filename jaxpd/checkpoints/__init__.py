"""Where models come from: MODEL as typed -> `resolve` -> `Checkpoint` (config, weights by name, tokenizer).

`resolving` decides, `hf`, `gguf` and `orbax` read one kind of checkpoint each, `builtin` and `hub` fetch, `convert`
writes. Weights reach the mesh in `placement`, one at a time.
"""

from jaxpd.checkpoints.builtin import BUILTIN, default_cache_dir
from jaxpd.checkpoints.resolving import open_path, resolve
from jaxpd.checkpoints.source import Checkpoint, WeightSource

__all__ = ["BUILTIN", "Checkpoint", "WeightSource", "default_cache_dir", "open_path", "resolve"]
