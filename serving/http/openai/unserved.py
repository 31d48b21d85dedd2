"""Options that OpenAI's or vLLM's clients know and that are not served here: refused by name, never ignored in silence.

A key that nobody knows is ignored, as everywhere; and so is a known one with a value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpd.errors import InvalidArgument

# name -> (the values that ask for nothing, what to do instead)
UNSERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "answers are text"),
    "modalities": ((["text"], []), "answers are text"),
    "web_search_options": ((), "the model cannot search"),
    "prediction": ((), "leave it out"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "store": ((False,), "answers are not stored"),
    "verbosity": (("medium",), "ask for it in the prompt"),
    "moderation": ((), "leave it out"),
    "use_beam_search": ((False,), "use n with a temperature"),
    "length_penalty": ((1, 0), "it is for beam search"),
    "early_stopping": ((False,), "it is for beam search"),
    "truncate_prompt_tokens": ((), "shorten the prompt before it is sent"),
    "skip_special_tokens": ((True,), "use return_token_ids to see them"),
    "spaces_between_special_tokens": ((True, False), ""),
    "include_stop_str_in_output": ((False,), "stop_reason says which one ended the answer"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": (([],), "use structured_outputs"),
    "logits_processors": (([],), "use logit_bias or structured_outputs"),
    "prompt_embeds": ((), "send text or token ids"),
    "mm_processor_kwargs": (({},), "prompts are text"),
    "chat_template": ((), "the model's own is used; send the finished prompt to /v1/completions instead"),
    "documents": (([],), "put them into chat_template_kwargs or a message"),
    "guided_whitespace_pattern": ((), "leave it out"),
    "structural_tag": ((), "use structured_outputs"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "thinking_token_budget": ((), "use max_completion_tokens"),
    "kv_transfer_params": ((), "prefill and decode are both in this server"),
    "echo": ((False,), "it belongs to /v1/completions"),
    "best_of": ((1,), "use n"),
    "add_special_tokens": ((False,), "the chat template writes them"),
    "include_reasoning": ((True,), "it comes apart from the content; leave it aside"),
    "lora_request": ((), "adapters are not served"),
    "vllm_xargs": (({},), "leave it out"),
}


def refuse_unserved(more: Mapping[str, Any] | None, served: frozenset[str] = frozenset()) -> None:
    """Raises InvalidArgument naming the first key of `more`, what a body has besides its own fields, that is known and
    asks for something."""
    for name, value in (more or {}).items():
        if value is None or name not in UNSERVED or name in served:
            continue
        nothing, instead = UNSERVED[name]
        if value not in nothing:
            raise InvalidArgument(f"{name} is not served; {instead}", field=name)
