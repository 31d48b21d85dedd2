"""benchmarks/routing.py on a small trace in Mooncake's format: its tables, its files, its errors."""

from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks.routing import main
from jaxpd.policies.routing import POLICIES
from jaxpd.routing.loads import conversations


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> pathlib.Path:
    """60 requests of conversations that share system prompts."""
    ids: dict[bytes, int] = {}
    path = tmp_path / "small.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for arrival in conversations(60, rate=2.0):
            blocks = [ids.setdefault(key, len(ids)) for key in arrival.keys]
            if arrival.prompt_tokens % 512:
                blocks.append(10**6 + len(ids) * 1000 + len(blocks))  # its last block is not full
            row = {
                "timestamp": round(1000 * arrival.at_s),
                "input_length": arrival.prompt_tokens,
                "output_length": arrival.answer_tokens,
                "hash_ids": blocks,
            }
            file.write(json.dumps(row) + "\n")
    return path


def test_a_row_for_each_policy_and_a_table_for_each_rate(
    trace: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(trace), "--rate", "1,4", "--prefill", "3", "--decode", "2", "--output", str(tmp_path / "out")])
    result = json.loads((tmp_path / "out" / "routing-small.json").read_text(encoding="utf-8"))
    assert list(result["rates"]) == ["1", "4"]
    for one in result["rates"].values():
        assert list(one["policies"]) == list(POLICIES)
        assert all(numbers["requests"] == 60 and numbers["failed"] == 0 for numbers in one["policies"].values())
    assert result["rates"]["1"]["policies"]["kv_aware"]["hit_rate"] > 0.3
    text = (tmp_path / "out" / "routing-small.md").read_text(encoding="utf-8")
    assert text.count("| kv_aware |") == 2 and str(tmp_path) not in text
    assert "ttft_estimate" in capsys.readouterr().out


def test_a_load_can_be_made_up_and_policies_picked(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--conversations", "50", "--policies", "kv_aware"])
    shown = capsys.readouterr().out
    assert "kv_aware" in shown and "round_robin" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a TRACE.jsonl or --conversations N"),
        (["--conversations", "5", "--policies", "best"], "--policies best do not exist; there are random"),
        (["--conversations", "5", "--rate", "fast"], "--rate fast must be numbers above 0"),
        (["--conversations", "5", "--decode", "0"], "must each be at least 1"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_trace_without_blocks_says_so(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,10,5\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no block ids"):
        main([str(path)])
    with pytest.raises(SystemExit, match="Mooncake's traces are at"):
        main([str(tmp_path / "missing.jsonl")])
