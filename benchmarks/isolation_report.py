"""What benchmarks/isolation.py found, as a table and as a picture."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.isolation_load import GOOD, QUANTILES, goodput, verdicts
from jaxpd.errors import FailedPrecondition

AIM_OF_IDLE, AIM_OVER_BASELINE = 1.3, 5.0
SEPARATE, BASELINE = "separate", "interleaved"
LOOK = {  # as in benchmarks/modes.py
    "separate": ("#2a6fbb", "o"),
    "decoupled": ("#e07b39", "s"),
    "chunked": ("#4a9c5d", "^"),
    "interleaved": ("#8a5fb0", "D"),
}


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    about, load, rows = result["machine"], result["load"], result["medians"]
    cores = result["cores"]
    setups = list(dict.fromkeys(row["setup"] for row in rows))
    lines = [
        "# Isolation: chats decode while long prompts arrive",
        "",
        f"`{result['command']}`",
        f"on a {about['name']}, jax {about['packages']['jax']}, {about['date']}; load average at the start "
        f"{about['load_average_at_start'][0]:g}, other processes used {_others(rows)} cores meanwhile.",
        f"{load['chats']} chats of {load['chat_answer']} tokens, one behind the other in each stream; prompts of "
        f"{load['prompt']} tokens with answers of {load['prompt_answer']}, Poisson. `separate`: prefill worker on core "
        f"{_list(cores['prefill'])}, decode worker on core {_list(cores['decode'])}, router and load on "
        f"{_list(cores['front'])}; the others: one mixed worker on both.",
        f"Milliseconds, p50 / p99, medians over {max(row['round'] for row in result['rounds'])} rounds. SLO: chats "
        f"{' and '.join(load['chat_slo'])}, prompts {' and '.join(load['prompt_slo'])} (TTFT and TPOT).",
        "",
        "| setup | prompts/s | chats' ITL | longest | chat tokens/s | chats' TTFT | chats' TTST | prompts' TTFT | "
        "prompts' TTST | attainment |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        chats, prompts = row["chats"], row["prompts"]
        rate = "idle" if row["rate"] == 0 else f"{row['rate']:g}"
        cells = [
            row["setup"],
            rate,
            _two(row["itl_ms"]),
            _whole(row["itl_ms"]["max"]),
            f"{row['chat_tokens_per_s']:.1f}",
            _two(chats["ttft_ms"]),
            _two(chats["ttst_ms"]),
            _two(prompts["ttft_ms"]),
            _two(prompts["ttst_ms"]),
            "-" if row["attainment"] is None else f"{100 * row['attainment']:.0f} %",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| setup | goodput, prompts/s | failed requests |", "|---|---|---|"]
    for setup in setups:
        failed = sum(row[who]["failed"] for row in rows if row["setup"] == setup for who in ("chats", "prompts"))
        lines.append(f"| {setup} | {_goodput(*goodput(rows, setup))} | {failed} |")
    if {SEPARATE, BASELINE} <= set(setups):
        lines += ["", *_verdict_lines(rows)]
    return "\n".join([*lines, ""])


def _verdict_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"| prompts/s | `{SEPARATE}`: p99 ITL, of its own idle (aim <= {AIM_OF_IDLE:g}) | "
        f"`{BASELINE}` over `{SEPARATE}`, p99 ITL (aim >= {AIM_OVER_BASELINE:g}) |",
        "|---|---|---|",
    ]
    for found in verdicts(rows, SEPARATE, BASELINE):
        of_idle, over = found["of_idle"], found["baseline_over_isolated"]
        first = "-" if of_idle is None else f"{of_idle:.2f}{'' if of_idle <= AIM_OF_IDLE else ' (missed)'}"
        second = "-" if over is None else f"{over:.1f}{'' if over >= AIM_OVER_BASELINE else ' (missed)'}"
        lines.append(f"| {found['rate']:g} | {first} | {second} |")
    return lines


def _others(rows: Sequence[dict[str, Any]]) -> str:
    some = [row["cores_used"]["others"] for row in rows]
    return f"{min(some):.2f} to {max(some):.2f}"


def _list(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _two(found: dict[str, float | None]) -> str:
    return "-" if found["p50"] is None else f"{_whole(found['p50'])} / {_whole(found['p99'])}"


def _goodput(rate: float | None, missed: bool) -> str:
    if rate is None:
        return f"none: below {100 * GOOD:.0f} % without any prompt"
    return f"{rate:g}" if missed else f"{rate:g} or more"


def draw(result: dict[str, Any], stem: pathlib.Path) -> None:
    """Writes PNG and SVG beside each other. Nothing, with a word, where matplotlib is missing."""
    try:
        figure = _figure(result)
    except FailedPrecondition as error:
        print(f"no picture: {error}", file=sys.stderr)
        return
    figure.savefig(stem.with_suffix(".png"), dpi=120)
    figure.savefig(stem.with_suffix(".svg"))


def _figure(result: dict[str, Any]) -> Any:
    from serving.bench.plots import check

    check()
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    rows, about, load = result["medians"], result["machine"], result["load"]
    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    _by_rate(axes[0][0], rows, lambda row: row["itl_ms"], "Chats: gap between tokens, ms", log=True)
    _tail(axes[0][1], rows)
    _by_rate(
        axes[1][0], rows, lambda row: row["prompts"]["ttft_ms"], "Long prompts: time to first token, ms", log=False
    )
    _attainment(axes[1][1], rows)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LOOK), frameon=False)
    figure.suptitle(
        f"{load['chats']} chats decode while prompts of {load['prompt']} tokens arrive, two cores ({about['name']})"
    )
    return figure


def _by_rate(axis: Any, rows: Sequence[dict[str, Any]], value: Callable[[Any], Any], title: str, *, log: bool) -> None:
    for setup, (colour, marker) in LOOK.items():
        for share, alpha, width in (("p50", 0.4, 1.2), ("p99", 1.0, 2.0)):
            mine = [
                (row["rate"], value(row)[share])
                for row in rows
                if row["setup"] == setup and value(row)[share] is not None
            ]
            if mine:
                label = setup if share == "p99" else None
                style = {"color": colour, "marker": marker, "alpha": alpha, "linewidth": width, "label": label}
                axis.plot(*zip(*sorted(mine), strict=True), **style)
    axis.set(xlabel="prompts a second", title=f"{title}: p99, faint p50", xticks=sorted({row["rate"] for row in rows}))
    if log:
        from matplotlib.ticker import FuncFormatter, LogLocator  # type: ignore[import-not-found]

        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    else:
        axis.set_ylim(0, None)
    _plain(axis)


def _tail(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    """At the middle one of the loaded rates: the share of gaps that were longer."""
    rates = sorted({row["rate"] for row in rows} - {0})
    rate = rates[len(rates) // 2] if rates else 0
    for setup, (colour, _) in LOOK.items():
        for at, style in ((0, ":"), (rate, "-")):
            for row in rows:
                if (row["setup"], row["rate"]) == (setup, at) and row["gap_quantiles_ms"]:
                    longer = [100 - share for share in QUANTILES[:-1]]
                    axis.plot(row["gap_quantiles_ms"][:-1], longer, style, color=colour, linewidth=1.5)
    axis.set(xscale="log", yscale="log", xlabel="ms", ylabel="% of gaps that are longer", ylim=(0.1, 100))
    axis.set_title(f"Chats: gaps at {rate:g} prompts/s (dotted: idle)")
    _plain(axis)


def _attainment(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    for setup, (colour, marker) in LOOK.items():
        mine = [
            (row["rate"], 100 * row["attainment"])
            for row in rows
            if row["setup"] == setup and row["attainment"] is not None
        ]
        if mine:
            axis.plot(*zip(*sorted(mine), strict=True), color=colour, marker=marker, linewidth=2)
    axis.axhline(100 * GOOD, color="#999999", linestyle="--", linewidth=1)
    axis.set(xlabel="prompts a second", ylim=(-3, 103), xticks=sorted({row["rate"] for row in rows}))
    axis.set_title("Requests that kept their SLO, %")
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.grid(alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
