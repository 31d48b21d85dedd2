"""Ids of tool calls, under which a client sends back what its tool answered."""

from __future__ import annotations

import secrets
import string

_LETTERS = string.ascii_letters + string.digits


def new_call_id(*, short: bool) -> str:
    """A random id; `short` ones have nine letters and digits, which Mistral's templates insist on."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9)) if short else f"call_{secrets.token_hex(12)}"
