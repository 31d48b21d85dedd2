"""Pictures for notebooks: where the time of one request went, and how full the meshes are.

    timeline(finished.timeline, token_times)    a bar a stage, and a closer look at the hand-off
    meshes(readings)                            every chip of every pool with its pages, and pages over time
    live(url)                                   one such reading of a server

The first two return a `Picture`, which a notebook shows by itself. They need matplotlib: `pip install 'jaxpd[bench]'`.
"""

from __future__ import annotations

import dataclasses
import http.client
import io
import json
import os
import pathlib
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpd.errors import FailedPrecondition, InvalidArgument, Unavailable
from jaxpd.life import Moment, Stage

GREY, BLUE, ORANGE, GREEN, RED = "#999999", "#0072b2", "#e69f00", "#009e73", "#d55e00"  # told apart by every eye
EMPTY = "#eef1f4"
ROWS = {"queue": GREY, "prefill": BLUE, "transfer": ORANGE, "decode": GREEN}  # top to bottom
ROLES = {"prefill": (BLUE, "#a6cbe3"), "decode": (GREEN, "#a6dccb"), "mixed": (BLUE, "#a6cbe3")}  # filled, reserved
LABELLED = 12  # chunks that are told apart by number; more of them would be a blur
MAX_CELLS = 100  # squares in one chip; each stands for several pages where there are more
DPI = 80
LIVE_TIMEOUT_S = 10.0

Reading = tuple[float, Mapping[str, Any]]  # seconds since some start, and what `live` returned then


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG."""

    png: bytes = dataclasses.field(repr=False)

    def _repr_png_(self) -> bytes:
        return self.png

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file. Raises OSError."""
        pathlib.Path(path).write_bytes(self.png)


@dataclasses.dataclass(frozen=True)
class Bar:
    """One stretch of a request's life, in seconds since it arrived."""

    row: str
    from_s: float
    to_s: float


@dataclasses.dataclass(frozen=True)
class Stretches:
    """A request's life as bars. Chunks are (when one was dispatched, its tokens)."""

    bars: tuple[Bar, ...]
    exposed: tuple[Bar, ...]  # where the first token was out and the pages were still under way
    chunks: tuple[tuple[float, int], ...]
    first_token_s: float | None


def timeline(
    moments: Iterable[Moment | Mapping[str, Any]], token_times: Sequence[float] = (), *, title: str = ""
) -> Picture:
    """The bars of a request: queue, prefill with its chunks, transfer with the part that delayed it, decode.

    `moments` is the `timeline` of an answer, as gRPC's client or as JSON over HTTP gives it. `token_times` is when a
    client got each token, in seconds; the clocks are laid over one another at the first token. Raises InvalidArgument
    without moments (they have to be asked for), FailedPrecondition without matplotlib.
    """
    life = [_moment(moment) for moment in moments]
    if not life:
        raise InvalidArgument(
            'there is no timeline in this answer; ask for it with want_timeline=True (gRPC) or "timings": true (HTTP)',
            field="timeline",
        )
    parts = stretches(life)
    shift = token_times[0] - parts.first_token_s if token_times and parts.first_token_s is not None else 0.0
    tokens = [time - shift for time in token_times]
    end = max([bar.to_s for bar in parts.bars] + tokens + [1e-6])
    near = _around_first_token(parts, tokens, end)
    figure = _figure((9, 4.6 if near else 2.6))
    axes = figure.subplots(2 if near else 1, 1, squeeze=False)[:, 0].tolist()
    whole = title or "One request, from arrival to its last token"
    _draw_life(axes[0], parts, tokens, (0.0, end), whole if near else _with_exposed(whole, parts))
    if near:
        _draw_life(axes[1], parts, tokens, near, _with_exposed("The same, close to the first token", parts))
    return _picture(figure)


def meshes(readings: Sequence[Reading]) -> Picture:
    """Every pool's chips with their pages when most of them were filled, and the pages over time.

    A row of chips is one replica: its chips hold the same pages, each its own share of the heads. Raises
    InvalidArgument without a reading of a server that is ready, FailedPrecondition without matplotlib.
    """
    ready = [(at_s, _pools(snapshot)) for at_s, snapshot in readings if snapshot["pools"]]
    if not ready:
        raise InvalidArgument(
            "there is no reading of a ready server; take some with live() while it answers", field="readings"
        )
    shown_s, pools = max(ready, key=lambda reading: sum(pool.share for pool in reading[1]))
    above = 3.4 + 0.9 * max(0, max(pool.dp for pool in pools) - 2)  # inches
    figure = _figure((9, above + 2.2))
    top, bottom = figure.subfigures(2, 1, height_ratios=(above, 2.2))
    axes = top.subplots(1, len(pools), width_ratios=[pool.tp for pool in pools], squeeze=False)[0]
    chip = 0
    for axis, pool in zip(axes, pools, strict=True):
        chip = _draw_pool(axis, pool, chip)
    _draw_use(bottom.subplots(), ready, shown_s)
    return _picture(figure)


def live(url: str, *, api_key: str | None = None) -> dict[str, Any]:
    """What a server at `url` ("http://127.0.0.1:8000") does just now: its pools and sequences, as `GET /live` tells it.

    Raises Unavailable where nothing answers, or not with a reading.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url}/live", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=LIVE_TIMEOUT_S) as events:
            for line in events:
                if line.startswith(b"data:"):
                    return dict(json.loads(line.removeprefix(b"data:")))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"{url}/live gave no reading ({error}); is the server running, and has it a page?") from error
    raise Unavailable(f"{url}/live ended without a reading; the server is stopping")


def stretches(life: Sequence[Moment]) -> Stretches:
    """The bars of a life. What a preemption sent back waits in the queue row again."""
    bars: list[Bar] = []
    exposed: list[Bar] = []
    begun: dict[str, float] = {}
    first_token_s: float | None = None
    accepted = False

    def close(rows: Iterable[str], at_s: float) -> None:
        bars.extend(Bar(row, begun.pop(row), at_s) for row in tuple(rows) if row in begun)

    for moment in life:
        at_s = moment.at_s
        match moment.stage:
            case Stage.ARRIVED:
                begun["queue"] = at_s
            case Stage.ADMITTED:
                close(("queue",), at_s)
                begun["prefill"] = at_s
            case Stage.PREFILL_END:
                close(("prefill",), at_s)
                first_token_s = at_s if first_token_s is None else first_token_s
            case Stage.OFFERED:
                begun["transfer"] = at_s
            case Stage.ACCEPTED:
                close(("transfer",), at_s)
                accepted = True
            case Stage.DECODE_START:
                close(("prefill",), at_s)  # after a preemption there is no other end
                if accepted and first_token_s is not None and at_s > first_token_s:
                    exposed.append(Bar("transfer", first_token_s, at_s))
                accepted = False
                begun["decode"] = at_s
            case Stage.PREEMPTED:
                close(ROWS, at_s)
                begun["queue"] = at_s
            case Stage.FINISHED | Stage.FAILED:
                close(ROWS, at_s)
    close(ROWS, life[-1].at_s if life else 0.0)
    chunks = tuple((m.at_s, m.tokens) for m in life if m.stage is Stage.CHUNK)
    return Stretches(tuple(bars), tuple(exposed), chunks, first_token_s)


# -- the timeline


def _moment(given: Moment | Mapping[str, Any]) -> Moment:
    if isinstance(given, Moment):
        return given
    return Moment(Stage(given["stage"]), float(given["at_s"]), int(given.get("tokens", 0)))


def _around_first_token(parts: Stretches, tokens: Sequence[float], end: float) -> tuple[float, float] | None:
    """What the closer look shows; None where there is no hand-off, or where the whole is no longer than that."""
    first = parts.first_token_s
    handed_off = [bar for bar in parts.bars if bar.row == "transfer"]
    if first is None or not handed_off:
        return None
    after = [time for time in tokens if time > first][:3]
    until = max([bar.to_s for bar in handed_off + list(parts.exposed)] + after)
    wide = max(until - first, 0.02 * end)
    near = max(first - 1.5 * wide, 0.0), min(first + 1.2 * wide, end)
    return near if near[1] - near[0] < 0.8 * end else None


def _draw_life(axis: Any, parts: Stretches, tokens: Sequence[float], shown: tuple[float, float], title: str) -> None:
    rows = [row for row in ROWS if row != "transfer" or any(bar.row == row for bar in parts.bars)]
    height, low, high = 0.62, *shown
    for bar in parts.bars:
        axis.broken_barh([(bar.from_s, bar.to_s - bar.from_s)], _at(rows, bar.row, height), color=ROWS[bar.row])
    for bar in parts.exposed:
        axis.broken_barh(
            [(bar.from_s, bar.to_s - bar.from_s)],
            _at(rows, bar.row, height),
            facecolor=ORANGE,
            edgecolor=RED,
            hatch="////",
            linewidth=1,
        )
    _draw_chunks(axis, parts, rows.index("prefill"), height, shown)
    seen = [time for time in tokens if low <= time <= high]
    middle = rows.index("decode")
    axis.vlines(seen, middle - height / 2, middle + height / 2, color="white", linewidth=0.8)
    axis.vlines(seen, middle + height / 2, middle + height / 2 + 0.16, color=GREEN, linewidth=0.8)
    if parts.first_token_s is not None and low <= parts.first_token_s <= high:
        axis.axvline(parts.first_token_s, color="black", linewidth=1, linestyle=":")
        axis.annotate(
            "first token",
            (parts.first_token_s, -0.5),
            xytext=(4, -2),
            textcoords="offset points",
            va="top",
            fontsize=8,
        )
    axis.set(
        xlim=(low, high + (high - low) * 0.01), ylim=(len(rows) - 0.4, -0.55), xlabel="s since the request arrived"
    )
    axis.set_yticks(range(len(rows)), rows)
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _at(rows: Sequence[str], row: str, height: float) -> tuple[float, float]:
    return rows.index(row) - height / 2, height


def _draw_chunks(axis: Any, parts: Stretches, row: int, height: float, shown: tuple[float, float]) -> None:
    """A line where each chunk was dispatched, and its tokens where there is room to write."""
    last = max((bar.to_s for bar in parts.bars if bar.row == "prefill"), default=shown[1])
    starts = [at_s for at_s, _ in parts.chunks]
    for (at_s, tokens), next_s in zip(parts.chunks, [*starts[1:], last], strict=False):  # there may be none
        if not shown[0] <= at_s <= shown[1]:
            continue
        axis.vlines(at_s, row - height / 2, row + height / 2, color="white", linewidth=1)
        if len(starts) <= LABELLED and next_s - at_s > 0.05 * (shown[1] - shown[0]):
            middle = (at_s + min(next_s, shown[1])) / 2
            axis.text(middle, row, str(tokens), color="white", fontsize=8, ha="center", va="center")


def _with_exposed(title: str, parts: Stretches) -> str:
    if not parts.exposed:
        return title
    waited = sum(bar.to_s - bar.from_s for bar in parts.exposed)
    return f"{title} (hatched: it waited {1000 * waited:.3g} ms for its pages)"


# -- the meshes


@dataclasses.dataclass(frozen=True)
class _Replica:
    """Pages: `used` are those that sequences have, `filled` the part of them with KV in it."""

    filled: int
    used: int
    total: int


@dataclasses.dataclass(frozen=True)
class _Pool:
    role: str
    mesh: str
    tp: int
    dp: int
    replicas: tuple[_Replica, ...]

    @property
    def share(self) -> float:
        """How much of it is filled."""
        return self.filled / max(1, sum(replica.total for replica in self.replicas))

    @property
    def filled(self) -> int:
        return sum(replica.filled for replica in self.replicas)

    @property
    def used(self) -> int:
        return sum(replica.used for replica in self.replicas)


def _pools(snapshot: Mapping[str, Any]) -> list[_Pool]:
    filled: dict[tuple[int, int], int] = {}
    for sequence in snapshot["sequences"]:
        for pool, replica, _, pages in sequence["holds"]:
            filled[pool, replica] = filled.get((pool, replica), 0) + pages
    pools = []
    for i, pool in enumerate(snapshot["pools"]):
        replicas = []
        for r, replica in enumerate(pool["replicas"]):
            used = replica["total"] - replica["free"]
            replicas.append(
                _Replica(min(filled.get((i, r), 0), used), used, replica["total"])
            )  # shared ones count once
        pools.append(_Pool(pool["role"], pool["mesh"], pool["tp"], pool["dp"], tuple(replicas)))
    return pools


def _draw_pool(axis: Any, pool: _Pool, first_chip: int) -> int:
    """The chips of a pool, a row a replica. Returns the number of the next chip."""
    from matplotlib.patches import FancyBboxPatch

    for row, replica in enumerate(pool.replicas):
        for column in range(pool.tp):
            box = FancyBboxPatch(
                (column + 0.06, row + 0.06),
                0.88,
                0.78,
                boxstyle="round,pad=0,rounding_size=0.04",
                facecolor="white",
                edgecolor="#55606b",
            )
            axis.add_patch(box)
            axis.text(column + 0.1, row + 0.15, f"chip {first_chip + row * pool.tp + column}", fontsize=7)
            _draw_pages(axis, column, row, replica, ROLES.get(pool.role, (GREY, GREY)))
        words = f"replica {row}: {replica.filled} pages filled, {replica.used} reserved, of {replica.total}"
        axis.text(0.06, row + 0.95, words, fontsize=7, va="bottom")
    axis.set(xlim=(0, pool.tp), ylim=(pool.dp + 0.05, 0))
    cut = "whole layers" if pool.tp == 1 else f"layers cut over {pool.tp} chips"
    axis.set_title(f"{pool.role} mesh {pool.mesh}: {cut}", fontsize=10, loc="left")
    axis.axis("off")
    return first_chip + pool.tp * pool.dp


def _draw_pages(axis: Any, column: int, row: int, replica: _Replica, colors: tuple[str, str]) -> None:
    from matplotlib.patches import Rectangle

    each = max(1, -(-replica.total // MAX_CELLS))
    cells, filled, used = (-(-pages // each) for pages in (replica.total, replica.filled, replica.used))
    across = max(1, round((cells * 2.2) ** 0.5))
    down = max(1, -(-cells // across))
    width, height = 0.8 / across, 0.6 / down
    for i in range(cells):
        at = column + 0.1 + (i % across) * width, row + 0.2 + (i // across) * height
        color = colors[0] if i < filled else colors[1] if i < used else EMPTY
        axis.add_patch(Rectangle(at, width * 0.86, height * 0.86, facecolor=color))


def _draw_use(axis: Any, readings: Sequence[tuple[float, list[_Pool]]], shown_s: float) -> None:
    """Pages over time: filled ones of each pool as a line, reserved ones as a thin one above it."""
    times = [at_s for at_s, _ in readings]
    for i, pool in enumerate(readings[0][1]):
        color, light = ROLES.get(pool.role, (GREY, GREY))
        axis.step(times, [pools[i].used for _, pools in readings], where="post", color=light, linestyle="--")
        filled = [pools[i].filled for _, pools in readings]
        axis.step(times, filled, where="post", color=color, label=f"{pool.role} {pool.mesh}")
    axis.axvline(shown_s, color="black", linewidth=1, linestyle=":", label="the moment above")
    axis.set(xlabel="s", ylabel="pages filled\n(dashed: reserved)", ylim=(0, None))
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


# -- matplotlib


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FailedPrecondition(
            "pictures need the package matplotlib, which is not installed; pip install 'jaxpd[bench]'"
        ) from error
    return Figure(figsize=size, layout="constrained")


def _picture(figure: Any) -> Picture:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return Picture(file.getvalue())
