"""What an answer has to match, from the four flags that say so."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from jaxpd.errors import InvalidArgument, NotFound
from jaxpd.structured import CHOICE, GRAMMAR, JSON_SCHEMA, REGEX, StructuredOutput

FLAGS = {JSON_SCHEMA: "--json-schema", REGEX: "--regex", CHOICE: "--choice", GRAMMAR: "--grammar"}


def from_flags(
    json_schema: str | None, regex: str | None, choices: Sequence[str] | None, grammar: pathlib.Path | None
) -> StructuredOutput | None:
    """None where none is given. `json_schema` is a schema, or the path of a file that holds one.

    Raises InvalidArgument for more than one, and NotFound or InvalidArgument for a file that cannot be read.
    """
    values = {JSON_SCHEMA: json_schema, REGEX: regex, CHOICE: choices or None, GRAMMAR: grammar}
    given = [kind for kind, value in values.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgument(
            f"{' and '.join(FLAGS[kind] for kind in given)} cannot go together: an answer matches one thing; give one "
            "of them",
            field="structured",
        )
    if json_schema is not None:
        inline = json_schema.lstrip().startswith("{")  # a schema that is of use is an object
        text = (
            json_schema if inline else _read(pathlib.Path(json_schema), JSON_SCHEMA, ', or write {"type": ...} itself')
        )
        return StructuredOutput(kind=JSON_SCHEMA, text=text)
    if regex is not None:
        return StructuredOutput(kind=REGEX, text=regex)
    if choices:
        return StructuredOutput(kind=CHOICE, choices=tuple(choices))
    if grammar is not None:
        return StructuredOutput(kind=GRAMMAR, text=_read(grammar, GRAMMAR))
    return None


def _read(path: pathlib.Path, kind: str, cure: str = "") -> str:
    flag = FLAGS[kind]
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"{flag} {path} does not exist; give the path of a file{cure}", field="structured") from None
    except OSError as error:
        raise InvalidArgument(f"{flag} {path} cannot be read: {error.strerror}", field="structured") from None
    except ValueError as error:
        raise InvalidArgument(f"{flag} {path} is not UTF-8 text: {error}", field="structured") from None
