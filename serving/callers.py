"""Who may ask, and how much at once: API keys, their owners and their limits.

    key file or --api-key -> Keys.find(token) -> Caller -> Quotas.take ... give back

Keys are kept as SHA-256 digests only. A token is compared with every one of them in constant time, so that neither a
log, a memory dump nor a stopwatch tells more than yes or no.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import pathlib
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxpd.errors import InvalidArgument, ResourceExhausted, Unauthenticated
from jaxpd.request import check_salt

RETRY_AFTER_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caller:
    """The owner of a key. Limits are of what is in flight at one time; `tokens` counts prompt + max_tokens x n."""

    name: str
    max_requests: int | None = None
    max_tokens: int | None = None


ANYONE = Caller(name="")  # where no keys are asked for, and for callers in this process


class Keys:
    """The keys of a server; without any, everybody is ANYONE."""

    def __init__(self, keys: Mapping[str, Caller]) -> None:
        self._callers = [(_digest(key), caller) for key, caller in keys.items()]
        self.refused = 0  # how often somebody came without one of them

    @property
    def required(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._callers)

    def find(self, token: str | None) -> Caller:
        """Whose key `token` is ("Bearer" stripped already). Raises Unauthenticated, which never repeats the token."""
        if not self._callers:
            return ANYONE
        if not token:
            self.refused += 1
            raise Unauthenticated("an API key is needed; send it as the header `authorization: Bearer KEY`")
        digest, found = _digest(token), None
        for known, caller in self._callers:  # all of them, always
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            self.refused += 1
            raise Unauthenticated("the API key is not one of this server's")
        return found


def bearer(header: str | None) -> str | None:
    """The token of an `authorization` header; None without one or for another scheme."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def salted_by(caller: Caller, cache_salt: str) -> str:
    """A salt for the prefix cache that no other caller can ask for, whatever the names are. Raises InvalidArgument for
    one that is too long."""
    check_salt(cache_salt)
    return _digest(repr((caller.name, cache_salt))).hex()


def load_keys(path: pathlib.Path | None, keys: Iterable[str] = ()) -> Keys:
    """Keys from a TOML file and from `--api-key`. The file has one table a caller:

        [alice]
        key = "..."
        max_requests = 8       # in flight; leave out for no limit
        max_tokens = 100000    # prompt + max_tokens x n of what is in flight

    Raises InvalidArgument naming the file, the caller and what is wrong, never a key.
    """
    callers: dict[str, Caller] = {}
    for index, key in enumerate(keys):
        _add(callers, key, Caller(name=f"key{index}"), "--api-key")
    if path is not None:
        for name, table in _read(path).items():
            where = f"--api-key-file {path}: [{name}]"
            if not name or not name.isprintable():
                raise InvalidArgument(
                    f"--api-key-file {path}: [{name!r:.60}] must have a name of printable characters",
                    field="api_key_file",
                )
            if any(caller.name == name for caller in callers.values()):
                raise InvalidArgument(
                    f"{where} is the name of a key from --api-key; give it another one", field="api_key_file"
                )
            if not isinstance(table, dict):
                raise InvalidArgument(f'{where} must be a table with `key = "..."`', field="api_key_file")
            if unknown := sorted(set(table) - {"key", "max_requests", "max_tokens"}):
                raise InvalidArgument(
                    f"{where} holds {unknown[0]}; known are key, max_requests and max_tokens", field="api_key_file"
                )
            caller = Caller(
                name=name,
                max_requests=_limit(table, "max_requests", where),
                max_tokens=_limit(table, "max_tokens", where),
            )
            _add(callers, table.get("key"), caller, where)
    return Keys(callers)


class Quotas:
    """What every caller has in flight. Used on one event loop."""

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}
        self._tokens: dict[str, int] = {}

    def take(self, caller: Caller, tokens: int) -> None:
        """Counts a request. Raises InvalidArgument for one that is too large, ResourceExhausted for one too many."""
        if caller.max_tokens is not None and tokens > caller.max_tokens:
            raise InvalidArgument(
                f"the request may take {tokens} tokens (prompt + max_tokens x n), the limit of key {caller.name!r} is "
                f"{caller.max_tokens}; lower max_tokens",
                field="max_tokens",
            )
        requests, running = self._requests.get(caller.name, 0), self._tokens.get(caller.name, 0)
        if caller.max_requests is not None and requests >= caller.max_requests:
            raise ResourceExhausted(
                f"{requests} requests of key {caller.name!r} are in flight, its limit is {caller.max_requests}; "
                "wait for one of them",
                retry_after_s=RETRY_AFTER_S,
            )
        if caller.max_tokens is not None and running + tokens > caller.max_tokens:
            raise ResourceExhausted(
                f"requests of key {caller.name!r} in flight may take {running} tokens and this one {tokens}, the limit "
                f"is {caller.max_tokens}; wait for one of them",
                retry_after_s=RETRY_AFTER_S,
            )
        self._requests[caller.name] = requests + 1
        self._tokens[caller.name] = running + tokens

    def give_back(self, caller: Caller, tokens: int) -> None:
        """The request of such a `take` has ended."""
        self._requests[caller.name] -= 1
        self._tokens[caller.name] -= tokens
        if not self._requests[caller.name]:
            del self._requests[caller.name], self._tokens[caller.name]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _add(callers: dict[str, Caller], key: Any, caller: Caller, where: str) -> None:
    if not isinstance(key, str) or not key.isascii() or not key.isprintable() or not key.strip() or " " in key:
        raise InvalidArgument(f"{where} needs a key of visible ASCII characters, without spaces", field="api_key")
    if key in callers:
        raise InvalidArgument(f"{where} has the same key as [{callers[key].name}]; give each its own", field="api_key")
    callers[key] = caller


def _limit(table: Mapping[str, Any], field: str, where: str) -> int | None:
    value = table.get(field)
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidArgument(f"{where}: {field} = {value!r} must be a whole number from 1 on", field="api_key_file")
    return value


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"--api-key-file {path} cannot be read: {error.strerror}", field="api_key_file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = getattr(error, "lineno", None)  # the text of a parse error may quote the line, and with it a key
        raise InvalidArgument(
            f"--api-key-file {path} is not TOML{f', line {where}' if where else ''}", field="api_key_file"
        ) from None
