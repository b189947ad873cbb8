"""How long experts take, beside a dense MLP and by the way they are computed, and how many parameters they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from course_kit.figures.style import KINDS, LIGHT, WIDTH, styled

WAYS = {"loop": (KINDS[2], "o"), "batched": (KINDS[1], "s"), "grouped": (KINDS[0], "D")}


@styled
def dense_or_experts(millions: Sequence[float], dense_ms: Sequence[float], sparse_ms: Sequence[float]) -> Figure:
    """Return the ms of a forward and backward by millions of parameters: a dense MLP, and experts (from the second)."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.8))
    ax.plot(millions, dense_ms, "o-", color=KINDS[2], label="dense: every token uses all")
    ax.plot(millions[1:], sparse_ms, "s-", color=KINDS[0], label="experts: every token uses two")
    ax.set(xlabel="million parameters", ylabel="ms", ylim=0)
    ax.legend()
    return figure


@styled
def ways_to_compute(times_ms: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Figure:
    """Return the ms of three ways to compute experts, a panel per routing: {title: {experts: {way: ms}}}."""
    figure, axes = plt.subplots(1, len(times_ms), figsize=(WIDTH, 3))
    for ax, (title, by_number) in zip(axes, times_ms.items(), strict=True):
        for name, (color, mark) in WAYS.items():
            ax.plot(list(by_number), [each[name] for each in by_number.values()], f"{mark}-", color=color, label=name)
        ax.set(xlabel="experts", title=title, xscale="log", yscale="log", ylim=(1, None))
        ax.set_xticks(list(by_number), [f"{number}" for number in by_number])
        ax.xaxis.set_minor_locator(NullLocator())
    axes[0].set_ylabel("ms")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


@styled
def parameters(counted: Mapping[str, tuple[int, int]]) -> Figure:
    """Return the parameters of some models, in total and active for a token: {name: (total, active)}."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    for position, (total, active) in enumerate(counted.values()):
        for shift, value, color, name in (
            (-0.2, total, LIGHT, "in total"),
            (0.2, active, KINDS[0], "active for a token"),
        ):
            ax.bar(position + shift, value / 1e9, 0.4, color=color, label=None if position else name)
            ax.text(position + shift, value / 1e9, f"{value / 1e9:.1f}", ha="center", va="bottom")
    ax.set(ylabel="billion parameters", ylim=(0, 1.15 * max(total for total, _ in counted.values()) / 1e9))
    ax.set_xticks(range(len(counted)), list(counted))
    ax.legend(loc="upper left")
    return figure
