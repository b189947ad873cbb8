"""Measured and computed quantities of notebook 09: bubbles, memory, losses, published numbers."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from course_kit.figures.pipeline.gantt import ROW, TIMES, TITLE, gantt, legend, rows_of
from course_kit.figures.style import GRAY, KINDS, MEMORY, PHASES, WIDTH, ink_on, styled
from course_lib.pipeline.simulation import Simulation

Points = Sequence[tuple[float, float]]


@styled
def links_and_traffic(bandwidth: dict[str, Points], kb: dict[str, float]) -> Figure:
    """Left: published bandwidths in GB/s by number of nodes, by collective. Right: KB per token and layer that ways of
    splitting a model send.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.9))
    for (name, points), color, width in zip(bandwidth.items(), KINDS, (1.5, 6, 1.5), strict=False):  # some coincide
        label = name.replace("_", "-")
        left.loglog(*zip(*points, strict=True), "o-", color=color, linewidth=width, markersize=4 + width, label=label)
    nodes = [int(count) for count, _ in next(iter(bandwidth.values()))]
    left.set_xticks(nodes, [str(count) for count in nodes])
    speeds = [speed for speed in (10, 20, 50, 100, 200, 400) if speed > 0.9 * min(each for _, each in points)]
    left.set_yticks(speeds, [str(speed) for speed in speeds])
    left.minorticks_off()
    left.set(xlabel="nodes of 8 H100s", ylabel="GB/s", title="256 MB, median (published)")
    left.legend()
    bars = right.barh(list(kb), list(kb.values()), color=PHASES["communication"])
    right.bar_label(bars, [f"{each:.3g} KB" for each in kb.values()], padding=3)
    right.set(
        xlabel="KB per token and layer (BF16)", xlim=(0, 1.3 * max(kb.values())), title="sent, forward and backward"
    )
    right.invert_yaxis()
    return figure


@styled
def busy_share(percent: dict[str, dict[int, float]]) -> Figure:
    """% of the time that the busiest rank of 1F1B works, by the number of stages; one panel per number of
    micro-batches.
    """
    figure, axes = plt.subplots(1, len(percent), figsize=(WIDTH, 2.4), sharey=True, squeeze=False)
    for panel, (title, by_stages) in zip(axes[0], percent.items(), strict=True):
        bars = panel.bar([str(p) for p in by_stages], list(by_stages.values()), color=KINDS[0])
        panel.bar_label(bars, [f"{each:.0f}%" for each in by_stages.values()])
        panel.set(xlabel="stages p", title=title, ylim=(0, 112))
    axes[0, 0].set_ylabel("% of the time busy")
    return figure


@styled
def peak_memory(micro_batches: Sequence[int], peaks: dict[str, Sequence[Sequence[float]]]) -> Figure:
    """Peak MiB of a step by schedule: of the fullest rank by the number of micro-batches, and by rank for the largest
    number. peaks: by schedule, for each rank one value per number of micro-batches.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.8), sharey=True)
    for (name, by_rank), color in zip(peaks.items(), (KINDS[2], KINDS[0]), strict=False):
        left.plot(micro_batches, [max(each) for each in zip(*by_rank, strict=True)], "o-", color=color, label=name)
        right.plot(range(len(by_rank)), [each[-1] for each in by_rank], "o-", color=color, label=name)
    left.set(xlabel="micro-batches m", ylabel="MiB at the peak", ylim=0, xticks=micro_batches, title="the fullest rank")
    right.set(xlabel="rank", xticks=range(len(by_rank)), title=f"each rank, m = {micro_batches[-1]}")
    left.legend()
    return figure


@styled
def memory_by_stages(gib: dict[int, dict[str, float]]) -> Figure:
    """GiB of the fullest rank by the number of stages, stacked by MEMORY's kinds."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.4))
    top, below = max(sum(each.values()) for each in gib.values()), [0.0] * len(gib)
    for kind in next(iter(gib.values())):
        values = [each[kind] for each in gib.values()]
        color = MEMORY[kind]
        bars = axes.bar([str(p) for p in gib], values, 0.6, below, color=color, edgecolor="white", label=kind)
        labels = [f"{each:.1f}" if each > 0.055 * top else "" for each in values]
        axes.bar_label(bars, labels, label_type="center", color=ink_on(color))
        below = [a + b for a, b in zip(below, values, strict=True)]
    for x, total in enumerate(below):
        axes.annotate(f"{total:.1f} GiB", (x, total), (0, 3), textcoords="offset points", ha="center")
    axes.set(xlabel="stages p", ylabel="GiB on the fullest rank", ylim=(0, 1.1 * top))
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1])
    return figure


@styled
def bubble_ratios(ratios: dict[tuple[int, int], float]) -> Figure:
    """The bubble over the work, by the number of micro-batches m and of stages per rank v; ratios: by (m, v)."""
    ms, vs = (sorted({key[i] for key in ratios}) for i in (0, 1))
    shades = LinearSegmentedColormap.from_list("bubble", ["white", "#333333"])
    figure, axes = plt.subplots(figsize=(0.75 * len(ms) + 1.2, 0.42 * len(vs) + 0.9))
    values = [[ratios.get((m, v), float("nan")) for m in ms] for v in vs]
    norm = LogNorm(0.7 * min(ratios.values()), max(ratios.values()))
    axes.pcolormesh(values, cmap=shades, norm=norm, edgecolors="white", linewidth=1)
    for (m, v), ratio in ratios.items():
        ink = ink_on(to_hex(shades(norm(ratio))))
        axes.text(ms.index(m) + 0.5, vs.index(v) + 0.5, f"{ratio:.2f}", ha="center", va="center", color=ink)
    axes.set_xticks([i + 0.5 for i in range(len(ms))], [str(m) for m in ms])
    axes.set_yticks([i + 0.5 for i in range(len(vs))], [str(v) for v in vs])
    axes.set(xlabel="micro-batches m", ylabel="stages per rank v")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


@styled
def searched(
    by_live: dict[int, float], by_hand: dict[str, tuple[int, float]], work: float, example: Simulation
) -> Figure:
    """Top: cost in ms of searched schedules by the micro-batches that a rank may hold, beside hand-made ones (held,
    cost); work: ms of the busiest rank. Bottom: one of the searched schedules.
    """
    rows = rows_of(example)
    low = ROW * len(rows) + TITLE
    figure, (axes, below) = plt.subplots(2, 1, figsize=(WIDTH, 2.8 + low + TIMES), height_ratios=(2.4, low))
    axes.plot(list(by_live), list(by_live.values()), "o-", color=KINDS[4], label="searched")
    for (name, (live, cost)), color, marker in zip(by_hand.items(), KINDS, "sD^", strict=False):
        axes.plot(live, cost, marker, color=color, markersize=8, label=name)
    axes.axhline(work, color=GRAY, linewidth=1, linestyle="--", label="work of the busiest rank")
    axes.set(xlabel="micro-batches that a rank may hold", ylabel="cost in ms", xticks=list(by_live))
    axes.legend()
    most = max(example.peaks)
    gantt(below, rows, f"searched, holds up to {most}: {example.cost:.0f} ms, of which {example.bubble:.0f} are bubble")
    below.set_xlabel("ms; numbers are micro-batches")
    legend(figure, rows)
    return figure


@styled
def losses(runs: dict[str, Sequence[float]]) -> Figure:
    """The loss by step of several runs, by letter: their dashes alternate, so that lines that coincide are all seen."""
    figure, axes = plt.subplots(figsize=(WIDTH, 2.8))
    for k, ((letter, values), color) in enumerate(zip(runs.items(), KINDS, strict=False)):
        dashes = (4 * k, (4, 4 * (len(runs) - 1)))
        axes.plot(range(1, len(values) + 1), values, color=color, linewidth=2.4, linestyle=dashes)
        axes.plot([], [], color=color, linewidth=2.4, label=letter)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    return figure


Exchanges = Sequence[tuple[str, float, float]]  # (F or B, start, end)


@styled
def pair_overlap(repeats: dict[str, tuple[dict[str, tuple[float, float]], Exchanges]]) -> Figure:
    """A forward and a backward, in ms, and their all-to-alls; repeats: by way of running them, (start, end) of F and B,
    and the (F or B, start, end) of each all-to-all.
    """
    figure, column = plt.subplots(len(repeats), 1, figsize=(WIDTH, 1.25 * len(repeats) + 0.5), sharex=True)
    names, colors = {"F": "forward", "B": "backward"}, {"F": PHASES["forward"], "B": PHASES["backward"]}
    for axes, (way, (spans, exchanges)) in zip(column, repeats.items(), strict=True):
        for y, kind in enumerate("BF"):
            start, end = spans[kind]
            axes.broken_barh([(start, end - start)], (y + 0.1, 0.8), color=colors[kind])
            waits = [(a, b - a) for lane, a, b in exchanges if lane == kind]
            axes.broken_barh(waits, (y + 0.1, 0.8), facecolor=PHASES["communication"], edgecolor="white")
        axes.set(yticks=(0.5, 1.5), yticklabels=[names[kind] for kind in "BF"], xlim=0)
        axes.set_title(f"{way}: {max(end for _, end in spans.values()):.0f} ms")
    column[-1].set_xlabel("ms on rank 0")
    parts = {"forward": "forward", "backward": "backward", "communication": "in an all-to-all"}
    handles = [Patch(color=PHASES[part], label=label) for part, label in parts.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


@styled
def bubble_rates(points: dict[str, Points]) -> Figure:
    """Published bubble rates (bubble over cost) against simulated ones, (simulated, published) by schedule."""
    figure, axes = plt.subplots(figsize=(5.6, 4.0))
    for (name, each), color, marker in zip(points.items(), KINDS, "os^Dx", strict=False):
        axes.plot(*zip(*each, strict=True), marker, color=color, label=name)
    high = 1.08 * max(value for each in points.values() for pair in each for value in pair)
    axes.plot((0, high), (0, high), color=GRAY, linewidth=1)
    axes.annotate("equal", (0.9 * high, 0.9 * high), (8, -10), textcoords="offset points", color=GRAY)
    axes.set(xlabel="simulated, equal times", ylabel="published, profiled times")
    axes.set(xlim=(-0.02 * high, high), ylim=(0, high), title="bubble rate, 16 to 32 stages")
    axes.legend()
    return figure
