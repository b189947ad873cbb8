"""Figures of a search: the best layouts with their costs, and the reasons why others were rejected.

    ranking(search(config, cluster, gpus=512, batch=1024))    seconds and GiB of the best, part by part
    rejections(ranking)                                       how many layouts each rule rejected

Two layouts with the same degrees and the same time differ in a setting that costs nothing here (such as a ZeRO stage
whose traffic is hidden); `distinct` shows the first of them.
"""

from __future__ import annotations

import re
import textwrap

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_kit.figures.best_config.parts import GIB, MEMORY_COLORS, TIME_COLORS, in_groups, memory_groups, time_groups
from course_kit.figures.style import KINDS, LIGHT, LIMIT, WIDTH, styled
from course_lib.best_config.planner import Ranking
from course_lib.five_d.layouts import Layout

SAME_TIME = 1e-3  # two predictions within this relative difference count as the same time


def distinct(ranking: Ranking, n: int) -> list[int]:
    """Return rows of the ranking's table: the n best layouts that differ. Of layouts with equal dp x cp, pp and tp
    whose times lie within 0.1% of each other, only the first counts.
    """
    table, step_s = ranking.table, ranking.estimate.step_s
    rows: list[int] = []
    slowest: dict[tuple, float] = {}  # by degrees: the time of the last selected layout
    for row in ranking.order:
        if len(rows) == n:
            break
        degrees = table.dp[row] * table.cp[row], table.pp[row], table.tp[row]
        if degrees not in slowest or step_s[row] > slowest[degrees] * (1 + SAME_TIME):
            rows.append(int(row))
            slowest[degrees] = step_s[row]
    return rows


def two_lines(layout: Layout) -> str:
    """Return a layout's spec in two lines: the degrees, and the settings if there are any."""
    tokens = str(layout).split(",")
    degrees = [token for token in tokens if re.fullmatch(r"(dp|pp|cp|tp|ep)\d+", token)] or ["dp1"]
    settings = [token for token in tokens if token not in degrees]
    return "\n".join(",".join(line) for line in (degrees, settings) if line)


def reasons_of(ranking: Ranking) -> dict[str, int]:
    """Return the reasons for rejected layouts with their counts, the most frequent reason first."""
    return dict(sorted(ranking.rejected.items(), key=lambda item: -item[1]))


def draw_bars(axes: Axes, parts: dict[str, np.ndarray], colors: dict[str, str]) -> np.ndarray:
    """Draw one stacked bar per row, from the top; return the lengths [rows]."""
    left = np.zeros(len(next(iter(parts.values()))))
    for name, values in parts.items():
        bars = axes.barh(range(len(left)), values, 0.7, left=left, color=colors[name], label=name)
        for bar in bars:
            bar.set(edgecolor="white", linewidth=0.5)
        left = left + values
    return left


@styled
def ranking(result: Ranking, n: int = 8, title: str = "", rows: list[int] | None = None) -> Figure:
    """Draw the n fastest layouts that differ, or these `rows` of the ranking: seconds per step by part, with tokens/s
    per GPU and MFU; and GiB of the fullest GPU by part, beside its usable memory.

    Raises ValueError if no layout fits or n is below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: expected 1 or more")
    if not len(result.order):
        raise ValueError("no layout fits: " + "; ".join(f"{n:,} {why}" for why, n in reasons_of(result).items()))
    rows, e = distinct(result, n) if rows is None else rows, result.estimate
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 1.8 + 0.42 * len(rows)), sharey=True, width_ratios=(1.25, 1))
    time_axes, memory_axes = panels
    seconds = draw_bars(time_axes, in_groups(e.time, time_groups(e.time), rows), TIME_COLORS)
    for y, (row, length) in enumerate(zip(rows, seconds, strict=True)):
        label = f" {e.tokens_per_s[row]:,.0f} tokens/s\n MFU {e.mfu[row]:.1%}"
        time_axes.text(length, y, label, va="center", linespacing=1.1)
    time_axes.set(xlim=(0, 1.55 * seconds.max()), xlabel="seconds per step; tokens/s per GPU")
    memory = {name: size / GIB for name, size in in_groups(e.memory, memory_groups(e.memory), rows).items()}
    sizes, usable = draw_bars(memory_axes, memory, MEMORY_COLORS), float(e.usable_bytes / GIB)
    memory_axes.axvline(usable, color=LIMIT, linestyle="--", linewidth=1)
    for y, size in enumerate(sizes):
        memory_axes.text(max(size, usable), y, f"  {size:.1f}", va="center")
    memory_axes.set(xlim=(0, 1.2 * max(usable, sizes.max())), xlabel=f"GiB of the fullest GPU; usable: {usable:.0f}")
    time_axes.set_yticks(range(len(rows)), [two_lines(result.table[row]) for row in rows])
    time_axes.set_ylim(len(rows) - 0.5, -0.5)
    memory_axes.tick_params(axis="y", length=0)
    for axes in panels:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, handlelength=1, columnspacing=1)
    figure.suptitle(title)
    return figure


@styled
def rejections(result: Ranking) -> Figure:
    """Draw how many layouts each rule rejects and how many fit, one bar each on a logarithmic axis. A layout counts
    once, for the first rule that it breaks.
    """
    counts_by_reason = {"fits": len(result.order)} | reasons_of(result)
    names, counts = list(counts_by_reason), list(counts_by_reason.values())
    lines = [textwrap.fill(name, 54, break_on_hyphens=False) for name in names]
    height = sum(0.2 + 0.15 * line.count("\n") for line in lines)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.8 + 1.25 * height))
    axes.barh(range(len(names)), counts, color=[KINDS[0], *[LIGHT] * len(result.rejected)])
    for y, count in enumerate(counts):
        axes.text(max(count, 0.5), y, f" {count:,}", va="center")
    axes.set(xscale="log", xlim=(0.5, 6 * max(counts)), xlabel="layouts, by the first rule that each breaks")
    axes.set_yticks(range(len(names)), lines)
    axes.invert_yaxis()
    return figure
