"""Pictures of pipeline schedules: one line of colored actions per rank, simulated or measured."""

from __future__ import annotations

import io

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_kit.figures.style import LIGHT, PHASES
from course_lib.pipeline import simulation
from course_lib.pipeline.actions import Overlapped
from course_lib.pipeline.schedules import schedule_by_name
from course_lib.pipeline.simulation import Simulation

COLORS = {
    "F": PHASES["forward"],
    "B": PHASES["backward"],
    "I": PHASES["backward"],
    "W": PHASES["weight gradient"],
}
INK = {"W": "black"}  # of the numbers; else white
Bar = tuple[str, bool, str, float, float]  # kind of the action, hatched or not, label, start, end


def gantt(ax: Axes, rows: list[list[Bar]], title: str = "", numbers: bool = True, unit: str = "") -> None:
    """Draw the bars of each rank, one line per rank, rank 0 on top. numbers: write the labels into the bars, which must
    be wide enough; without labels the white edges are thin.
    """
    for rank, row in enumerate(rows):
        y = len(rows) - 1 - rank
        for hatched in (False, True):
            bars = [(kind, start, end) for kind, hatch, _, start, end in row if hatch == hatched]
            with plt.rc_context({"hatch.linewidth": 0.4}):  # lighter than the digits
                ax.broken_barh(
                    [(start, end - start) for _, start, end in bars],
                    (y + 0.06, 0.88),
                    facecolors=[COLORS[kind] for kind, *_ in bars],
                    edgecolor="white",
                    linewidth=0.4 if numbers else 0.1,
                    hatch="///" if hatched else None,
                    snap=None if numbers else False,  # a bar below a pixel is pale, not gone
                )
        for kind, hatch, word, start, end in row if numbers else ():
            background = {"facecolor": COLORS[kind], "edgecolor": "none", "pad": 1.2} if hatch else None
            ink = INK.get(kind, "white")
            center = (start + end) / 2, y + 0.5
            ax.text(*center, word, ha="center", va="center", fontsize=6, color=ink, bbox=background, in_layout=False)
    last = max(end for row in rows for *_, end in row)
    first = min(start for row in rows for *_, start, _ in row)
    ax.set(xlim=(first, last), ylim=(0, len(rows)), yticks=[i + 0.5 for i in range(len(rows))], title=title)
    ax.set_yticklabels([f"rank {rank}" for rank in reversed(range(len(rows)))])
    ax.set_facecolor(LIGHT)
    ax.set_xlabel(unit)


def bars_of(actions: list, ranks: int) -> list[Bar]:
    """Return the bars of one rank's (kind, stage, micro-batch, start, end): stages beyond the first of each rank
    hatched.
    """
    return [(kind, stage >= ranks, str(i), start, end) for kind, stage, i, start, end in actions]


def rows_of(simulation: Simulation) -> list[list[Bar]]:
    """Return the bars of a simulation, by rank."""
    ranks = len(simulation.schedule)
    return [bars_of([(*action, start, end) for action, start, end in row], ranks) for row in simulation.timeline]


def draw_timed(timed: dict[str, tuple[Simulation, list]]) -> Figure:
    """Return a figure of each schedule, by name, simulated and below it measured; see labs.pipeline.timed."""
    fig, axes = plt.subplots(2 * len(timed), 1, figsize=(7.8, 2.5 * len(timed)))
    for k, (name, (result, real)) in enumerate(timed.items()):
        busy = max(sum(end - start for *_, start, end in row) for row in real)
        span = max(row[-1][-1] - row[0][-2] for row in real)
        share = float(result.bubble / result.cost)
        gantt(axes[2 * k], rows_of(result), f"{name}, simulated: bubble {share:.0%} of {result.cost:.0f} ms")
        rows = [bars_of(row, len(real)) for row in real]
        gantt(axes[2 * k + 1], rows, f"{name}, measured: bubble {1 - busy / span:.0%} of {span:.0f} ms")
    axes[-1].set_xlabel("ms; numbers are micro-batches")
    fig.tight_layout()
    return fig


def draw_two_ways(simulation: Simulation, real: list, m: int) -> Figure:
    """Draw DualPipe simulated, with the two actions of a pair in sequence, and measured; hatched: enters at rank 0."""
    simulated = []
    for row in simulation.timeline:
        drawn = []
        for k, (action, begin, finish) in enumerate(row):
            middle = begin + (finish - begin) / 3  # a forward is a third of a pair
            is_first = isinstance(action, Overlapped)
            is_second = not is_first and k > 0 and isinstance(row[k - 1][0], Overlapped)
            start, end = middle if is_second else begin, middle if is_first else finish
            drawn.append((action.kind, action.micro_batch < m // 2, str(action.micro_batch), start, end))
        simulated.append(drawn)
    rows = [[(kind, i < m // 2, str(i), start, end) for kind, _, i, start, end in row] for row in real]
    fig, axes = plt.subplots(2, 1, figsize=(7.8, 3.4))
    gantt(axes[0], simulated, f"simulated: bubble {simulation.bubble:.0f} of {simulation.cost:.0f} ms")
    span = max(row[-1][-1] - row[0][-2] for row in real)
    gantt(axes[1], rows, f"measured: {span:.0f} ms", unit="ms; hatched: enters at rank 0; plain: enters at rank 3")
    fig.tight_layout()
    return fig


def schedule_png(name: str, p: int, m: int, v: int, *times: float) -> bytes:
    """Return an image of the schedule of that name, simulated; if there is no such schedule, of the reason.

    times: t_f, t_i, t_w, t_comm; name: one of SCHEDULES in any case, "interleaved, depth first" or "…, breadth first".
    """
    fig, ax = plt.subplots(figsize=(7.8, 0.8 + 0.32 * p))
    try:
        kind, _, order = name.lower().partition(",")
        result = simulation.simulate(schedule_by_name(kind, p, m, v, m if "breadth" in order else None), *times)
        most = max(result.peaks)
        done = f"all done at {result.makespan:.0f}, holds up to {most} pass{'es' if most > 1 else ''}"
        title = f"{name}: bubble {result.bubble / result.cost:.0%} of {result.cost:.0f}, {done}"
        gantt(ax, rows_of(result), title, numbers=p * m <= 64)
    except ValueError as error:
        ax.text(0.5, 0.5, str(error), ha="center", va="center")
        ax.axis("off")
    png = io.BytesIO()
    fig.savefig(png, format="png", bbox_inches="tight")
    plt.close(fig)
    return png.getvalue()
