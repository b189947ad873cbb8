"""Parts of a step's time and memory: groups of the planner's parts, with one color each; bars by layout and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_kit.figures.style import (
    BLUE,
    BROWN,
    GREEN,
    KINDS,
    LIGHT,
    LIMIT,
    MEMORY,
    ORANGE,
    PHASES,
    PURPLE,
    WIDTH,
    styled,
)
from course_lib.best_config.planner import Estimate

GIB = 2**30
TIME = {  # a group: its parts of `Estimate.time`; each color is that of the same thing in the other figures
    "matmuls": ("matrices", "output layer"),
    "attention": ("attention",),
    "other kernels": ("other kernels",),
    "tensor, context parallel": ("tensor parallel", "context parallel"),
    "gradient sync": ("gradients",),
    "optimizer": ("optimizer",),
    "bubble, transfers": ("bubble", "transfers"),
    "host, stalls": ("launch", "stalls", "step"),
}
TIME_COLORS = dict(
    zip(TIME, (BLUE, PHASES["weight gradient"], BROWN, PURPLE, ORANGE, GREEN, LIGHT, KINDS[4]), strict=True)
)
MEMORY_COLORS = {name: color for name, color in MEMORY.items() if name != "temporary"}
MEMORY_COLORS |= {"logits": PHASES["weight gradient"], "other": BROWN}


def time_groups(parts: Mapping) -> dict[str, list[str]]:
    """Return the parts of a step's time by group; a part of no group, such as an exchange of experts, is by itself
    among the exchanges.
    """
    known = {name for names in TIME.values() for name in names}
    groups = {group: [name for name in names if name in parts] for group, names in TIME.items()}
    groups["tensor, context parallel"] += [name for name in parts if name not in known]
    return groups


def memory_groups(parts: Mapping) -> dict[str, list[str]]:
    """Return the parts of a memory by group: those with a color of their own, and the others."""
    groups = {name: [name] for name in MEMORY_COLORS if name in parts}
    return groups | {"other": [name for name in parts if name not in groups]}


def in_groups(parts: Mapping, groups: Mapping[str, Sequence[str]], rows: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the sums [rows] of the parts of each group, for these rows; without groups that are 0 in all rows."""
    sums = {
        group: sum((np.asarray(parts[name])[rows] for name in names), np.zeros(len(rows)))
        for group, names in groups.items()
    }
    return {group: values for group, values in sums.items() if values.max() > 0}


@styled
def memory_of_layouts(estimates: Mapping[str, Estimate]) -> Figure:
    """Draw the memory of the fullest GPU by part, one bar per layout, and the usable memory. estimates: by layout."""
    figure, axes = plt.subplots(figsize=(WIDTH, 1 + 0.28 * len(estimates)))
    used: list[str] = []
    for y, each in enumerate(estimates.values()):
        left = 0.0
        for group, names in memory_groups(each.memory).items():
            size = sum(float(each.memory[name]) for name in names) / GIB
            axes.barh(y, size, 0.75, left=left, color=MEMORY_COLORS[group], edgecolor="white", linewidth=0.5)
            used += [group] if size > 0 and group not in used else []
            left += size
        axes.text(1.06, y, f"{left:,.0f}", ha="right", va="center", transform=axes.get_yaxis_transform())
    usable = float(each.usable_bytes) / GIB
    axes.axvline(usable, color=LIMIT, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(estimates)), list(estimates))
    axes.set(xlabel=f"GiB on the fullest GPU; dashed: usable, {usable:.0f} GiB")
    axes.invert_yaxis()
    handles = [Patch(color=MEMORY_COLORS[group], label=group) for group in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, handlelength=1.2)
    return figure


@styled
def step_shares(estimates: Mapping[str, Mapping[int, Estimate]]) -> Figure:
    """Draw the shares of a step by part and number of nodes, a panel per layout. estimates: by layout and nodes."""
    figure, panels = plt.subplots(1, len(estimates), figsize=(WIDTH, 3.5), sharey=True)
    for axes, (layout, by_nodes) in zip(panels, estimates.items(), strict=True):
        bottom = np.zeros(len(by_nodes))
        for group, names in TIME.items():
            shares = [sum(float(e.time[name]) for name in names) / float(e.step_s) for e in by_nodes.values()]
            heights = 100 * np.array(shares)
            color = TIME_COLORS[group]
            style = {"color": color, "edgecolor": "white", "linewidth": 0.5, "label": group}
            axes.bar(range(len(by_nodes)), heights, bottom=bottom, **style)
            bottom = bottom + heights
        axes.set_xticks(range(len(by_nodes)), [f"{n}\n{float(e.mfu):.0%}" for n, e in by_nodes.items()])
        axes.set(title=layout, xlabel="nodes, and MFU below")
    panels[0].set(ylabel="% of a step")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, handlelength=1.2)
    return figure
