"""llama.cpp's server inside this process (`xllamacpp`), with its defaults but for threads, slots and context.

- prefill: its own `prompt_ms` for an answer of one token.
- decode: its own `predicted_ms`, which runs from the first token to the last one (the first is counted in `predicted_n`
  but belongs to the prompt's time).
- batch: wall time until every one of the concurrent requests has been answered.

Its KV cache is float16, its default, with either file. Prompts are not cached from one request to the next.
"""

# xllamacpp is no dependency of jaxpd, so the type checker does not find it either.
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp


class Engine:
    """See worker.py."""

    def __init__(self, options: dict[str, Any]) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = options["file"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
        params.n_parallel = options["rows"]
        params.n_ctx = options["context"]  # shared by all slots
        params.kv_unified = True
        params.cache_ram_mib = 0
        self.server = xllamacpp.Server(params)

    def about(self) -> dict[str, Any]:
        """Version."""
        return {"version": xllamacpp.__version__}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """See the module."""
        timings = self._complete(prompt, 1)["timings"]
        if timings["prompt_n"] != len(prompt):
            raise RuntimeError(f"{timings['prompt_n']} of {len(prompt)} prompt tokens were computed")
        return {"seconds": timings["prompt_ms"] / 1e3}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """See the module."""
        answer = self._complete(prompt, tokens)
        timings = answer["timings"]
        return {
            "seconds": timings["predicted_ms"] / 1e3,
            "steps": timings["predicted_n"] - 1,
            "text": answer["choices"][0]["text"],
        }

    def batch(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """See the module."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            start = time.perf_counter()
            answers = list(threads.map(self._complete, prompts, [tokens] * len(prompts)))
            seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": sum(a["usage"]["completion_tokens"] for a in answers)}

    def close(self) -> None:
        """Ends the server."""
        del self.server

    def _complete(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        greedy = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1}
        request = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, **greedy}
        answer: dict[str, Any] = self.server.handle_completions(request)
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp answered {answer}")
        return answer
