"""Structured output, as a request asks for it: what the text of the answer has to match.

    json_object   any JSON object
    json_schema   JSON that a JSON schema accepts; `text` is the schema
    regex         all of the text matches a regular expression in Rust's notation (no look-around, no back-references);
                  \\d means 0 to 9, and \\w and \\s go by Unicode
    choice        one of `choices`
    grammar       a context-free grammar in Lark's notation, as llguidance reads it; its start rule is `start`

What is checked here needs nothing but the standard library; `jaxpd.grammar` compiles it.

From the one to the device goes a mask a row, one bit a token, in int32 words: token t is bit t % 32 of word t // 32, so
that the sign bit is the last token of its word.
"""

from __future__ import annotations

import dataclasses
import json

from jaxpd.errors import InvalidArgument

JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, GRAMMAR = "json_object", "json_schema", "regex", "choice", "grammar"
KINDS = (JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, GRAMMAR)

# bytes of UTF-8; an expression of 4,096 optional letters compiles in 0.6 s, and the time grows with the square
MAX_BYTES = {JSON_SCHEMA: 64 << 10, REGEX: 8 << 10, CHOICE: 64 << 10, GRAMMAR: 64 << 10}
MAX_CHOICES = 1000
MAX_LEVELS = 100  # of a schema, objects and arrays in one another; llguidance reads 127

WORD = 32  # tokens in a word of a mask
EVERYTHING = -1  # a word that allows all of its tokens

_TOO_DEEP = f"is nested deeper than {MAX_LEVELS} levels; use $ref for more"
_SHOWN = 80  # characters of a value in a message


def mask_words(padded_vocab: int) -> int:
    """How many words the mask of a vocabulary has."""
    return -(-padded_vocab // WORD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """What an answer has to match. `text` belongs to json_schema, regex and grammar, `choices` to choice."""

    kind: str
    text: str = ""
    choices: tuple[str, ...] = ()

    def validate(self) -> None:
        """Raises InvalidArgument naming field, value, limit and cure. What only a compiler can see is left to it."""
        if self.kind not in KINDS:
            raise InvalidArgument(
                f"structured_output.kind={shortened(self.kind)} must be one of {', '.join(KINDS)}",
                field="structured_output.kind",
            )
        if self.kind == CHOICE:
            self._validate_choices()
        elif self.choices:
            self._fail("choices", f"holds {len(self.choices)} strings but kind={self.kind} takes none; use kind=choice")
        if self.kind in (JSON_OBJECT, CHOICE):
            if self.text:
                self._fail("text", f"must be empty for kind={self.kind}; leave it out")
            return
        if not self.text:
            self._fail("text", f"must not be empty for kind={self.kind}; give the {self.kind.replace('_', ' ')}")
        self._check_size("text", (self.text,))
        if self.kind == JSON_SCHEMA:
            self._validate_schema()

    def _validate_choices(self) -> None:
        if not 1 <= len(self.choices) <= MAX_CHOICES:
            self._fail(
                "choices", f"holds {len(self.choices)} strings, it must be 1 to {MAX_CHOICES}; use a regex for more"
            )
        if "" in self.choices:
            self._fail("choices", "holds an empty string, which would end the answer before it begins; leave it out")
        self._check_size("choices", self.choices)

    def _check_size(self, field: str, strings: tuple[str, ...]) -> None:
        try:
            size = sum(len(string.encode("utf-8")) for string in strings)
        except UnicodeEncodeError:
            self._fail(field, "holds half of a surrogate pair, which is no character; leave it out")
        if size > MAX_BYTES[self.kind]:
            self._fail(
                field,
                f"has {size} bytes, the limit for kind={self.kind} is {MAX_BYTES[self.kind]}; "
                "leave out what is not needed, such as descriptions",
            )

    def _validate_schema(self) -> None:
        try:
            schema = json.loads(self.text)
        except RecursionError:
            self._fail("text", _TOO_DEEP)
        except ValueError as error:
            self._fail("text", f"must be a JSON schema as JSON, but it does not parse: {error}; check its quotes")
        if not isinstance(schema, dict):
            self._fail("text", 'must be a JSON object, such as {"type": "object"}')
        if _levels(schema, most=MAX_LEVELS) > MAX_LEVELS:
            self._fail("text", _TOO_DEEP)

    def _fail(self, field: str, what: str) -> None:
        value = "" if field == "choices" else f"={shortened(self.text)}"
        raise InvalidArgument(f"structured_output.{field}{value} {what}", field=f"structured_output.{field}")


def _levels(value: object, *, most: int) -> int:
    """How many objects and arrays stand in one another, counted to `most` + 1; without recursion."""
    layer, depth = [value], 0
    while depth <= most:
        parts = [inner for part in layer if isinstance(part, dict) for inner in part.values()]
        parts += [inner for part in layer if isinstance(part, list) for inner in part]
        if not any(isinstance(part, dict | list) for part in layer):
            break
        layer, depth = parts, depth + 1
    return depth


def shortened(value: object, most: int = _SHOWN) -> str:
    """`repr` of a value for a message, its middle left out when it is long."""
    shown = repr(value)
    return shown if len(shown) <= most else f"{shown[: most // 2]}...{shown[-most // 2 :]}"
