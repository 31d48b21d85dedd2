"""Pictures for notebooks: where the time of one request went, and how full the meshes are.

    timeline(finished.timeline, token_times)    a bar a stage, and a closer look at the hand-off
    meshes(readings)                            every chip of every pool with its pages, and pages over time

Both return a `Picture`, which a notebook shows by itself. They need matplotlib: `pip install 'jaxpd[bench]'`.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpd.errors import FailedPrecondition, InvalidArgument
from jaxpd.life import Moment, Stage
from meshes.spec import parse_mesh_specs

if TYPE_CHECKING:
    from serving.proto.jaxpd.v1 import control_pb2

GREY, BLUE, ORANGE, GREEN, RED = "#999999", "#0072b2", "#e69f00", "#009e73", "#d55e00"  # told apart by every eye
EMPTY = "#eef1f4"
ROWS = {"queue": GREY, "prefill": BLUE, "transfer": ORANGE, "decode": GREEN}  # top to bottom
ROLES = {"prefill": BLUE, "decode": GREEN, "mixed": BLUE}
LABELLED = 12  # chunks that are told apart by number; more of them would be a blur
MAX_CELLS = 100  # squares in one chip; each stands for several pages where there are more
DPI = 80

Reading = tuple[float, "control_pb2.GetServerInfoResponse"]  # seconds since some start, and the server's answer then


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG."""

    png: bytes

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
    end = max([bar.to_s for bar in parts.bars] + tokens)
    near = _around_first_token(parts, tokens, end)
    figure = _figure((9, 4.6 if near else 2.6))
    axes = figure.subplots(2 if near else 1, 1, squeeze=False)[:, 0].tolist()
    _draw_life(axes[0], parts, tokens, (0.0, end), title or "One request, from arrival to its last token")
    if near:
        _draw_life(axes[1], parts, tokens, near, "The same, close to the first token")
    return _picture(figure)


def meshes(readings: Sequence[Reading]) -> Picture:
    """Every pool's chips with their pages at the busiest of the readings, and the pages in use over time.

    A reading is (seconds, what `Client.server_info()` returned). A row of chips is one replica: its chips hold the same
    pages, each its own share of the heads. Raises InvalidArgument without a reading of a server that is ready,
    FailedPrecondition without matplotlib.
    """
    ready = [(at_s, info.pools) for at_s, info in readings if info.pools]
    if not ready:
        raise InvalidArgument(
            "there is no reading of a ready server; take some with Client.server_info() while it answers",
            field="readings",
        )
    busiest_s, pools = max(ready, key=lambda reading: sum(_share(pool) for pool in reading[1]))
    figure = _figure((9, 5.6))
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2))
    widths = [_spec(pool)[0] for pool in pools]
    chip = 0
    for axis, pool in zip(top.subplots(1, len(pools), width_ratios=widths, squeeze=False)[0], pools, strict=True):
        chip = _draw_pool(axis, pool, chip)
    _draw_use(bottom.subplots(), ready, busiest_s)
    return _picture(figure)


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
    axis.set_title(_with_exposed(title, parts), fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _at(rows: Sequence[str], row: str, height: float) -> tuple[float, float]:
    return rows.index(row) - height / 2, height


def _draw_chunks(axis: Any, parts: Stretches, row: int, height: float, shown: tuple[float, float]) -> None:
    """A line where each chunk was dispatched, and its tokens where there is room to write."""
    last = max((bar.to_s for bar in parts.bars if bar.row == "prefill"), default=shown[1])
    starts = [at_s for at_s, _ in parts.chunks]
    for (at_s, tokens), next_s in zip(parts.chunks, [*starts[1:], last], strict=True):
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


def _spec(pool: Any) -> tuple[int, int]:
    (spec,) = parse_mesh_specs(pool.mesh, name=f"the {pool.role} mesh")
    return spec.tp, spec.dp


def _used(pool: Any) -> Iterator[tuple[int, int]]:
    """(pages in use, all pages) of each replica."""
    for free, total in zip(pool.free_pages, pool.total_pages, strict=True):
        yield total - free, total


def _share(pool: Any) -> float:
    replicas = list(_used(pool))
    return sum(used for used, _ in replicas) / max(1, sum(total for _, total in replicas))


def _draw_pool(axis: Any, pool: Any, first_chip: int) -> int:
    """The chips of a pool, a row a replica. Returns the number of the next chip."""
    from matplotlib.patches import FancyBboxPatch

    tp, dp = _spec(pool)
    for replica, (used, total) in enumerate(_used(pool)):
        for column in range(tp):
            axis.add_patch(
                FancyBboxPatch(
                    (column + 0.06, replica + 0.06),
                    0.88,
                    0.78,
                    boxstyle="round,pad=0,rounding_size=0.04",
                    facecolor="white",
                    edgecolor="#55606b",
                )
            )
            axis.text(column + 0.1, replica + 0.15, f"chip {first_chip + replica * tp + column}", fontsize=7)
            _draw_pages(axis, column, replica, used, total, ROLES.get(pool.role, GREY))
        axis.text(0.06, replica + 0.95, f"replica {replica}: {used} of {total} pages in use", fontsize=7, va="bottom")
    axis.set(xlim=(0, tp), ylim=(dp + 0.05, 0))
    axis.set_title(
        f"{pool.role} mesh {pool.mesh}: {tp}-way cut, {dp} replica{'s' * (dp != 1)}", fontsize=10, loc="left"
    )
    axis.axis("off")
    return first_chip + tp * dp


def _draw_pages(axis: Any, column: int, replica: int, used: int, total: int, color: str) -> None:
    each = -(-total // MAX_CELLS)
    cells, filled = -(-total // each), -(-used // each)
    across = max(1, min(cells, round((cells * 2.2) ** 0.5)))
    down = -(-cells // across)
    width, height = 0.8 / across, 0.6 / down
    xs = [column + 0.1 + (i % across) * width for i in range(cells)]
    ys = [replica + 0.2 + (i // across) * height for i in range(cells)]
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        axis.add_patch(_cell(x, y, width * 0.86, height * 0.86, color if i < filled else EMPTY))


def _cell(x: float, y: float, width: float, height: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color)


def _draw_use(axis: Any, readings: Sequence[tuple[float, Any]], busiest_s: float) -> None:
    """Pages in use over time, a line a pool."""
    times = [at_s for at_s, _ in readings]
    for i, pool in enumerate(readings[0][1]):
        used = [sum(pages for pages, _ in _used(pools[i])) for _, pools in readings]
        axis.step(times, used, where="post", color=ROLES.get(pool.role, GREY), label=f"{pool.role} {pool.mesh}")
    axis.axvline(busiest_s, color="black", linewidth=1, linestyle=":", label="the moment above")
    axis.set(xlabel="s", ylabel="pages in use", ylim=(0, None))
    axis.legend(fontsize=8, loc="upper right")
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
