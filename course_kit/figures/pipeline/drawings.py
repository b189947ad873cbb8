"""Drawings of notebook 09: the cut, a deadlock, P2PBuffers, orders of work, a backward in two halves."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from course_kit.figures.pipeline.gantt import charts, rows_of
from course_kit.figures.style import GRAY, LIMIT, PHASES, RANKS, WIDTH, ink_on, readable, styled
from course_lib.pipeline.schedules import Schedule, interleaved, num_stages, one_f_one_b, zero_bubble_h1
from course_lib.pipeline.simulation import simulate

SENT = PHASES["communication"]


def tile(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """Draw a filled rectangle with its lower left corner at (x, y), and a text in its middle."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white"))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink_on(color))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = "black", **style) -> None:
    """Draw an arrow between two points; style: of its line, or its connectionstyle."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color, "lw": 1.2, **style})


def canvas(width: float, height: float, inches: float) -> tuple[Figure, Axes]:
    """Return a figure and axes without lines, of this size in data units."""
    figure, axes = plt.subplots(figsize=(WIDTH, inches))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


@styled
def cut_by_layers(cuts: dict[int, Sequence[range]], layers: int) -> Figure:
    """The embedding, layers and head of each stage; cuts: the stages' ranges of layers, by number of stages."""
    figure, axes = canvas(layers + 4, len(cuts), 0.4 * len(cuts) + 0.1)
    for y, (stages, ranges) in zip(reversed(range(len(cuts))), cuts.items(), strict=True):
        axes.text(1.75, y + 0.5, f"{stages} stages", ha="right", va="center")
        for stage, of_stage in enumerate(ranges):
            items = [i + 1 for i in of_stage] + [0] * (stage == 0) + [layers + 1] * (stage == stages - 1)
            for item in items:
                name = {0: "emb.", layers + 1: "head"}.get(item, str(item - 1))
                tile(axes, item + 2, y + 0.08, 1, 0.84, name, RANKS[stage])
            end = 2 + max(items) + 1
            axes.plot((end, end), (y, y + 1), color="white", linewidth=4)  # between stages
    return figure


@styled
def deadlock() -> Figure:
    """Two ranks that send first and receive afterwards: each send waits for a receive that comes after the other's."""
    figure, axes = canvas(16, 5.2, 2.3)
    for rank, y in ((0, 3.3), (1, 0.5)):
        axes.text(1.7, y + 0.6, f"rank {rank}", ha="right", va="center")
        sent, received = ("F1", "B0") if rank == 0 else ("B0", "F1")
        kind, phase = ("F", "forward") if rank == 0 else ("B", "backward")
        tile(axes, 2, y, 1.6, 1.2, f"{kind}{1 - rank}", PHASES[phase])
        tile(axes, 3.7, y, 5.4, 1.2, f"send {sent}: not received yet", SENT)
        axes.add_patch(Rectangle((9.2, y), 5.4, 1.2, facecolor="none", edgecolor=GRAY, linestyle="--"))
        axes.text(11.9, y + 0.6, f"receive {received}: after the send", ha="center", va="center", color=GRAY)
    arrow(axes, (7.4, 3.25), (10.6, 1.75), LIMIT)
    arrow(axes, (7.4, 1.75), (10.6, 3.25), LIMIT)
    axes.text(10.4, 2.5, "waits for", ha="left", va="center", color=LIMIT)
    arrow(axes, (2, 0.15), (14, 0.15), GRAY)
    axes.text(14.2, 0.15, "time", va="center", color=GRAY)
    return figure


@styled
def p2p_buffers() -> Figure:
    """The way of a hidden state from F of stage 0 on rank 0 to F of stage 1 on rank 1, through both P2PBuffers."""
    figure, axes = canvas(20, 8.4, 3.4)
    for x, rank in ((0.2, 0), (10.6, 1)):
        frame = FancyBboxPatch((x, 0.4), 9.0, 7.6, boxstyle="round,pad=0,rounding_size=0.3", facecolor="none")
        frame.set_edgecolor(RANKS[rank])
        axes.add_patch(frame)
        axes.text(x + 0.3, 7.5, f"rank {rank}, stage {rank}", va="center", weight="bold")
    tile(axes, 0.7, 5.3, 3.2, 1.3, "run(F 0, 2)", PHASES["forward"])
    tile(axes, 15.9, 5.3, 3.2, 1.3, "run(F 1, 2)", PHASES["forward"])
    for x, name, key in ((0.7, "outgoing", '("F", 1, 2): tensor'), (13.5, "incoming", '("F", 1, 2): work, tensor')):
        axes.add_patch(Rectangle((x, 1.0), 5.6, 2.0, facecolor="none", edgecolor="black"))
        axes.text(x + 0.15, 2.5, name, va="center", weight="bold")
        axes.text(x + 0.15, 1.6, key, va="center")
    arrow(axes, (2.3, 5.3), (2.3, 3.05))
    axes.text(2.6, 4.2, 'post_send("F", 1, 2, out)', va="center")
    arrow(axes, (17.5, 3.05), (17.5, 5.3))
    axes.text(17.2, 4.2, 'wait_recv("F", 1, 2)', va="center", ha="right")
    arrow(axes, (6.35, 2.0), (13.45, 2.0), SENT, lw=2.5)
    axes.text(
        9.9,
        2.75,
        "start(index)\non both ranks",
        ha="center",
        va="center",
        color=readable(SENT),
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axes.text(
        9.9,
        1.35,
        "isend · irecv",
        ha="center",
        va="center",
        color=readable(SENT),
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    return figure


def side_by_side(schedules: dict[str, Schedule], labels: Sequence[str]) -> Figure:
    """Return Gantt charts of two schedules in which F, I and W of all stages of a rank take 1, with a label for each
    rank of the second one.
    """
    rows = {}
    for name, schedule in schedules.items():
        result = simulate(schedule, *[len(schedule) / num_stages(schedule)] * 3)
        rows[f"{name}: bubble {result.bubble:g}, all done at {result.makespan:g}"] = rows_of(result)
    figure = charts(rows, "time; numbers are micro-batches")
    names = [f"rank {rank}: {label}" for rank, label in enumerate(labels)]
    figure.axes[-1].set_yticklabels(names[::-1])
    return figure


@styled
def interleaved_order() -> Figure:
    """1F1B and interleaved (depth first, two stages per rank) for 3 ranks and 6 micro-batches, simulated: F 1, B 2."""
    schedules = {"1F1B": one_f_one_b(3, 6), "interleaved, v = 2": interleaved(3, 6, 2)}
    return side_by_side(schedules, [f"{3 + 2 * (2 - rank)} F ahead" for rank in range(3)])


@styled
def delayed_weight_gradients() -> Figure:
    """1F1B and ZB-H1 for 3 ranks and 4 micro-batches, simulated: F, I and W take 1."""
    schedules = {"1F1B": one_f_one_b(3, 4), "ZB-H1": zero_bubble_h1(3, 4)}
    return side_by_side(schedules, [f"{2 - rank} F ahead, W {rank} late" for rank in range(3)])


@styled
def backward_in_two_halves() -> Figure:
    """Forward, I and W of an MLP with two matrices, and which of them waits for which."""
    figure, axes = canvas(11.2, 3.0, 2.6)
    for k, name in enumerate(("W₁", "SwiGLU", "W₂")):
        x = 2.6 * k + 2.2
        tile(axes, x, 2.2, 1.6, 0.6, name, PHASES["forward"])
        tile(axes, x, 1.2, 1.6, 0.6, f"I of {name}", PHASES["backward"])
        arrow(axes, (x - 0.95, 2.5), (x - 0.05, 2.5))
        arrow(axes, (x + 2.55, 1.5), (x + 1.65, 1.5))
        if name != "SwiGLU":
            tile(axes, x, 0.2, 1.6, 0.6, f"W of {name}", PHASES["weight gradient"])
            arrow(axes, (x + 2.1, 1.45), (x + 1.5, 0.83), GRAY)
    arrow(axes, (9.05, 2.5), (9.95, 2.5))
    axes.text(1.15, 2.5, "x", va="center", ha="right")
    axes.text(10.05, 2.5, "y", va="center")
    axes.text(10.05, 1.5, "dy", va="center")
    arrow(axes, (2.15, 1.5), (1.25, 1.5))
    axes.text(1.15, 1.5, "dx, to the\nstage before", va="center", ha="right")
    axes.text(9.2, 0.5, "no arrow leaves a W:\nnothing waits for it", va="center")
    return figure
