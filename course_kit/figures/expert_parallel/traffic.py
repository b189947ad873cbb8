"""Traffic between ranks and nodes, and its time beside the experts' work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from course_kit.figures.style import GRAY, KINDS, LIMIT, PHASES, WIDTH, ink_on, styled
from course_kit.labs.expert_parallel import crossings
from course_lib.expert_parallel import model as parallel

PEAK, NVLINK, INFINIBAND = 989e12, 450e9, 50e9  # of an H100: FLOP/s in BF16; bytes per second one way, per GPU
ROWS = LinearSegmentedColormap.from_list("rows", ["white", PHASES["communication"]])


@styled
def rows_sent(matrices: Mapping[str, torch.Tensor]) -> Figure:
    """Return how many rows each rank sends to each other, a panel per routing: {title: [n, n]}."""
    most = max(float(matrix.max()) for matrix in matrices.values())
    figure, axes = plt.subplots(1, len(matrices), figsize=(0.9 * WIDTH, 3.2))
    for ax, (title, matrix) in zip(axes, matrices.items(), strict=True):
        ax.imshow(matrix, vmin=0, vmax=most, cmap=ROWS)
        n = len(matrix)
        for i in range(n):
            for j in range(n):
                shade = [1 - (1 - part) * float(matrix[i, j]) / most for part in (0.373, 0.227, 0.471)]
                ink = ink_on("#" + "".join(f"{round(255 * part):02X}" for part in shade))
                ax.text(j, i, f"{int(matrix[i, j])}", ha="center", va="center", color=ink)
        ax.set(xlabel="to rank", ylabel="from rank", title=title, xticks=range(n), yticks=range(n))
        ax.spines[:].set_visible(False)
    return figure


@styled
def timeline(runs: Mapping[str, Sequence[tuple[float, float, Sequence[tuple[float, float]]]]]) -> Figure:
    """Return when ranks compute and when they exchange, a panel per routing.

    rounds: by title and rank, the end, the begin of backward, and (begin, end) of each exchange, in ms.
    """
    figure, axes = plt.subplots(len(runs), 1, figsize=(WIDTH, 3.4), sharex=True)
    for ax, (title, by_rank) in zip(axes, runs.items(), strict=True):
        n = len(by_rank)
        for rank, (end, middle, spans) in enumerate(by_rank):
            row = n - 1 - rank
            exchanges = [(begin, stop - begin) for begin, stop in spans]
            ax.broken_barh([(0, middle)], (row + 0.1, 0.8), color=PHASES["forward"], label="forward")
            ax.broken_barh([(middle, end - middle)], (row + 0.1, 0.8), color=PHASES["backward"], label="backward")
            ax.broken_barh(exchanges, (row + 0.1, 0.8), color=PHASES["communication"], label="exchange, or wait for it")
        ax.set(yticks=[row + 0.5 for row in range(n)], yticklabels=[f"rank {n - 1 - row}" for row in range(n)])
        ax.set_title(title)
    axes[-1].set_xlabel("ms")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[:3], labels[:3], loc="outside lower center", ncols=3)
    return figure


@styled
def bytes_by_node_limit(
    measured_kb: Sequence[float], once: Sequence[float], each: Sequence[float], shown: int = 4
) -> Figure:
    """Return the kB per token by the limit M of nodes per token, and crossings per token with and without sharing.

    measured_kb: for M = 1, 2, ...; once, each: crossings with a copy per node, and per choice; shown: M of DeepSeek-V3.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3))
    limits = range(1, len(measured_kb) + 1)
    left.bar(limits, measured_kb, color=PHASES["communication"], width=0.6)
    left.set(xlabel=f"M, of {len(measured_kb)} nodes", ylabel="kB per token, forward", xticks=limits)
    left.set_title("measured on 4 ranks")
    nodes = range(1, len(once) + 1)
    right.plot(nodes, each, "s--", color=KINDS[2], label="a copy for each choice")
    right.plot(nodes, once, "o-", color=KINDS[0], label="a copy for each node")
    right.axvline(shown, color="black", linewidth=0.8, linestyle=":")
    right.set(xlabel=f"M, of {len(once)} nodes", ylabel="crossings per token", ylim=0, xticks=nodes)
    right.set_title("256 experts, k = 8, counted")
    right.legend()
    return figure


@styled
def dispatch_ratios(cases: Mapping[str, tuple[float, int, int, float, int]]) -> Figure:
    """Return the time of the exchange over that of the experts' work on H100s.

    cases: by name: copies per token, top_k, width of an expert, bytes/s, bytes per element on the way out.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    for position, (copies, top_k, width, link, sent_bytes) in enumerate(cases.values()):
        value = parallel.dispatch_ratio(copies, top_k, width, link, PEAK, sent_bytes)
        ax.bar(position, value, 0.6, color=KINDS[0] if value <= 1 else KINDS[2])
        ax.text(position, max(value, 1) if value > 0.7 else value, f"{value:.2f}", ha="center", va="bottom")
    ax.axhline(1, color=LIMIT, linestyle="--", linewidth=1, label="as long as the work")
    ax.set(ylabel="exchange over experts' work")
    ax.set_xticks(range(len(cases)), list(cases))
    ax.legend()
    return figure


@styled
def dispatch_ratio_by_nodes(width: int = 2048, top_k: int = 8, nodes: int = 8, limit: int = 4) -> Figure:
    """Return the same ratio between nodes for each limit M, dispatch in FP8 and combine in BF16; `limit` in color.

    Raises ValueError if the limit is above the number of nodes.
    """
    if limit > nodes:
        raise ValueError(f"M = {limit}: there are {nodes} nodes")
    across = [crossings(each, nodes, 32 * nodes, top_k, 1000)[0] for each in range(1, nodes + 1)]
    values = [parallel.dispatch_ratio(copies, top_k, width, INFINIBAND, PEAK, 1, 2) for copies in across]
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.9))
    positions = range(1, nodes + 1)
    ax.plot(positions, values, "o-", color=GRAY, markersize=5)
    ax.plot(limit, values[limit - 1], "o", color=KINDS[0], markersize=10)
    ax.axhline(1, color=LIMIT, linestyle="--", linewidth=1)
    ax.text(limit, 1.5 * values[limit - 1], f"{values[limit - 1]:.2f}", ha="center", va="bottom")
    ax.set(xlabel="M, nodes per token", ylabel="exchange over work", yscale="log", xlim=(0.3, 16.7), ylim=(0.01, 100))
    ax.set_xticks(range(1, 17))
    return figure
