"""Keys and their limits."""

from __future__ import annotations

import hmac
import pathlib
from collections.abc import Callable

import pytest

from jaxpd.errors import InvalidArgument, ResourceExhausted, Unauthenticated
from serving import callers
from serving.callers import ANYONE, Caller, Keys, Quotas, bearer, load_keys, salted_by

ALI = Caller(name="ali", max_requests=2, max_tokens=100)
Write = Callable[[str], pathlib.Path]


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Write:
    def write_(text: str) -> pathlib.Path:
        path = tmp_path / "keys.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_


def test_keys_from_both_places(write: Write) -> None:
    path = write('[ali]\nkey = "sesame"\nmax_requests = 2\nmax_tokens = 100\n["m. erlin"]\nkey = "abra"\n')
    keys = load_keys(path, ["first", "second"])
    assert keys.required
    assert keys.find("sesame") == ALI and keys.find("abra") == Caller(name="m. erlin")
    assert keys.find("first") == Caller(name="key0") and keys.find("second") == Caller(name="key1")


def test_without_keys_everybody_may_come() -> None:
    keys = load_keys(None)
    assert not keys.required and keys.find(None) is ANYONE and keys.find("whatever") is ANYONE


@pytest.mark.parametrize("token", [None, ""])
def test_no_key(token: str | None) -> None:
    with pytest.raises(Unauthenticated, match="an API key is needed; send it as .* `authorization: Bearer KEY`"):
        Keys({"sesame": ALI}).find(token)


@pytest.mark.parametrize("token", ["sesam", "sesamee", "Sesame", " sesame", "sesame\x00", "\ud800", "é" * 10_000])
def test_a_wrong_key_is_not_repeated(token: str) -> None:
    with pytest.raises(Unauthenticated, match="is not one of this server's") as caught:
        Keys({"sesame": ALI}).find(token)
    assert token.strip() not in caught.value.message


def test_every_key_is_compared_whether_one_has_matched_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys({name: Caller(name=name) for name in "abcdef"})
    compared: list[bytes] = []
    really = hmac.compare_digest

    def compare(known: bytes, given: bytes) -> bool:
        assert len(known) == len(given) == 32, "digests, which tell no length of a key"
        compared.append(known)
        return really(known, given)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for token in ("a", "f"):
        keys.find(token)
        assert len(compared) == 6
        compared.clear()
    with pytest.raises(Unauthenticated):
        keys.find("x")
    assert len(compared) == 6


def test_keys_are_kept_as_digests() -> None:
    keys = load_keys(None, ["sesame"])
    assert b"sesame" not in b"".join(digest for digest, _ in keys._callers) and "sesame" not in repr(vars(keys))


@pytest.mark.parametrize(
    "header, token",
    [
        ("Bearer k", "k"),
        ("bearer  k ", "k"),
        ("BEARER k", "k"),
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic k", None),
        ("k", None),
        ("Bearer a b", "a b"),
    ],
)
def test_bearer(header: str | None, token: str | None) -> None:
    assert bearer(header) == token


@pytest.mark.parametrize(
    "text, said",
    [
        ('[""]\nkey = "secret"', r"must have a name of printable characters"),
        ('["a\\n"]\nkey = "secret"', r"must have a name of printable characters"),
        ("[ali]\nkey = 'secret'\nkey = 'secret'", r"is not TOML"),
        ("[ali\nkey = 'secret'", r"is not TOML"),
        ("ali = 'secret'", r"\[ali\] must be a table"),
        ("[ali]\nmax_requests = 2", r"\[ali\] needs a key of visible ASCII"),
        ("[ali]\nkey = 5", r"\[ali\] needs a key"),
        ("[ali]\nkey = ''", r"\[ali\] needs a key"),
        ("[ali]\nkey = 'a secret'", r"\[ali\] needs a key"),
        ("[ali]\nkey = 'secrét'", r"\[ali\] needs a key"),
        ("[ali]\nkey = 'secret'\nlimit = 3", r"\[ali\] holds limit; known are key, max_requests and max_tokens"),
        ("[ali]\nkey = 'secret'\nmax_requests = 0", r"\[ali\]: max_requests = 0 must be a whole number from 1"),
        ("[ali]\nkey = 'secret'\nmax_tokens = 1.5", r"\[ali\]: max_tokens = 1.5 must be"),
        ("[ali]\nkey = 'secret'\nmax_tokens = true", r"\[ali\]: max_tokens = True must be"),
        ("[ali]\nkey = 'secret'\n[bo]\nkey = 'secret'", r"\[bo\] has the same key as \[ali\]"),
    ],
)
def test_files_that_cannot_be(write: Write, text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--api-key-file .*{said}") as caught:
        load_keys(write(text))
    assert "secr" not in caught.value.message


def test_files_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidArgument, match="--api-key-file .*none cannot be read: No such file"):
        load_keys(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="--api-key-file .* cannot be read: Is a directory"):
        load_keys(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="is not TOML"):
        load_keys(tmp_path / "binary")


def test_keys_on_the_command_line() -> None:
    for keys in (["with space"], [""], ["nl\n"]):
        with pytest.raises(InvalidArgument, match="--api-key needs a key of visible ASCII"):
            load_keys(None, keys)
    with pytest.raises(InvalidArgument, match=r"--api-key has the same key as \[key0\]") as caught:
        load_keys(None, ["sesame", "sesame"])
    assert "sesame" not in caught.value.message


def test_names_do_not_clash_with_those_of_the_command_line(write: Write) -> None:
    with pytest.raises(InvalidArgument, match=r"\[key0\] is the name of a key"):
        load_keys(write("[key0]\nkey = 'other'"), ["sesame"])


def test_quotas_of_requests() -> None:
    quotas = Quotas()
    quotas.take(ALI, 10)
    quotas.take(ALI, 10)
    with pytest.raises(ResourceExhausted, match="2 requests of key 'ali' are in flight, its limit is 2") as caught:
        quotas.take(ALI, 10)
    assert caught.value.retry_after_s == callers.RETRY_AFTER_S
    quotas.take(Caller(name="bo", max_requests=1), 10)
    quotas.give_back(ALI, 10)
    quotas.take(ALI, 10)


def test_quotas_of_tokens() -> None:
    quotas = Quotas()
    quotas.take(ALI, 60)
    with pytest.raises(ResourceExhausted, match="in flight may take 60 tokens and this one 41, the limit is 100"):
        quotas.take(ALI, 41)
    quotas.take(ALI, 40)
    quotas.give_back(ALI, 60)
    quotas.give_back(ALI, 40)
    with pytest.raises(InvalidArgument, match="may take 101 tokens .* key 'ali' is 100; lower max_tokens"):
        quotas.take(ALI, 101)
    quotas.take(ALI, 100)
    quotas.give_back(ALI, 100)
    assert quotas._requests == quotas._tokens == {}, "nothing is kept of who has nothing in flight"


def test_salts_of_different_callers_never_meet() -> None:
    asked = [("a", "b c"), ("a b", "c"), ("a", ""), ("", "a"), ("", ""), ("a' ", "b"), ("a", "' b")]
    salts = {salted_by(Caller(name=name), salt) for name, salt in asked}
    assert len(salts) == len(asked) and all(len(salt) == 64 for salt in salts)
    assert salted_by(ALI, "x") == salted_by(ALI, "x")
    salted_by(ALI, "x" * 256)
    with pytest.raises(InvalidArgument, match="cache_salt has 257 characters, the limit is 256"):
        salted_by(ALI, "x" * 257)
