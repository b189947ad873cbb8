"""Training in FP8: curves beside BF16's, errors by layer, outliers, a spike, and Adam's second moment in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure

from course_kit.figures.fp8.numbers import WAYS, power_of_two_axis
from course_kit.figures.style import KINDS, LIGHT, WIDTH, ink_on, styled

RECIPES = [(KINDS[1], "-"), (KINDS[2], "--"), (KINDS[0], "-."), (KINDS[3], ":"), (KINDS[4], "-")]  # but for BF16
ERRORS = LinearSegmentedColormap.from_list("errors", ["white", KINDS[2]])
MOST_ERROR = 0.06  # the end of the scale of colors


@styled
def recorded_curves(steps: Sequence[float], curves: Mapping[str, Sequence[float]]) -> Figure:
    """Return the loss of the first recipe by step, and how far each other recipe is from it, means of ten steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.3), width_ratios=(1, 2))
    names = list(curves)
    base = curves[names[0]]
    left.plot(steps, base, color="black")
    left.set(xlabel="step", title=f"loss of {names[0]}")
    for name, (color, style) in zip(names[1:], RECIPES, strict=False):
        gap = [mine - other for mine, other in zip(curves[name], base, strict=True)]
        right.plot(steps, gap, color=color, linestyle=style, label=name, linewidth=1.8)
    right.axhline(0, color="black", linewidth=0.8)
    right.set(xlabel="step", title=f"loss less {names[0]}'s")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@styled
def gaps_by_learning_rate(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the gap of each recipe to the first one of the same seed, by learning rate: a dot per seed.

    rows: recipe, lr, seed, and end: the mean loss of the last steps. Gray: how far seeds of the first recipe lie apart.
    """
    rates, seeds = (sorted({row[name] for row in rows}) for name in ("lr", "seed"))
    first, *recipes = dict.fromkeys(row["recipe"] for row in rows)
    end = {(row["recipe"], row["lr"], row["seed"]): row["end"] for row in rows}
    figure, axes = plt.subplots(1, len(rates), figsize=(WIDTH, 3.4), sharey=True)
    for ax, rate in zip(axes, rates, strict=True):
        reference = [end[first, rate, seed] for seed in seeds]
        spread = max(reference) - min(reference)
        ax.axhspan(-spread, spread, color=LIGHT, alpha=0.6, label=f"spread of {first}'s seeds")
        for position, (name, (color, _)) in enumerate(zip(recipes, RECIPES, strict=False)):
            gaps = [end[name, rate, seed] - base for seed, base in zip(seeds, reference, strict=True)]
            ax.plot([position] * len(gaps), gaps, "o", color=color, label=name)
        ax.set(title=f"learning rate {rate:g}", xlim=(-0.5, len(recipes) - 0.5), xticks=[])
        ax.axhline(0, color="black", linewidth=0.8)
    axes[0].set(ylabel=f"loss of the last 50 steps, less {first}'s")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@styled
def layer_errors(tables: Mapping[str, Mapping[str, Sequence[float]]], columns: Sequence[str]) -> Figure:
    """Return the relative errors of operands and matmuls (columns) of each layer, a panel per way to quantize."""
    rows = list(next(iter(tables.values())))
    figure, axes = plt.subplots(1, len(tables), figsize=(WIDTH, 1 + 0.27 * len(rows)), sharey=True)
    for ax, (name, table) in zip(axes, tables.items(), strict=True):
        ax.imshow(list(table.values()), cmap=ERRORS, vmin=0, vmax=MOST_ERROR, aspect="auto")
        for i, values in enumerate(table.values()):
            for j, value in enumerate(values):
                ink = ink_on(to_hex(ERRORS(value / MOST_ERROR)))
                ax.text(j, i, f"{value:.1%}", ha="center", va="center", fontsize=8, color=ink)
        ax.set(title=name, yticks=range(len(rows)))
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticklabels(rows)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    return figure


@styled
def losses_with_outliers(factors: Sequence[float], losses: Mapping[str, Sequence[float]]) -> Figure:
    """Return the loss of a model by the size of a planted outlier, a line per way to quantize; the first: none."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    for (name, values), (color, style), mark in zip(losses.items(), WAYS, "xosD", strict=True):
        ax.plot(factors, values, marker=mark, color=color, linestyle=style, label=name, markersize=5)
    power_of_two_axis(ax, "one channel is larger by")
    ax.set_ylabel("loss")
    ax.legend()
    return figure


@styled
def second_moment_losses(losses: Mapping[float, Mapping[str, Sequence[float]]]) -> Figure:
    """Return the loss by step with Adam's second moment stored in several ways, a panel per learning rate."""
    figure, axes = plt.subplots(1, len(losses), figsize=(WIDTH, 3.2), sharey=True)
    for ax, (rate, by_storage) in zip(axes, losses.items(), strict=True):
        for (name, curve), (color, style) in zip(by_storage.items(), WAYS, strict=True):
            ax.plot(curve, color=color, linestyle=style, label=name)
        ax.set(yscale="log", xlabel="step", title=f"learning rate {rate:g}")
    axes[0].set(ylabel="loss")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@styled
def spike_gaps(gaps: Mapping[str, Sequence[float]], spike: int = 4) -> Figure:
    """Return the loss minus BF16's loss by step after the switch to FP8, a line per kind of scales, and the spike."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    ax.axvline(spike, color=LIGHT, linewidth=4, label="the spike")
    for (name, values), (color, style) in zip(gaps.items(), (RECIPES[1], RECIPES[0], RECIPES[2]), strict=True):
        ax.plot(values, color=color, linestyle=style, label=name, linewidth=2)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xlabel="steps after the switch to FP8", ylabel="loss − BF16's loss")
    ax.legend()
    return figure
