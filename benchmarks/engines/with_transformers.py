"""Hugging Face transformers with torch, float32, its default attention (SDPA) and cache.

- prefill: one forward pass with a cache and the logits of the last position only, and the argmax of those.
- decode: `model.generate`, greedy, between the first and the last token as a streamer sees them.
- batch: wall time of one `model.generate` call on a static batch; all prompts have one length, so nothing is padded.
"""

# torch and transformers are no dependencies of jaxpd, so the type checker does not find them either.
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer


class Stopwatch(BaseStreamer):
    """Notes when each token was handed out; `generate` puts the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """One token, or the prompt."""
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


class Engine:
    """See worker.py."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(options["folder"], dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # never stops early

    def about(self) -> dict[str, Any]:
        """Versions and what does the work."""
        return {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "attention": self.model.config._attn_implementation,
        }

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """See the module."""
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        logits = self.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())
        return {"seconds": time.perf_counter() - start}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """See the module."""
        watch = Stopwatch()
        out = self._generate([prompt], tokens, streamer=watch)
        first, last = watch.times[1], watch.times[-1]
        return {"seconds": last - first, "steps": len(watch.times) - 2, "token_ids": out[0, len(prompt) :].tolist()}

    def batch(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """See the module."""
        start = time.perf_counter()
        out = self._generate(prompts, tokens)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": out.shape[0] * (out.shape[1] - len(prompts[0]))}

    def close(self) -> None:
        """Nothing to do."""

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], tokens: int, **more: Any) -> Any:
        ids = torch.tensor(prompts)
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            **more,
        )
