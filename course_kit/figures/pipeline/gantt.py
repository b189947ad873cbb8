"""Gantt charts of pipeline schedules: one row of colored actions per rank, simulated or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from course_kit.figures.style import LIGHT, PHASES, WIDTH, ink_on, styled
from course_lib.pipeline.actions import Overlapped
from course_lib.pipeline.schedules import schedule_by_name
from course_lib.pipeline.simulation import Simulation, simulate

COLORS = {
    "F": PHASES["forward"],
    "B": PHASES["backward"],
    "I": PHASES["backward"],
    "W": PHASES["weight gradient"],
}
MEANING = {"F": "forward", "B": "backward", "I": "I: gradient of the input", "W": "W: gradient of the weights"}
ROW, TITLE, TIMES = 0.24, 0.32, 0.45  # inches: of a rank, of a title, of the axis of time
MARK, SECOND = "#27313A", "second stage of the rank"  # a strip below a bar, and what it says
DIGIT = 8  # points: the size of the micro-batches' numbers
Spans = Sequence[Sequence[tuple[str, int, int, float, float]]]  # (kind, stage, micro-batch, start, end) by rank


class Bar(NamedTuple):
    """One action in a Gantt chart."""

    kind: str  # F, B, I or W
    label: str
    start: float
    end: float
    marked: bool = False  # by a dark strip
    pair: tuple[float, float] | None = None  # start and end of the overlapped pair to which it belongs


def gantt(axes: Axes, rows: Sequence[Sequence[Bar]], title: str = "", end: float | None = None) -> None:
    """Draw the bars of each rank, rank 0 on top, from time 0 to `end` (None: the last bar's). A label is written where
    its bar is wide enough for it.
    """
    end = max(bar.end for row in rows for bar in row) if end is None else end
    figure = axes.get_figure(root=True)
    assert figure is not None
    points = 72 * 0.88 * figure.get_figwidth() / end  # per unit of time
    for y, row in zip(reversed(range(len(rows))), rows, strict=True):
        edge = 0.6 if points * min((bar.end - bar.start for bar in row), default=end) > 3 else 0.2
        spans = [(bar.start, bar.end - bar.start) for bar in row]
        colors = [COLORS[bar.kind] for bar in row]
        axes.broken_barh(spans, (y + 0.05, 0.9), facecolors=colors, edgecolor="white", linewidth=edge)
        marked = [span for span, bar in zip(spans, row, strict=True) if bar.marked]
        axes.broken_barh(marked, (y + 0.05, 0.15), facecolor=MARK, edgecolor="white", linewidth=edge)
        pairs = [(start, stop - start) for start, stop in sorted({bar.pair for bar in row if bar.pair})]
        axes.broken_barh(pairs, (y + 0.05, 0.9), facecolor="none", edgecolor="black", linewidth=1.2)
        for bar, (_, width), color in zip(row, spans, colors, strict=True):
            if width * points > 0.64 * DIGIT * len(bar.label) + 0.5 and bar.end <= end:
                text = axes.text((bar.start + bar.end) / 2, y + 0.51, bar.label, ha="center", va="center_baseline")
                text.set(fontsize=DIGIT, color=ink_on(color), clip_on=True, in_layout=False)
    axes.set(xlim=(0, end), ylim=(0, len(rows)), title=title, facecolor=LIGHT)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [f"rank {rank}" for rank in reversed(range(len(rows)))])
    axes.tick_params(axis="y", length=0)


def rows_of(result: Simulation, entered: int | None = None) -> list[list[Bar]]:
    """Return the bars of a simulation by rank. The stages of a rank after its first one are marked; with `entered`,
    micro-batches below it are marked instead. The two actions of an overlapped pair are drawn in sequence.
    """
    plain = [(a.kind, end - start) for row in result.timeline for a, start, end in row if type(a) is not Overlapped]
    forward = min((length for kind, length in plain if kind == "F"), default=0)
    rows = []
    for row in result.timeline:
        bars: list[Bar] = []
        second: tuple[float, float] | None = None
        for action, start, end in row:
            begin, stop, pair = start, end, second
            if isinstance(action, Overlapped):
                pair = start, end
                stop = start + min(forward, (end - start) / 2)
            elif second:
                begin = bars[-1].end
            second = pair if isinstance(action, Overlapped) else None
            _, stage, i = action
            marked = stage >= len(result.schedule) if entered is None else i < entered
            bars.append(Bar(action.kind, str(i), begin, stop, marked, pair))
        rows.append(bars)
    return rows


def measured_rows(spans: Spans, entered: int | None = None) -> list[list[Bar]]:
    """Return the bars of measured spans by rank, marked as in rows_of, from the first start on."""
    zero = min(start for row in spans for *_, start, _ in row)
    return [
        [
            Bar(kind, str(i), start - zero, end - zero, stage >= len(spans) if entered is None else i < entered)
            for kind, stage, i, start, end in row
        ]
        for row in spans
    ]


def legend(figure: Figure, rows: Sequence[Sequence[Bar]], marked: str = SECOND) -> None:
    """Say above the charts what the colors, the marks and the outlines of these bars mean."""
    bars = [bar for row in rows for bar in row]
    kinds = [kind for kind in COLORS if any(bar.kind == kind for bar in bars)]
    if "B" in kinds and "I" in kinds:  # one color
        kinds.remove("I")
        names = {**MEANING, "B": "backward, or I: gradient of the input"}
    else:
        names = MEANING
    handles: list[Artist] = [Patch(facecolor=COLORS[kind], label=names[kind]) for kind in kinds]
    handles.append(Patch(facecolor=LIGHT, label="waits"))
    if any(bar.marked for bar in bars):
        handles.append(Line2D([], [], color=MARK, linewidth=3, label=marked))
    if any(bar.pair for bar in bars):
        handles.append(Patch(facecolor="none", edgecolor="black", label="pair"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), columnspacing=1.2, handlelength=1.2)


def charts(rows: Mapping[str, Sequence[Sequence[Bar]]], unit: str, marked: str = SECOND) -> Figure:
    """Return one Gantt chart per title, below one another, on one axis of time from 0 on."""
    height = sum(ROW * len(each) + TITLE for each in rows.values()) + TIMES + 0.15
    figure, column = plt.subplots(
        len(rows), 1, figsize=(WIDTH, height), sharex=True, squeeze=False, height_ratios=[len(r) for r in rows.values()]
    )
    end = max(bar.end for each in rows.values() for row in each for bar in row)
    for axes, (title, each) in zip(column[:, 0], rows.items(), strict=True):
        gantt(axes, each, title, end)
    axes.set_xlabel(unit)
    legend(figure, [row for each in rows.values() for row in each], marked)
    return figure


def held(result: Simulation) -> str:
    """Return how many micro-batches the fullest rank holds, in words."""
    most = max(result.peaks)
    return f"holds up to {most} micro-batch{'es' if most > 1 else ''}"


@styled
def simulated(results: dict[str, Simulation]) -> Figure:
    """Simulated schedules by name, each with its bubble, its cost and the micro-batches that a rank holds."""
    names = {name: f"{name}: bubble {each.bubble:g} of {each.cost:g}, {held(each)}" for name, each in results.items()}
    return charts({names[name]: rows_of(each) for name, each in results.items()}, "time; numbers are micro-batches")


@styled
def simulated_and_measured(timed: dict[str, tuple[Simulation, Spans]]) -> Figure:
    """Schedules by name, each simulated and, below it, measured in ms; see labs.pipeline.timed."""
    rows = {}
    for name, (result, spans) in timed.items():
        busy = max(sum(end - start for *_, start, end in row) for row in spans)
        span = max(row[-1][-1] - row[0][-2] for row in spans)
        share = float(result.bubble / result.cost)
        rows[f"{name}, simulated: bubble {share:.0%} of {result.cost:.0f} ms"] = rows_of(result)
        rows[f"{name}, measured: bubble {1 - busy / span:.0%} of {span:.0f} ms"] = measured_rows(spans)
    return charts(rows, "ms; numbers are micro-batches")


@styled
def two_directions(result: Simulation, spans: Spans) -> Figure:
    """DualPipe, simulated and measured in ms; what enters at rank 0 is marked, overlapped pairs are outlined."""
    half = (1 + max(action.micro_batch for row in result.schedule for action in row)) // 2
    span = max(row[-1][-1] - row[0][-2] for row in spans)
    rows = {
        f"simulated: bubble {result.bubble:.0f} of {result.cost:.0f} ms": rows_of(result, half),
        f"measured: {span:.0f} ms": measured_rows(spans, half),
    }
    return charts(rows, "ms; numbers are micro-batches", "entered at rank 0")


@styled
def naive_step(spans: Sequence[Sequence[tuple[str, float, float]]]) -> Figure:
    """The times when each rank computes in the naive step: (F or B, start, end) by rank, in ms."""
    bars = [[Bar(kind, "", start, end) for kind, start, end in row] for row in spans]
    last = max(bar.end for row in bars for bar in row)
    busy = sum(bar.end - bar.start for row in bars for bar in row) / len(bars) / last
    return charts({f"the {len(bars)} ranks are busy for {busy:.0%} of the time": bars}, "ms")


TIME_LIMIT, RANK_LIMIT = 150, 6  # of the chart of any_schedule, whose axes stay the same


@styled
def any_schedule(
    name: str, p: int = 4, m: int = 8, v: int = 2, t_f: float = 2, t_i: float = 2, t_w: float = 2, t_comm: float = 0
) -> Figure:
    """A schedule simulated, on axes that are the same for all arguments (up to 6 ranks and a time of 150).

    name: one of SCHEDULES in any case, or "interleaved, depth first" or "interleaved, breadth first" with v stages per
    rank; t_f, t_i, t_w: of one micro-batch on one rank, divided among its stages. Raises ValueError for sizes that the
    schedule refuses.
    """
    kind, _, order = name.lower().partition(",")
    schedule = schedule_by_name(kind, p, m, v, m if "breadth" in order else None)
    per_rank = (1 + max(action.stage for row in schedule for action in row)) / p
    result = simulate(schedule, t_f / per_rank, t_i / per_rank, t_w / per_rank, t_comm)
    entered = m // 2 if kind == "dualpipe" else None
    rows = rows_of(result, entered)
    figure, axes = plt.subplots(figsize=(WIDTH, ROW * RANK_LIMIT + TITLE + TIMES + 0.2))
    late = "" if result.makespan <= TIME_LIMIT else ", to the right of this chart"
    most = max(result.peaks) / per_rank
    title = (
        f"{name}: bubble {result.bubble / result.cost:.0%} of {result.cost:g}, all done at {result.makespan:g}{late}"
    )
    gantt(axes, rows, f"{title}; holds up to {most:g} micro-batches", TIME_LIMIT)
    axes.set(ylim=(p - RANK_LIMIT, p), xlabel="time; numbers are micro-batches")
    axes.set_facecolor("none")
    waits = Rectangle((0, 0), result.makespan, p, facecolor=LIGHT, zorder=0)
    axes.add_patch(waits)
    legend(figure, rows, SECOND if entered is None else "entered at rank 0")
    return figure
