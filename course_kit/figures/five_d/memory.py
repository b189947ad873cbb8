"""Figures of memory: each technique alone, by length of the sequence, formula beside measured."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from course_kit.figures.style import GRAY, KINDS, LIGHT, LIMIT, MEMORY, WIDTH, styled

GIB, MIB, GB = 2**30, 2**20, 1e9
Parts = Mapping[str, float]  # bytes by part of memory


def stacked(axes: Axes, x: float, parts: Parts, unit: int, width: float = 0.8, alpha: float = 1.0) -> float:
    """Draw the parts of a memory as one bar; return its height, in units."""
    bottom = 0.0
    for part, size in parts.items():
        style = {"color": MEMORY[part], "edgecolor": "white", "linewidth": 0.5, "alpha": alpha}
        axes.bar(x, size / unit, width, bottom=bottom, **style)  # type: ignore[arg-type]
        bottom += size / unit
    return bottom


def legend_of_parts(figure: Figure, parts: Parts, *others: Artist) -> None:
    """Name the colors of the parts above the figure."""
    handles: list[Artist] = [Patch(color=MEMORY[part], label=part) for part in parts]
    figure.legend(handles=[*handles, *others], loc="outside upper center", ncols=6, handlelength=1.2)


@styled
def memory_of_each_alone(needs: Mapping[str, Parts], limit_gb: float = 80) -> Figure:
    """Draw the memory that the fullest GPU needs with each technique alone, on a logarithmic axis.

    needs: bytes by part, by technique. limit_gb: the memory of a GPU, in GB.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 2.9))
    fits, exceeds = KINDS[0], LIGHT
    for y, parts in enumerate(needs.values()):
        total = sum(parts.values()) / GB
        axes.barh(y, total, 0.7, color=fits if total <= limit_gb else exceeds)
        for x, number in ((1.13, f"{total:,.0f}"), (1.32, f"{parts['activations'] / GB:,.1f}")):
            axes.text(x, y, number, ha="right", va="center", transform=axes.get_yaxis_transform())
    for x, head in ((1.13, "GB"), (1.32, "of these,\nactivations")):
        axes.text(x, -1.05, head, ha="right", va="center", transform=axes.get_yaxis_transform(), color=GRAY)
    axes.axvline(limit_gb, color=LIMIT, linestyle="--", linewidth=1)
    axes.text(limit_gb, -1.0, f" {limit_gb:.0f} GB, one H100", color=LIMIT, va="center")
    axes.set_yticks(range(len(needs)), list(needs))
    axes.set(xscale="log", xlim=(5, 12_000), ylim=(len(needs) - 0.5, -1.4), xlabel="GB on the fullest GPU")
    handles = [Patch(color=fits, label="fits"), Patch(color=exceeds, label="does not fit")]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, handlelength=1.2)
    return figure


@styled
def memory_by_sequence(
    memory: Mapping[str, Mapping[str, Mapping[int, Parts]]], published: Mapping[str, Mapping[int, float]]
) -> Figure:
    """Draw the memory of a GPU by sequence length: a column of panels per technique, a row per kind of recomputation.

    memory: bytes by part, by kind of recomputation, technique and tokens of the sequence. published: bytes of
    activations that another source draws in the first row, by technique and tokens; dotted.
    """
    techniques = list(next(iter(memory.values())))
    shape = len(memory), len(techniques)
    figure, panels = plt.subplots(*shape, figsize=(WIDTH, 4.4), sharex=True, sharey=True, squeeze=False)
    for row, (recompute, by_technique) in enumerate(memory.items()):
        for axes, (technique, by_length) in zip(panels[row], by_technique.items(), strict=True):
            for x, (tokens, parts) in enumerate(by_length.items()):
                states = stacked(axes, x, parts, GIB) - parts["activations"] / GIB
                if row == 0 and technique in published:
                    height = published[technique][tokens] / GIB
                    axes.bar(x, height, bottom=states, fill=False, edgecolor="black", linestyle=":")
            axes.axhline(80, color=LIMIT, linestyle="--", linewidth=1)
            axes.set_xticks(range(len(by_length)), [f"{tokens // 1024}k" for tokens in by_length])
            axes.set(ylim=(0, 160), yticks=range(0, 161, 40))
            if row == 0:
                axes.set_title(technique)
        panels[row, 0].set_ylabel(f"{recompute} recomputation\nGiB")
    dotted = Patch(fill=False, linestyle=":", label="as the playbook draws it")
    legend_of_parts(figure, parts, dotted, Line2D([], [], color=LIMIT, linestyle="--", label="80 GiB"))
    figure.supxlabel("tokens of the sequence", fontsize=9)
    return figure


@styled
def measured_memory(formulas: Mapping[str, Parts], measured: Mapping[str, Parts]) -> Figure:
    """Draw the memory of the fullest rank by technique: by the formula (pale, left) beside measured (right).

    Both: bytes by part, by technique; a technique may have no formula.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 3))
    for x, (name, parts) in enumerate(measured.items()):
        stacked(axes, x - 0.2, formulas.get(name, {}), MIB, 0.36, alpha=0.45)
        stacked(axes, x + 0.2, parts, MIB, 0.36)
    axes.set_xticks(range(len(measured)), list(measured))
    axes.set(ylabel="MiB on the fullest rank")
    pale = Patch(color=GRAY, alpha=0.45, label="formula, each left bar")
    legend_of_parts(figure, next(iter(measured.values())), pale)
    return figure
