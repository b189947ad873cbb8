"""Figures of what was measured beside what was predicted, and of ratios that decide what is hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from course_kit.figures.best_config.parts import GIB, TIME_COLORS
from course_kit.figures.style import BLUE, GRAY, KINDS, LIMIT, WIDTH, styled
from course_lib.best_config.runs import MeasuredRun, Predicted

MODELS = {"1B": (KINDS[0], "o"), "3B": (KINDS[1], "s"), "8B": (KINDS[2], "^"), "80B": (KINDS[3], "D")}
LAYER = {  # parts of a layer's time: label, and the color of the group of a step
    "matrices": ("matmuls", TIME_COLORS["matmuls"]),
    "attention": ("attention", TIME_COLORS["attention"]),
    "other kernels": ("other kernels", TIME_COLORS["other kernels"]),
    "tensor parallel": ("tensor parallel", TIME_COLORS["tensor, context parallel"]),
}


@styled
def tensor_parallel(
    predicted: Mapping[int, Mapping[str, float]], measured: Mapping[int, Sequence[float]], node: int = 8
) -> Figure:
    """Draw the predicted time of a layer by part, and the measured speed of runs, both by tp.

    predicted: milliseconds by tp and part; measured: tokens/s per GPU of all runs, by tp; node: GPUs of a node.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.1))
    bottom = np.zeros(len(predicted))
    for name, (label, color) in LAYER.items():
        heights = np.array([parts[name] for parts in predicted.values()])
        left.bar(range(len(predicted)), heights, bottom=bottom, color=color, edgecolor="white", lw=0.5, label=label)
        bottom = bottom + heights
    sizes = list(predicted)
    left.axvline(sizes.index(node) + 0.5, color=GRAY, linestyle="--", linewidth=1)
    left.text(sizes.index(node) + 0.4, 1.08 * bottom.max(), "leaves the node", ha="right", va="center", color=GRAY)
    left.set_xticks(range(len(sizes)), [str(tp) for tp in sizes])
    left.set(xlabel="tp", ylabel="ms per layer, forward and backward", title="predicted", ylim=(0, 1.15 * bottom.max()))
    for position, speeds in enumerate(measured.values()):
        right.plot([position] * len(speeds), speeds, "o", color=GRAY, markersize=4, alpha=0.6, markeredgewidth=0)
        right.plot(position, max(speeds), "_", color="black", markersize=24, markeredgewidth=2)
    right.set_xticks(range(len(measured)), [str(tp) for tp in measured])
    right.set(
        xlabel="tp", ylabel="tokens/s per GPU", ylim=(0, None), title="measured", xlim=(-0.6, len(measured) - 0.4)
    )
    handles, _ = left.get_legend_handles_labels()
    handles += [Line2D([], [], color=GRAY, marker="o", markersize=4, linestyle="", label="a run")]
    handles += [Line2D([], [], color="black", linewidth=2, label="the fastest")]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, handlelength=1.2, columnspacing=1.2)
    return figure


@styled
def overlap_ratios(ratios: Callable[..., Mapping[str, float]]) -> Figure:
    """Draw time to send over time to compute of DP, TP and PP, over NVLink and over a network.

    ratios: (tokens of a GPU, hidden size, bandwidth=bytes/s) -> the ratio of each technique.
    """
    x, usual = np.geomspace(512, 65536, 30), 4096
    panels = {
        "DP, ZeRO-3": ("tokens of a GPU", lambda v: (v, usual)),
        "TP": ("hidden size", lambda v: (usual, v)),
        "PP": ("hidden size, 4 layers", lambda v: (usual, v)),
    }
    figure, all_axes = plt.subplots(1, 3, figsize=(WIDTH, 2.8), sharey=True)
    for axes, (name, (label, sizes)) in zip(all_axes, panels.items(), strict=True):
        for bandwidth, color, link in ((450e9, KINDS[0], "NVLink, 450 GB/s"), (50e9, KINDS[2], "network, 50 GB/s")):
            axes.loglog(x, [ratios(*sizes(v), bandwidth=bandwidth)[name] for v in x], color=color, label=link)
        axes.axhline(1, color=LIMIT, linewidth=1, linestyle="--", label="below: can be hidden")
        axes.set(title=name, xlabel=label)
    all_axes[0].set(ylabel="time to send / time to compute")
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


@styled
def predicted_and_measured(runs: Sequence[MeasuredRun], predicted: Predicted) -> Figure:
    """Draw the predicted seconds per step and peak memory of each run that succeeded, over the measured ones.

    predicted: in the order of the runs. On the line, both are equal.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 4.3))
    left.plot([0.2, 600], [0.2, 600], color=GRAY, linewidth=1)
    right.plot([0, 80], [0, 80], color=GRAY, linewidth=1)
    for model, (color, marker) in MODELS.items():
        rows = [i for i, run in enumerate(runs) if run.ok and run.model == model]
        style = {"color": color, "marker": marker, "ms": 4.5, "ls": "", "mew": 0.3, "mec": "white", "label": model}
        left.loglog([runs[i].step_s for i in rows], predicted.step_s[rows], **style)
        peaks = [runs[i].peak_bytes / GIB for i in rows]
        right.plot(peaks, predicted.peak_bytes[rows] / GIB, **style)
    left.set(xlabel="measured", ylabel="predicted", title="seconds per step", aspect="equal")
    right.set(xlabel="measured", ylabel="predicted", title="GiB at the peak", aspect="equal")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, markerscale=1.8, handletextpad=0.3)
    return figure


@styled
def cell_errors(cells: Sequence[Mapping]) -> Figure:
    """Draw the median errors of time and memory by model and nodes.

    cells: with "model", "nodes", and the errors "tokens/s" and "peak memory" as shares.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 2.9))
    for shift, (name, color) in enumerate((("tokens/s", KINDS[0]), ("peak memory", KINDS[2]))):
        positions = np.arange(len(cells)) + 0.4 * shift - 0.2
        axes.bar(positions, [100 * cell[name] for cell in cells], 0.38, color=color, label=name)
    axes.set_xticks(range(len(cells)), [f"{cell['model']}\n{cell['nodes']}" for cell in cells])
    axes.set(ylabel="median error, %", xlabel="model, and nodes below", xlim=(-0.7, len(cells) - 0.3))
    figure.legend(loc="outside upper center", ncols=2)
    return figure


@styled
def published_errors(ratios: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Draw predicted over measured time of each published run: a row for each program, with two dots per run.

    ratios: by program, with the course's constants and with the program's own.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 1.2 + 0.5 * len(ratios)))
    for y, columns in enumerate(ratios.values()):
        for shift, color, values in zip((-0.17, 0.17), (GRAY, BLUE), columns, strict=True):
            axes.scatter(values, np.full(len(values), y + shift), 26, alpha=0.5, edgecolors="none", color=color)
    axes.axvline(1, color="black", linewidth=1)
    ticks = (0.2, 0.3, 0.5, 0.7, 1, 1.4, 2)
    axes.set(xscale="log", xlabel="predicted / measured time of a step", ylim=(len(ratios) - 0.5, -0.5))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(ratios)), [f"{name}, {len(fitted)} runs" for name, (_, fitted) in ratios.items()])
    labels = (("the course's constants", GRAY), ("the constants of the program", BLUE))
    handles = [Line2D([], [], color=color, marker="o", linestyle="", label=label) for label, color in labels]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return figure
