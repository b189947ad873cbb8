"""What a search found, in pictures: the best layouts and what each spends, why the others fell out, and where it leads.

    ranking_figure(search(config, cluster, gpus=512, batch=1024))    seconds and GiB of the best, part by part
    rejections_figure(ranking)                                       how many layouts each rule took out
    mfu_heatmap(models, (1, 8, 64), cluster, batch=1024)             best MFU by model and number of nodes

Two layouts with the same degrees and the same time differ in what costs nothing here (a ZeRO stage whose traffic is
hidden, say, or sequences for parts of them); `distinct` shows the first of them. The heatmap is the one of measured
runs (`heatmaps`), its rows predicted instead.
"""

import dataclasses
import math
import re
import textwrap

import numpy as np

from course_kit.pictures.heatmaps import cell_text, heatmap
from course_kit.pictures.style import MEMORY
from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planner import Ranking, search
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import ModelConfig

GIB = 2**30
SAME_TIME = 1e-3  # two predictions that are nearer than that, relative, are of the same time
SMALL = 0.02  # parts that are less than this of every bar's length are drawn as one, "other"
OTHER_COLOR = "0.75"


def distinct(ranking: Ranking, n: int) -> list[int]:
    """Rows of the ranking's table: the n best layouts that differ. Of those with equal dp x cp, pp and tp, whose times
    lie within 0.1% of each other, only the first.
    """
    table, step_s = ranking.table, ranking.estimate.step_s
    rows, slowest = [], {}  # by degrees: the time of the last layout that was chosen
    for row in ranking.order:
        if len(rows) == n:
            break
        degrees = table.dp[row] * table.cp[row], table.pp[row], table.tp[row]
        if degrees not in slowest or step_s[row] > slowest[degrees] * (1 + SAME_TIME):
            rows.append(int(row))
            slowest[degrees] = step_s[row]
    return rows


def two_lines(layout: Layout) -> str:
    """A layout's words: the degrees, and below them the settings, where there are any."""
    words = str(layout).split(",")
    degrees = [word for word in words if re.fullmatch(r"(dp|pp|cp|tp|ep)\d+", word)] or ["dp1"]
    settings = [word for word in words if word not in degrees]
    return "\n".join(",".join(line) for line in (degrees, settings) if line)


def reasons(ranking: Ranking) -> dict[str, int]:
    """Why layouts were rejected, and how many, the most frequent reason first."""
    return dict(sorted(ranking.rejected.items(), key=lambda item: -item[1]))


def large_parts(parts: dict[str, np.ndarray], rows: list[int]) -> dict[str, np.ndarray]:
    """The parts of these rows [rows] that can be seen in a bar, and the rest of them as "other"."""
    found = {name: np.asarray(values)[rows] for name, values in parts.items()}
    longest = sum(found.values()).max()
    large = {name: values for name, values in found.items() if values.max() >= SMALL * longest}
    rest = sum((values for name, values in found.items() if name not in large), np.zeros(len(rows)))
    return large | ({"other": rest} if rest.max() > 0 else {})


def part_colors(names, fixed: dict[str, str]) -> dict[str, object]:
    """A colour for each part, which it keeps from figure to figure: the fixed ones', and by its place among the rest
    those of matplotlib's tab20 that are neither like them nor grey, the dark ones first.
    """
    from matplotlib import colormaps

    dark, light = colormaps["tab20"].colors[::2], colormaps["tab20"].colors[1::2]
    free = [*dark[len(fixed) : 7], *dark[8:], *light[:7], *light[8:]]
    rest = [name for name in names if name not in fixed]
    return fixed | {name: free[i % len(free)] for i, name in enumerate(rest)} | {"other": OTHER_COLOR}


def draw_bars(ax, parts: dict[str, np.ndarray], colors: dict[str, object]) -> np.ndarray:
    """One stacked bar a row, from the top; returns their lengths [rows]. The legend comes above the bars."""
    left = np.zeros(len(next(iter(parts.values()))))
    for name, values in parts.items():
        ax.barh(range(len(left)), values, left=left, color=colors[name], label=name, height=0.7)
        left = left + values
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    look = {"frameon": False, "fontsize": 7.5, "handlelength": 1, "columnspacing": 1}
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, **look)
    return left


def ranking_figure(ranking: Ranking, n: int = 8, title: str = "", rows: list[int] | None = None):
    """Draw the n fastest layouts that differ, or these `rows` of the ranking: seconds per step by part, with tokens/s
    per GPU and MFU; and GiB of the fullest GPU by part, beside its usable memory. Returns a matplotlib Figure.

    Raises ValueError where no layout fits, or n is below 1.
    """
    from matplotlib.figure import Figure

    if n < 1:
        raise ValueError(f"n {n}: it is 1 or more")
    if not len(ranking.order):
        raise ValueError("no layout fits: " + "; ".join(f"{n:,} {why}" for why, n in reasons(ranking).items()))
    rows, e = distinct(ranking, n) if rows is None else rows, ranking.estimate
    figure = Figure(figsize=(9, 1.7 + 0.42 * len(rows)), dpi=100, layout="constrained")
    time_ax, memory_ax = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1))
    seconds = draw_bars(time_ax, large_parts(e.time, rows), part_colors(e.time, {}))
    for y, (row, length) in enumerate(zip(rows, seconds, strict=True)):
        words = f" {e.tokens_per_s[row]:,.0f} tokens/s\n MFU {e.mfu[row]:.1%}"
        time_ax.text(length, y, words, va="center", fontsize=7.5, linespacing=1.1)
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
    """How many layouts each reason took out, and how many fit: a bar each on a logarithmic scale, with its number. A
    layout counts once, for the first rule that it breaks. Returns a matplotlib Figure.
    """
    from matplotlib.figure import Figure

    found = {"fits": len(ranking.order)} | reasons(ranking)
    names, counts = list(found), list(found.values())
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
    """The ranking's layouts that have these degrees, such as {"cp": (1,)}; `search` tries all."""
    allowed = np.ones(len(ranking.table), bool)
    for name, values in degrees.items():
        allowed &= np.isin(getattr(ranking.table, name), values)
    order, risky = (rows[allowed[rows]] for rows in (ranking.order, ranking.risky))
    return dataclasses.replace(ranking, order=order, risky=risky)


def heatmap_row(name: str, ranking: Ranking, nodes: int, batch: int, seq: int) -> dict:
    """The best layout of a search, as a row of a sweep; without numbers where none fits."""
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
    """The heatmap of measured runs, with the words for predictions."""
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
    """The best predicted MFU of each model (a row) on each number of nodes (a column), and its layout. Returns a
    matplotlib Figure. settings: as of `search`, which takes up to a second a cell if it tries all. degrees: those
    that a layout may have, such as {"cp": (1,)}; None: all.

    Raises ValueError where nothing fits anywhere, or `search` does.
    """
    rows = []
    for name, config in models.items():
        for n in nodes:
            ranking = search(config, cluster, n * cluster.gpus_per_node, batch, seq, settings=settings)
            rows.append(heatmap_row(name, with_degrees(ranking, degrees or {}), n, batch, seq))
    if not any(row["ok"] for row in rows):
        raise ValueError(f"batch {batch}, sequences of {seq}: no layout of {', '.join(models)} fits on {cluster.name}")
    return heatmap_figure(rows, cluster, batch, seq)
