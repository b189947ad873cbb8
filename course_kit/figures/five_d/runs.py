"""Figures of runs: pairs of techniques against one process, bytes per token, a log, a slow rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, NullLocator

from course_kit.figures.style import GRAY, KINDS, LIGHT, LIMIT, WIDTH, ink_on, styled


@styled
def pairs_of_techniques(differences: Mapping[tuple[str, str], float | str], limit: float = 1e-5) -> Figure:
    """Draw how far each pair of techniques is from one process after a step, as a triangle of squares.

    differences: relative differences by pair, or the reason why there is no layout. limit: the largest difference
    that float32 explains.
    """
    names = list(dict.fromkeys(name for pair in differences for name in pair))
    figure, axes = plt.subplots(figsize=(6.2, 3.6))
    for (one, other), off in differences.items():
        x, y = sorted((names.index(one), names.index(other)))  # a pair's names may be in any order
        color = LIGHT if isinstance(off, str) else KINDS[0] if off < limit else LIMIT
        axes.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, color=color))
        text = "none" if isinstance(off, str) else f"{off:.0e}"
        axes.text(x, y, text, ha="center", va="center", color=ink_on(color))
    axes.set_xticks(range(len(names) - 1), names[:-1])
    axes.set_yticks(range(1, len(names)), names[1:])
    axes.set(xlim=(-0.6, len(names) - 1.4), ylim=(len(names) - 0.4, 0.4))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    same = Patch(color=KINDS[0], label="the same model, but for rounding")
    axes.legend(handles=[same, Patch(color=LIGHT, label="no layout")], loc="upper right")
    return figure


@styled
def bytes_per_token(sent: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw the bytes that all ranks send per token. sent: by layout, and by sequences per rank and step."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3))
    for (label, sizes), color in zip(sent.items(), KINDS, strict=False):
        axes.plot(list(sizes), list(sizes.values()), marker="o", color=color, label=label)
    counts = list(next(iter(sent.values())))
    axes.set(xscale="log", yscale="log", ylabel="bytes sent per token, all ranks")
    axes.set(xlabel="sequences per rank and step, one per micro-batch")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside upper center", ncols=2)
    return figure


@styled
def training_run(logs: Mapping[str, Sequence[Mapping]]) -> Figure:
    """Draw the loss of several layouts, and the learning rate and batch of the first one, by step.

    logs: the lines of a log with "step", "loss", "lr" and "batch", by layout.
    """
    figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 2.6))
    for (layout, log), color, width in zip(logs.items(), KINDS, (6, 3.5, 1.5, 1), strict=False):
        panels[0].plot([r["step"] for r in log], [r["loss"] for r in log], color=color, linewidth=width, label=layout)
    first = next(iter(logs.values()))
    for axes, name in zip(panels[1:], ("lr", "batch"), strict=True):
        axes.plot([r["step"] for r in first], [r[name] for r in first], color=GRAY, marker="o", markersize=4)
        axes.set(ylim=(0, None))
    for axes, label in zip(panels, ("loss", "learning rate", "sequences per step"), strict=True):
        axes.set(xlabel="step", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper center", ncols=len(logs))
    return figure


@styled
def straggler_delays(runs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Draw the time of a step on each rank, and the time that other ranks waited for it.

    runs: (seconds per step by rank, seconds of waiting per step by rank), by name of the run.
    """
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 2.6))
    for number, ((name, columns), color) in enumerate(zip(runs.items(), (LIGHT, KINDS[2]), strict=True)):
        for axes, seconds in zip(panels, columns, strict=True):
            positions = [rank + 0.4 * number - 0.2 for rank in range(len(seconds))]
            axes.bar(positions, [1e3 * s for s in seconds], 0.38, color=color, label=name)
    for axes, title in zip(panels, ("time of a step", "others waited for this rank"), strict=True):
        axes.set(xlabel="rank", ylabel="ms per step", xticks=range(len(columns[0])), title=title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure
