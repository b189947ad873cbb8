"""Choices of routers while they are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_kit.figures.style import GRAY, KINDS, WIDTH, styled
from course_kit.labs.expert_parallel import dropped, unevenness

SHADES = [f"{0.25 + 0.09 * position:.2f}" for position in range(8)]  # grays of the experts, but for the busiest
REMEDIES = [(KINDS[2], "-"), (KINDS[0], "--"), (KINDS[3], ":")]
Training = tuple[np.ndarray, np.ndarray, np.ndarray]  # losses [steps], choices [steps, layers, E], gradient norms


def draw_loads(ax: Axes, counts: np.ndarray, top: float | None = None) -> None:
    """Draw the choices of each expert [steps, E], stacked over the steps, the expert that ends as the busiest in color.

    top: the end of the axis.
    """
    busiest = int(counts[-10:].mean(0).argmax())
    order = [busiest, *(expert for expert in range(counts.shape[1]) if expert != busiest)]
    colors = [KINDS[0], *SHADES[: len(order) - 1]]
    ax.stackplot(range(1, len(counts) + 1), counts.T[order], colors=colors, antialiased=False)
    ax.set(ylim=(0, top or counts[0].sum()), xlim=(1, len(counts)))


@styled
def collapse(training: Training) -> Figure:
    """Return the choices of each expert of two layers by step, and the shares of the second one's at the end."""
    counts = training[1]
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 3), width_ratios=(1.3, 1.3, 1))
    for layer, ax in enumerate(axes[:2]):
        draw_loads(ax, counts[:, layer])
        ax.set(xlabel="step", title=f"layer {layer}: choices by expert\n(color: the busiest)")
    share = counts[-10:, 1].mean(0) / counts[0, 0].sum()
    experts = len(share)
    axes[2].bar(range(experts), np.sort(share)[::-1], color=[KINDS[0]] + [GRAY] * (experts - 1))
    axes[2].axhline(1 / experts, color="black", linestyle="--", linewidth=1)
    axes[2].set(xlabel="expert, busiest first", title="layer 1, last 10 steps", ylabel="share")
    axes[2].set_xticks(range(experts))
    return figure


@styled
def lab_runs(runs: Mapping[str, Training]) -> Figure:
    """Return losses, choices of layer 1 and norms of the router's gradient of the lab's runs, by letter."""
    figure, axes = plt.subplots(3, len(runs), figsize=(WIDTH, 5.4), sharex=True, sharey="row")
    for column, (letter, (losses, counts, norms)) in enumerate(runs.items()):
        steps = range(1, len(losses) + 1)
        axes[0, column].plot(steps, losses, color="black")
        axes[0, column].set_title(f"run {letter}")
        draw_loads(axes[1, column], counts[:, 1], 2048)
        axes[2, column].semilogy(steps, norms.mean(1) + 1e-9, color=KINDS[0])
        axes[2, column].set_xlabel("step")
    for row, word in enumerate(("loss", "choices of layer 1", "router's gradient")):
        axes[row, 0].set_ylabel(word)
    return figure


@styled
def remedies(trainings: Mapping[str, Training]) -> Figure:
    """Return the choices of two layers by step for each training, and below unevenness and loss of all of them."""
    figure, axes = plt.subplot_mosaic("001122;334455;UUULLL", figsize=(WIDTH, 6.4))
    for column, (name, (_, counts, _)) in enumerate(trainings.items()):
        for layer in range(2):
            ax = axes[f"{column + 3 * layer}"]
            draw_loads(ax, counts[:, layer])
            ax.set(yticks=[], title="" if layer else name, xlabel="step" if layer else "")
    for layer in range(2):
        axes[f"{3 * layer}"].set_ylabel(f"layer {layer}: choices")
    left, right = axes["U"], axes["L"]
    for (name, (losses, counts, _)), (color, style) in zip(trainings.items(), REMEDIES, strict=True):
        steps = range(1, len(losses) + 1)
        left.plot(steps, unevenness(counts), color=color, linestyle=style, label=name)
        right.plot(steps[9:], np.convolve(losses, np.ones(10) / 10, "valid"), color=color, linestyle=style)
    left.set(title="busiest over even share", ylim=(1, 6), xlabel="step")
    right.set(title="loss, mean of 10 steps", xlabel="step")
    left.legend()
    return figure


@styled
def dropped_choices(trainings: Mapping[str, Training], factors: Sequence[float]) -> Figure:
    """Return the share of choices that capacity factors would drop, in the last 20 steps of each training."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.8))
    for (name, (_, counts, _)), (color, style), mark in zip(trainings.items(), REMEDIES, "osD", strict=True):
        lost = [100 * np.mean([dropped(step, factor) for step in counts[-20:]]) for factor in factors]
        ax.plot(factors, lost, marker=mark, linestyle=style, color=color, label=name)
    ax.set(xlabel="capacity factor c", ylabel="% of choices dropped", ylim=0)
    ax.legend()
    return figure
