"""The prompts that flags and prompt files give."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from jaxpd.cli.prompts import Prompt, from_file, from_flags
from jaxpd.errors import InvalidArgument, JaxpdError, NotFound


def write(folder: pathlib.Path, content: Any) -> pathlib.Path:
    path = folder / "prompts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_each_flag_gives_one_prompt() -> None:
    assert from_flags("hi", None, None, None)[0].value == "hi"
    assert from_flags("", None, None, None)[0].value == ""  # empty is for the engine to refuse, not "not given"
    assert from_flags(None, "1,2", None, None)[0].value == (1, 2)
    assert from_flags(None, None, "hi", None)[0].value == ({"role": "user", "content": "hi"},)


def test_exactly_one_flag() -> None:
    with pytest.raises(InvalidArgument, match="exactly one of --prompt, .*; got none"):
        from_flags(None, None, None, None)
    with pytest.raises(InvalidArgument, match="got --prompt and --chat"):
        from_flags("a", None, "b", None)


def test_the_three_forms_in_order(tmp_path: pathlib.Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(tmp_path, [{"prompt_ids": [5, 6]}, {"text": "Hello"}, {"chat": chat}])
    assert [p.value for p in from_flags(None, None, None, path)] == [(5, 6), "Hello", tuple(chat)]


def test_an_object_with_prompts_whose_ids_win_over_their_text(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, {"sha256": "x", "prompts": [{"label": "short", "text": "The", "prompt_ids": [504]}]})
    (prompt,) = from_file(path)
    assert prompt.token_ids == (504,) and prompt.text is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("not json", "is not JSON"),
        ([], "at least one prompt"),
        ({"prompt": []}, "must hold a list of prompts"),
        ("3", "must hold a list of prompts"),
        ([{"text": "a"}, "b"], "prompt 1 must be an object"),
        ([{"ids": [1]}], "prompt 0 must be an object with one of prompt_ids, text, chat"),
        ([{"prompt_ids": "12"}], "prompt_ids must be a list of whole numbers"),
        ([{"prompt_ids": [1, 2.0]}], "prompt_ids must be a list of whole numbers"),
        ([{"prompt_ids": [True]}], "prompt_ids must be a list of whole numbers"),
        ([{"text": ["a"]}], "text must be a string"),
        ([{"chat": "hi"}], "chat must be a list of messages"),
        ([{"chat": ["hi"]}], "chat must be a list of messages"),
    ],
)
def test_bad_files_name_the_file_and_what_is_wrong(tmp_path: pathlib.Path, content: Any, says: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InvalidArgument) as error:
        from_file(path)
    assert str(path) in str(error.value) and says in str(error.value)


def test_files_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        from_file(tmp_path / "none.json")
    with pytest.raises(JaxpdError, match="cannot be read: Is a directory"):
        from_file(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'[{"text": "\xe9"}]')
    with pytest.raises(InvalidArgument, match="is not JSON"):
        from_file(tmp_path / "latin.json")


def test_a_prompt_without_anything_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="p is empty"):
        _ = Prompt("p").value
