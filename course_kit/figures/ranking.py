"""Figures of a search: the best layouts with their costs, the reasons why others were rejected, and MFU by size.

    ranking_figure(search(config, cluster, gpus=512, batch=1024))    seconds and GiB of the best, part by part
    rejections_figure(ranking)                                       how many layouts each rule rejected
    mfu_heatmap(models, (1, 8, 64), cluster, batch=1024)             best MFU by model and number of nodes

Two layouts with the same degrees and the same time differ in a setting that costs nothing here (such as a ZeRO stage
whose traffic is hidden); `distinct` shows the first of them. The heatmap is drawn as for measured runs (`heatmaps`),
from predicted rows.
"""

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np

from course_kit.figures.heatmaps import cell_text, heatmap
from course_kit.figures.style import MEMORY
from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planner import Ranking, search
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import ModelConfig

GIB = 2**30
SAME_TIME = 1e-3  # two predictions within this relative difference count as the same time
SMALL = 0.02  # parts below this share of every bar's length are drawn together as "other"
OTHER_COLOR = "0.75"


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


def reasons(ranking: Ranking) -> dict[str, int]:
    """Return the reasons for rejected layouts with their counts, the most frequent reason first."""
    return dict(sorted(ranking.rejected.items(), key=lambda item: -item[1]))


def large_parts(parts: dict[str, np.ndarray], rows: list[int]) -> dict[str, np.ndarray]:
    """Return the parts of these rows [rows] that are visible in a bar, and the rest of them as "other"."""
    selected = {name: np.asarray(values)[rows] for name, values in parts.items()}
    longest = sum(selected.values(), np.zeros(len(rows))).max()
    large = {name: values for name, values in selected.items() if values.max() >= SMALL * longest}
    rest = sum((values for name, values in selected.items() if name not in large), np.zeros(len(rows)))
    return large | ({"other": rest} if rest.max() > 0 else {})


def part_colors(names: Iterable[str], fixed: dict[str, str]) -> dict[str, Any]:
    """Return a color for each part, the same in every figure: the fixed colors, and for the other parts, by position,
    the colors of matplotlib's tab20 that are neither similar to them nor gray, dark colors first.
    """
    from matplotlib import colormaps

    colors = [colormaps["tab20"](i) for i in range(20)]
    dark, light = colors[::2], colors[1::2]
    free = [*dark[len(fixed) : 7], *dark[8:], *light[:7], *light[8:]]
    rest = [name for name in names if name not in fixed]
    return fixed | {name: free[i % len(free)] for i, name in enumerate(rest)} | {"other": OTHER_COLOR}


def draw_bars(ax, parts: dict[str, np.ndarray], colors: dict[str, Any]) -> np.ndarray:
    """Draw one stacked bar per row, from the top; return the lengths [rows]. The legend is above the bars."""
    left = np.zeros(len(next(iter(parts.values()))))
    for name, values in parts.items():
        ax.barh(range(len(left)), values, left=left, color=colors[name], label=name, height=0.7)
        left = left + values
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    style = {"frameon": False, "fontsize": 7.5, "handlelength": 1, "columnspacing": 1}
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, **style)
    return left


def ranking_figure(ranking: Ranking, n: int = 8, title: str = "", rows: list[int] | None = None):
    """Draw the n fastest layouts that differ, or these `rows` of the ranking: seconds per step by part, with tokens/s
    per GPU and MFU; and GiB of the fullest GPU by part, beside its usable memory. Returns a matplotlib Figure.

    Raises ValueError if no layout fits or n is below 1.
    """
    from matplotlib.figure import Figure

    if n < 1:
        raise ValueError(f"n={n}: expected 1 or more")
    if not len(ranking.order):
        raise ValueError("no layout fits: " + "; ".join(f"{n:,} {why}" for why, n in reasons(ranking).items()))
    rows, e = distinct(ranking, n) if rows is None else rows, ranking.estimate
    figure = Figure(figsize=(9, 1.7 + 0.42 * len(rows)), dpi=100, layout="constrained")
    time_ax, memory_ax = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1))
    seconds = draw_bars(time_ax, large_parts(e.time, rows), part_colors(e.time, {}))
    for y, (row, length) in enumerate(zip(rows, seconds, strict=True)):
        label = f" {e.tokens_per_s[row]:,.0f} tokens/s\n MFU {e.mfu[row]:.1%}"
        time_ax.text(length, y, label, va="center", fontsize=7.5, linespacing=1.1)
    time_ax.set_xlim(0, 1.5 * seconds.max())
    time_ax.set_xlabel("seconds per step; tokens/s per GPU", fontsize=8.5)
    gib = {name: size / GIB for name, size in large_parts(e.memory, rows).items()}
    usable = e.usable_bytes / GIB
    memory_ax.axvline(usable, color="red", linestyle="--", label=f"usable: {usable:.0f}")
    sizes = draw_bars(memory_ax, gib, part_colors(e.memory, MEMORY))
    for y, size in enumerate(sizes):
        memory_ax.text(max(size, usable), y, f"  {size:.1f}", va="center", fontsize=7.5)
    memory_ax.set_xlim(0, 1.18 * max(usable, sizes.max()))
    memory_ax.set_xlabel("GiB of the fullest GPU", fontsize=8.5)
    time_ax.set_yticks(range(len(rows)), [two_lines(ranking.table[row]) for row in rows], fontsize=7.5)
    time_ax.set_ylim(len(rows) - 0.5, -0.5)
    memory_ax.tick_params(axis="y", length=0)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def rejections_figure(ranking: Ranking):
    """Return a matplotlib Figure: how many layouts each rule rejects and how many fit, one bar each on a logarithmic
    scale. A layout counts once, for the first rule that it breaks.
    """
    from matplotlib.figure import Figure

    counts_by_reason = {"fits": len(ranking.order)} | reasons(ranking)
    names, counts = list(counts_by_reason), list(counts_by_reason.values())
    figure = Figure(figsize=(8.5, 0.9 + 0.36 * len(names)), dpi=100, layout="constrained")
    ax = figure.add_subplot()
    ax.barh(range(len(names)), counts, color=["#55A868", *[OTHER_COLOR] * len(ranking.rejected)])
    for y, count in enumerate(counts):
        ax.text(max(count, 0.5), y, f" {count:,}", va="center", fontsize=8)
    ax.set(xscale="log", xlim=(0.5, 6 * max(counts)))
    ax.set_xlabel("layouts, by the first rule that each breaks", fontsize=8.5)
    ax.set_yticks(range(len(names)), [textwrap.fill(name, 62, break_on_hyphens=False) for name in names], fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def with_degrees(ranking: Ranking, degrees: dict[str, tuple[int, ...]]) -> Ranking:
    """Return the ranking without layouts of other degrees, such as {"cp": (1,)}; `search` tries all degrees."""
    allowed = np.ones(len(ranking.table), bool)
    for name, values in degrees.items():
        allowed &= np.isin(getattr(ranking.table, name), values)
    order, risky = (rows[allowed[rows]] for rows in (ranking.order, ranking.risky))
    return dataclasses.replace(ranking, order=order, risky=risky)


def heatmap_row(name: str, ranking: Ranking, nodes: int, batch: int, seq: int) -> dict:
    """Return the best layout of a search as a row of a sweep; without numbers if none fits."""
    best = ranking.best(1)
    layout, tokens_per_s, mfu, _ = best[0] if best else (Layout(), math.nan, math.nan, math.nan)
    return {
        "model": name,
        "nodes": nodes,
        **dataclasses.asdict(layout),
        "global_batch_seqs": batch,
        "seq": seq,
        "ok": bool(best),
        "tokens_per_s_per_gpu": tokens_per_s,
        "mfu_pct": 100 * mfu,
    }


def heatmap_figure(rows: list[dict], cluster: Cluster, batch: int, seq: int):
    """Return the heatmap of measured runs, with the labels of predictions."""
    where = f"{cluster.name}; {batch:,} sequences of {seq:,} tokens per step"
    figure = heatmap(rows, where)
    figure.set_figwidth(2.2 + 1.3 * len({row["nodes"] for row in rows}))  # wider, for layouts with four degrees
    figure.axes[0].set_title(f"{where}\nthe fastest layout of each cell: its predicted MFU", fontsize=10)
    for text in figure.axes[0].texts:
        if text.get_text() == cell_text(None, 1, True):  # of a run that failed
            text.set_text("none\nfits")
    return figure


def mfu_heatmap(
    models: dict[str, ModelConfig],
    nodes: tuple[int, ...],
    cluster: Cluster,
    batch: int,
    seq: int = 4096,
    settings: dict[str, tuple] | None = None,
    degrees: dict[str, tuple[int, ...]] | None = None,
):
    """Return a matplotlib Figure: the best predicted MFU of each model (row) on each number of nodes (column), and its
    layout. settings: as for `search`, which takes up to a second per cell if it tries all. degrees: the allowed
    degrees, such as {"cp": (1,)}; None: all.

    Raises ValueError if nothing fits anywhere, and the errors of `search`.
    """
    rows = []
    for name, config in models.items():
        for n in nodes:
            ranking = search(config, cluster, n * cluster.gpus_per_node, batch, seq, settings=settings)
            rows.append(heatmap_row(name, with_degrees(ranking, degrees or {}), n, batch, seq))
    if not any(row["ok"] for row in rows):
        raise ValueError(f"batch {batch}, sequences of {seq}: no layout of {', '.join(models)} fits on {cluster.name}")
    return heatmap_figure(rows, cluster, batch, seq)
