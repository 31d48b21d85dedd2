"""jaxpd: prefill and decode on separate JAX meshes.

`LLM` is the Python door, `SamplingParams` says how to sample; `jaxpd serve` starts the gRPC server. The engine's path
of a request is told in `jaxpd.engine`, the whole one in `serving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxpd.errors import JaxpdError
from jaxpd.request import FinishReason, SamplingParams
from jaxpd.structured import StructuredOutput

if TYPE_CHECKING:
    from jaxpd.llm import LLM, Completion, Delta

__all__ = ["LLM", "Completion", "Delta", "FinishReason", "JaxpdError", "SamplingParams", "StructuredOutput"]


def __getattr__(name: str) -> Any:
    """JAX is imported only when `LLM` is asked for: `jaxpd --help` stays quick."""
    if name in ("LLM", "Completion", "Delta"):
        import jaxpd.llm

        return getattr(jaxpd.llm, name)
    raise AttributeError(f"module 'jaxpd' has no attribute {name!r}")
