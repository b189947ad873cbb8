"""Figures of notebook 10b: how often runs fail, what a save costs, who holds what, and what a restart forgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_kit.figures.style import GRAY, KINDS, LIGHT, RANKS, WIDTH, ink_on, styled
from course_lib.checkpoint import save_interval as intervals

CAUSES = ["GPU", "Host", "Network", "Dependency", "Unplanned maintenance", "Unknown"]
CAUSE_COLORS = dict(zip(CAUSES, [KINDS[2], KINDS[1], KINDS[3], KINDS[0], KINDS[4], LIGHT], strict=True))
ShardExtent = tuple[
    tuple[int, int], tuple[int, int], tuple[int, int]
]  # offsets and sizes of a shard, sizes of the tensor


def on_steps(ax: Axes) -> None:
    """Label an axis of steps: whole numbers."""
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


@styled
def interruptions(causes: Sequence[Mapping[str, str]]) -> Figure:
    """Return the interruptions of a run by component, in the color of their category.

    causes: rows of data/llama3_interruptions.csv.
    """
    counts = {row["component"]: int(row["interruptions"]) for row in causes}
    total = sum(counts.values())
    figure, ax = plt.subplots(figsize=(WIDTH, 4.4))
    colors = [CAUSE_COLORS[row["category"]] for row in causes]
    bars = ax.barh(list(counts), list(counts.values()), color=colors)
    ax.bar_label(bars, labels=[f"{n}  ({n / total:.1%})" for n in counts.values()], padding=3)
    ax.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in CAUSE_COLORS.values()]
    ax.legend(handles, list(CAUSE_COLORS), loc="lower right")
    ax.set(xlabel="unexpected interruptions", xlim=(0, 1.25 * max(counts.values())))
    return figure


@styled
def save_intervals(gpus: Sequence[int], mtbf_s: float, restart_s: float = 600) -> Figure:
    """Return the best interval between saves, and the share of the time that is lost with it, by number of GPUs.

    mtbf_s: mean time between failures of a single GPU, in seconds; a line per duration of a save.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.6))
    for save_s, color, mark in zip((1, 10, 60, 600), (KINDS[0], KINDS[3], KINDS[1], KINDS[2]), "osD^", strict=True):
        best = [intervals.save_interval(save_s, mtbf_s / n) for n in gpus]
        lost = [intervals.lost_share(tau, save_s, mtbf_s / n, restart_s) for tau, n in zip(best, gpus, strict=True)]
        line = {"color": color, "marker": mark, "markersize": 3.5, "label": f"a save stops training for {save_s} s"}
        left.plot(gpus, [tau / 60 for tau in best], **line)
        right.plot(gpus, [100 * share for share in lost], **line)
    daily = [100 * intervals.lost_share(24 * 3600, 60, mtbf_s / n, restart_s) for n in gpus]
    right.plot(gpus, daily, "--", color=GRAY, label="60 s, once per day")
    left.set(ylim=(1, 3e5), ylabel="minutes between saves", title="the optimum (Young)")
    right.set(ylabel="% of the time lost", title=f"what it costs (Daly); restarts take {restart_s / 60:g} minutes")
    for ax in (left, right):
        ax.set(xscale="log", yscale="log", xlabel="GPUs")
        ax.set_xticks([8, 64, 512, 4096, 16384], ["8", "64", "512", "4,096", "16,384"])
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@styled
def shard_owners(held: Mapping[str, Sequence[tuple[Sequence[ShardExtent], Sequence[ShardExtent]]]]) -> Figure:
    """Return which ranks hold which shard of a weight and of its first moment, a column per layout.

    held: by layout and rank, the shards of the weight and of its moment.
    """
    figure, axes = plt.subplots(2, len(held), figsize=(WIDTH, 5.2))
    for column, (text, of_ranks) in enumerate(held.items()):
        for row, (ax, what) in enumerate(zip(axes[:, column], ("weight", "first moment"), strict=True)):
            owners: dict[ShardExtent, list[int]] = {}
            for rank, results in enumerate(of_ranks):
                for rectangle in results[row]:
                    owners.setdefault(rectangle, []).append(rank)
            for rectangle, ranks in owners.items():
                draw_rectangle(ax, rectangle, ranks)
            full = next(iter(owners))[2]
            title = f"{text.replace(',zero', ',' + chr(10) + 'zero')}\n{what}" if row == 0 else what
            ax.set(xlim=(-0.5, full[1] + 0.5), ylim=(full[0] + 0.5, -0.5), title=title)
            ax.set_xticks([0, full[1]])
            ax.set_yticks([0, full[0]])
    return figure


def draw_rectangle(ax: Axes, rectangle: ShardExtent, ranks: Sequence[int]) -> None:
    """Draw a shard with the ranks that hold it, in the color of the first of them."""
    (top, left), (height, width), _ = rectangle
    color = RANKS[ranks[0]]
    ax.add_patch(plt.Rectangle((left, top), width, height, facecolor=color, edgecolor="white", linewidth=1))
    if width > 0:
        label = ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} … {ranks[-1]}"
        center = left + width / 2, top + height / 2
        ax.text(*center, label, ha="center", va="center", fontsize=8, color=ink_on(color))


@styled
def stalls(times_s: Sequence[float]) -> Figure:
    """Return the ms of 20 steps, of which each fourth saves: step 3, 11 wait for the disk, 7, 15 write beside."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    ax.plot(range(20), [1e3 * each for each in times_s[:20]], color=GRAY, linewidth=1)
    for first, color, mark, label in (
        (3, KINDS[2], "o", "a save that waits for the disk"),
        (7, KINDS[0], "s", "a save written beside"),
    ):
        steps = range(first, 16, 8)
        ax.plot(steps, [1e3 * times_s[step] for step in steps], mark, color=color, label=label)
    on_steps(ax)
    ax.set(ylabel="ms per step", ylim=(0, None))
    figure.legend(*ax.get_legend_handles_labels(), ncols=2, loc="outside upper center")
    return figure


@styled
def restart(smooth: Sequence[float], before: Sequence[dict], after: Sequence[dict]) -> Figure:
    """Return the losses of a run that was never killed, until a kill, and after the restart; records: step, loss."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    steps = range(1, len(smooth) + 1)
    ax.plot(steps, smooth, color=LIGHT, linewidth=6, label="never killed")
    given = {"linestyle": "-", "marker": "o", "markersize": 4, "color": KINDS[0], "label": "after the restart"}
    ax.plot([r["step"] for r in after], [r["loss"] for r in after], **given)
    given = {"linestyle": "", "marker": "o", "markersize": 9, "markerfacecolor": "none", "color": KINDS[2]}
    ax.plot([r["step"] for r in before], [r["loss"] for r in before], label="until the kill", **given)
    ax.axvline(len(before) + 0.3, color=KINDS[2], linewidth=1)
    ax.set(xlabel="step", ylabel="loss", xticks=range(0, len(smooth) + 1, 5))
    ax.legend()
    return figure


@styled
def forgetful_restarts(runs: Mapping[str, Sequence[tuple[float, float]]], first: int = 21) -> Figure:
    """Return the losses less those of the whole run, and the learning rates, of runs after a restart.

    runs: (loss, learning rate) of each step, by letter; "whole" was never interrupted. Step `first` is the first one.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.4))
    styles = {"whole": ("black", 7), "A": (KINDS[2], 4.5), "B": (KINDS[0], 2.5), "C": (KINDS[1], 1)}
    for letter, (color, width) in styles.items():
        steps = range(first, first + len(runs[letter]))
        apart = [mine[0] - other[0] for mine, other in zip(runs[letter], runs["whole"], strict=True)]
        left.plot(steps, apart, color=color, linewidth=1.5, label=letter)
        right.plot(steps, [1e3 * row[1] for row in runs[letter]], color=color, linewidth=width)
    left.set(ylabel="loss - loss of the whole run")
    right.set(ylabel="learning rate, 1e-3", ylim=(0, None))
    for ax in (left, right):
        on_steps(ax)
    figure.legend(*left.get_legend_handles_labels(), ncols=4, loc="outside upper center")
    return figure
