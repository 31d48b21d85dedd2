"""What benchmarks/handoff_remote.py found, as tables."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any


def table(about: dict[str, Any], rows: Sequence[dict[str, Any]], command: str, *, in_flight: int) -> str:
    """The speeds, in Markdown; without rows no more than the head."""
    where = f"a {about['name']}, jax {about['packages']['jax']}, {about['date']}"
    lines = ["# The hand-off between two processes", "", f"`{command}` on {where}."]
    if not rows:
        return "\n".join([*lines, ""])
    lines += [
        f"Other processes used {about['cores_used_by_other_processes']} cores meanwhile. Medians; {in_flight} pulls in",
        "flight. `remote` contains the control messages and the copies to other head slots, the others do not (see the",
        "script).",
        "",
        "| meshes | MB a piece | pieces | remote GB/s | transfer | tcp | share of transfer (range) | of tcp |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates, shares = row["gb_s"], row["shares_of_transfer"]
        share = f"{row['share_of_transfer']:.2f} ({min(shares):.2f} to {max(shares):.2f})"
        lines.append(
            f"| {row['meshes']} | {row['piece_mb']:.1f} | {row['pieces']} | {rates['remote']:.2f} | "
            f"{rates['transfer']:.2f} | {rates['tcp']:.2f} | {share} | {row['share_of_tcp']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def exposed_table(model: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The exposed shares, in Markdown."""
    lines = [
        f"Through workers of {pathlib.Path(model).name}, prefill and decode on a core of their own each, and a router;",
        "one request at a time, medians.",
        "",
        "| prompt tokens | TTFT ms | TTST ms | transfer ms | exposed ms | exposed share of TTST (range) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = row["exposed_shares"]
        lines.append(
            f"| {row['prompt']} | {row['ttft_ms']:.0f} | {row['ttst_ms']:.0f} | {row['transfer_ms']:.0f} | "
            f"{row['exposed_ms']:.1f} | {100 * row['exposed_share']:.1f} % "
            f"({100 * min(shares):.1f} to {100 * max(shares):.1f} %) |"
        )
    return lines
