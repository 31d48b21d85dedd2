"""The model's card and its tokenizer: `/v1/models`, `/tokenize`, `/detokenize`, `/tokenizer_info`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response

from jaxpd.errors import InvalidArgument
from jaxpd.tokenizer import Tokenizer
from serving.gateway import Gateway
from serving.http.errors import json_response
from serving.http.openai.asked import check_model, checked_messages
from serving.http.openai.schema import DetokenizeRequest, TokenizeRequest
from serving.messages import GenerateRequest
from serving.model import ServedModel


def make_router(gateway: Gateway) -> APIRouter:
    """All four; each needs the model to be loaded."""
    router = APIRouter(tags=["model"])
    created = int(time.time())

    @router.get("/v1/models")
    async def models() -> Response:
        """The served model, once for each of its names."""
        model = gateway.model
        return json_response(200, {"object": "list", "data": [_card(model, name, created) for name in model.names]})

    @router.get("/v1/models/{name:path}")
    async def model_card(name: str) -> Response:
        """One of them."""
        check_model(name, gateway.model)
        return json_response(200, _card(gateway.model, name, created))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Text or a chat as the token ids that a prompt of it would be."""
        model = gateway.model
        check_model(body.model, model)
        if body.prompt == "" and body.messages is None:  # nothing to serve, but something to count
            ids = tuple(tokenizer_of(model).encode("", add_special_tokens=body.add_special_tokens is not False))
        else:
            ids = await gateway.tokenize(_asked(body))
        answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            backend = tokenizer_of(model).backend
            answer["token_strs"] = [backend.id_to_token(i) for i in ids]
        return json_response(200, answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Token ids as text, special tokens included."""
        model = gateway.model
        check_model(body.model, model)
        if any(not 0 <= i < model.vocab_size for i in body.tokens):
            raise InvalidArgument(
                f"tokens holds an id outside the vocabulary 0..{model.vocab_size - 1}", field="tokens"
            )
        return json_response(200, {"prompt": tokenizer_of(model).decode(body.tokens, skip_special_tokens=False)})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What a client needs to use the tokenizer from afar."""
        model = gateway.model
        tokenizer = tokenizer_of(model)
        return json_response(
            200,
            {
                "tokenizer_class": type(tokenizer.backend.model).__name__,
                "vocab_size": model.vocab_size,
                "model_max_length": model.max_model_len,
                "chat_template": tokenizer.chat_template,
                "eos_token_ids": list(model.eos_token_ids),
                **tokenizer.special_tokens,
            },
        )

    return router


def tokenizer_of(model: ServedModel) -> Tokenizer:
    """Raises InvalidArgument for a model that speaks token ids only."""
    if model.tokenizer is None:
        raise InvalidArgument(f"{model.name} has no tokenizer; it takes and gives token ids only")
    return model.tokenizer


def _card(model: ServedModel, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxpd",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "has_chat_template": model.tokenizer is not None and model.tokenizer.has_chat_template,
    }


def _asked(body: TokenizeRequest) -> GenerateRequest:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("exactly one of prompt and messages is to be tokenized; give one of them", field="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise InvalidArgument(
                "add_special_tokens is for a prompt; the chat template writes a chat's own", field="add_special_tokens"
            )
        return GenerateRequest(
            chat=checked_messages(body.messages),
            tools=None if body.tools is None else tuple(body.tools),
            template_options={
                **(body.chat_template_kwargs or {}),
                **({} if body.add_generation_prompt is None else {"add_generation_prompt": body.add_generation_prompt}),
            }
            or None,
        )
    return GenerateRequest(text=body.prompt, add_special_tokens=body.add_special_tokens)
