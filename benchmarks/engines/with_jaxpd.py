"""jaxpd, through its Python door, on a `1x1` prefill mesh and a `1x1` decode mesh.

- prefill: `timings.prefill_s` of an answer of one token: from admission until the host has read the first token.
- decode: `timings.decode_s`: from the moment the sequence's KV is in the decode pool until the host has read its last
  token. The hand-off before it is reported beside it (`exposed_s`).
- batch: wall time of one `LLM.generate` call.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

from jaxpd import LLM, SamplingParams
from jaxpd.config import EngineConfig


class Engine:
    """See worker.py."""

    def __init__(self, options: dict[str, Any]) -> None:
        cache = options["compile_cache"]
        # the peers compute every prompt anew; a checkout of before there was a prefix cache has no such option
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        off: dict[str, Any] = {"prefix_cache": False} if "prefix_cache" in known else {}
        self.llm = LLM(
            options["model"],
            prefill_mesh="1x1",
            decode_mesh="1x1",
            dtype="float32",
            max_num_seqs=options["rows"],
            max_model_len=options["max_model_len"],
            kv_memory=options["kv_memory"],
            compile_cache=None if cache is None else pathlib.Path(cache),
            **off,
        )

    def about(self) -> dict[str, Any]:
        """Pages and bytes of its pools, and of its weights."""
        limits = self.llm.engine.limits
        return {
            "pages": [pool.num_pages for pool in limits.pools],
            "tokens_per_page": limits.page_size,
            "pool_bytes": sum(pool.kv_bytes for pool in limits.pools),
            "weight_bytes": self.llm.engine.checkpoint.config.num_parameters() * 4,
        }

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """See the module."""
        (done,) = self.llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
        return {"seconds": done.timings.prefill_s}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """See the module."""
        (done,) = self.llm.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))
        return {
            "seconds": done.timings.decode_s,
            "steps": len(done.token_ids) - 1,
            "exposed_s": done.timings.transfer_exposed_s,
            "token_ids": done.token_ids,
        }

    def batch(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """See the module. `step_s` is a decode step while all were decoding: that of the sequence that came last."""
        start = time.perf_counter()
        done = self.llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        seconds = time.perf_counter() - start
        steps = [d.timings.decode_s / (len(d.token_ids) - 1) for d in done if d.timings.decode_s is not None]
        return {"seconds": seconds, "tokens": sum(len(d.token_ids) for d in done), "step_s": min(steps)}

    def close(self) -> None:
        """Ends the engine."""
        self.llm.close()
