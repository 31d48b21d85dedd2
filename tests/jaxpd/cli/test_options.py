"""Sizes, token ids and addresses as a person types them."""

from __future__ import annotations

import pytest

from jaxpd.cli.options import flag_of, parse_address, parse_logit_bias, parse_size, parse_token_ids
from jaxpd.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", 1048576),
        ("512MiB", 512 * 1024**2),
        ("2GiB", 2 * 1024**3),
        ("2 gib", 2 * 1024**3),
        ("1.5KiB", 1536),
        ("3GB", 3 * 1000**3),
        ("7B", 7),
        ("1TiB", 1024**4),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "1GiBs", "2G", "1.GiB", "1e9", "GiB", "1 2"])
def test_bad_sizes_name_the_flag_the_value_and_the_cure(text: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_size(text)
    assert f"--kv-memory {text} " in str(error.value) and "512MiB" in str(error.value)
    assert error.value.field == "kv_memory"


def test_logit_biases_are_pairs() -> None:
    assert parse_logit_bias("50:-100, 7:2.5,8:1e1") == {50: -100.0, 7: 2.5, 8: 10.0}
    for text in ("50", "50:", ":1", "a:1", "50:x", "5:1;6:1", ""):
        with pytest.raises(InvalidArgument, match="--logit-bias: .* is not ID:BIAS"):
            parse_logit_bias(text)


def test_token_ids() -> None:
    assert parse_token_ids("504,3575, 282") == (504, 3575, 282)
    assert parse_token_ids("-1") == (-1,)  # parsed here, refused by the engine, which knows the vocabulary


@pytest.mark.parametrize("text", ["", "1,,2", "1;2", "1,x", "1.5"])
def test_bad_token_ids(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--prompt-ids: .* is not a token id"):
        parse_token_ids(text)


def test_bad_token_ids_name_the_flag_that_they_came_with() -> None:
    with pytest.raises(InvalidArgument, match="--stop-token-ids: 'x' is not a token id") as error:
        parse_token_ids("1,x", flag="--stop-token-ids")
    assert error.value.field == "stop_token_ids"


def test_flags_of_fields() -> None:
    """As the help names them: seconds are not part of a flag's name."""
    names = {"reserve_tokens": "--reserve-tokens", "step_timeout_s": "--step-timeout", "max_num_seqs": "--max-num-seqs"}
    assert {field: flag_of(field) for field in names} == names


@pytest.mark.parametrize("text", ["127.0.0.1:50051", "localhost:1", "[::1]:65535", "tpu-host.example:50051"])
def test_addresses(text: str) -> None:
    assert parse_address(text) == text


@pytest.mark.parametrize("text", ["localhost", ":50051", "host:", "host:0", "host:65536", "host:http", "host:-1"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--server .* must be HOST:PORT"):
        parse_address(text)
