"""Figures by axis: the map of the ranks, one layer under all techniques, bytes by axis and by order of the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from course_kit.figures.style import GRAY, KINDS, LIGHT, RANKS, WIDTH, ink_on, readable, styled

KB = 1e3
NODE = 8  # GPUs in a row of the map
AXES = {  # of a layout; the replicas are dp x cp, and what belongs to no axis alone is "other"
    "tp": KINDS[0],
    "cp": KINDS[1],
    "pp": KINDS[2],
    "dp": KINDS[3],
    "replicas": KINDS[3],
    "ep": RANKS[3],
    "other": GRAY,
}


@styled
def rank_map(coordinates: Sequence[Mapping[str, int]], gpu: int = 0) -> Figure:
    """Draw all GPUs as squares, a node of eight per row, and color those that share a group with the chosen one.

    coordinates: of each rank, its index along each axis, {"dp": 0, "pp": 1, "cp": 0, "tp": 1}. A colored GPU differs
    from the chosen one along one axis only; gray ones differ along several.
    """
    nodes = -(-len(coordinates) // NODE)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.7 + 0.75 * nodes))
    reference, black = coordinates[gpu], KINDS[4]
    for rank, indices in enumerate(coordinates):
        differs = [axis for axis in reference if reference[axis] != indices[axis]]
        color = black if not differs else AXES[differs[0]] if len(differs) == 1 else LIGHT
        x, y = rank % NODE, rank // NODE
        axes.add_patch(Rectangle((x + 0.03, y + 0.04), 0.94, 0.92, color=color))
        words = [f"{axis[0]}{index}" for axis, index in indices.items()]
        text = f"{' '.join(words[:2])}\n{' '.join(words[2:])}"
        axes.text(x + 0.13, y + 0.5, str(rank), va="center", fontsize=11, color=ink_on(color), weight="bold")
        axes.text(x + 0.7, y + 0.5, text, ha="center", va="center", color=ink_on(color))
    axes.set_yticks([y + 0.5 for y in range(nodes)], [f"node {y}" for y in range(nodes)])
    axes.set(xlim=(0, NODE), ylim=(nodes, 0), xticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles = [Patch(color=black, label=f"GPU {gpu}")]
    handles += [Patch(color=AXES[axis], label=f"same {axis} group") for axis in ("tp", "cp", "pp", "dp")]
    handles += [Patch(color=LIGHT, label="several differ")]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, handlelength=1.2)
    return figure


def layer_rows(shapes: Mapping[str, list[int]], weights: Mapping[str, list[int]], elements: int) -> list[tuple]:
    """Return the rows of `layer_under_all`, from the input: (axis, module, its output, its weight), or, without a
    weight, (axis, what is sent).
    """

    def weight(name: str) -> str:
        return f"{name.split('.')[-2]} {weights[name]}"

    return [
        ("pp", f"P2P from the stage before: {elements:,} elements, [b, s / (cp·tp), h]"),
        ("other", "attention_norm", shapes["attention_norm"], weight("attention_norm.weight")),
        ("tp", "all-gather (g): the tokens of all tp ranks"),
        ("tp", "q, k, v", f"q {shapes['q']}, k {shapes['k']}", weight("attention.q_proj.weight")),
        ("cp", "ring: keys and values of the other tokens"),
        ("cp", "attention", shapes["core"], ""),
        ("tp", "o_proj", shapes["o_proj"], weight("attention.o_proj.weight")),
        ("tp", "reduce-scatter (g*): sums, of the rank's own tokens"),
        ("other", "mlp_norm", shapes["mlp_norm"], weight("mlp_norm.weight")),
        ("other", "router", shapes["router"], weight("mlp.router.weight")),
        ("tp", "all-gather (g), missing in the playbook's picture"),
        ("ep", "all-to-all: tokens to their experts"),
        ("ep", "experts", f"{shapes['experts']}, the rows received", weight("mlp.experts.up_proj.weight")),
        ("ep", "all-to-all, back"),
        ("tp", "reduce-scatter (g*)"),
        ("other", "mlp", shapes["mlp"], ""),
    ]


@styled
def layer_under_all(shapes: Mapping[str, list[int]], weights: Mapping[str, list[int]], elements: int) -> Figure:
    """Draw a layer with a mixture on one rank, from the top: its modules as squares, and what is sent between them.

    shapes: the local output shape of each module; weights: the local shapes of the weights, by name; elements: of a
    message between stages.
    """
    rows = layer_rows(shapes, weights, elements)
    figure, axes = plt.subplots(figsize=(WIDTH, 5.6))
    left, right = 2.6, 4.6
    axes.plot([(left + right) / 2] * 2, [0, len(rows) - 1], color=LIGHT, linewidth=2, zorder=0)
    for y, (axis, name, *sizes) in enumerate(rows):
        color = AXES[axis]
        if sizes:
            axes.add_patch(Rectangle((left, y - 0.4), right - left, 0.8, color=color))
            axes.text((left + right) / 2, y, name, ha="center", va="center", color=ink_on(color))
            axes.text(right + 0.15, y, str(sizes[0]), va="center")
            axes.text(left - 0.15, y, sizes[1], ha="right", va="center", color=GRAY)
        else:
            axes.plot((left + right) / 2, y, marker="D", color=color, markersize=7)
            axes.text((left + right) / 2 + 0.25, y, name, va="center", color=readable(color))
    handles: list = [Patch(color=AXES[axis], label=axis) for axis in ("tp", "cp", "ep")]
    handles += [Patch(color=AXES["other"], label="all elements of its tokens")]
    handles += [Line2D([], [], color=AXES["pp"], marker="D", linestyle="", label="pp")]
    handles += [Line2D([], [], color=GRAY, marker="D", linestyle="", label="sent")]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, handlelength=1.2)
    axes.text(left - 0.15, -0.9, "local weight", ha="right", va="center", color=GRAY)
    axes.text(right + 0.15, -0.9, "local output", va="center", color=GRAY)
    axes.set(xlim=(0, 9), ylim=(len(rows) - 0.5, -1.3))
    axes.axis("off")
    return figure


@styled
def bytes_by_axis(sent: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw the bytes that a rank sends over each axis in a step, one bar per layout. sent: bytes by axis, by layout."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.3 * len(sent)))
    for y, sizes in enumerate(sent.values()):
        left = 0.0
        for name, size in sizes.items():
            axes.barh(y, size / KB, 0.7, left=left, color=AXES[name], edgecolor="white", linewidth=0.5)
            left += size / KB
    axes.set_yticks(range(len(sent)), list(sent))
    axes.set(xlabel="kB that rank 0 sends in a step")
    axes.invert_yaxis()
    handles = [Patch(color=AXES[name], label=name) for name in next(iter(sent.values()))]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, handlelength=1.2)
    return figure


@styled
def inter_node_traffic(crossing: Mapping[tuple[str, ...], Sequence[int]], total: int, sizes: Sequence[int]) -> Figure:
    """Draw the bytes of a step that leave a node, for each order of the axes, the fewest on top.

    crossing: bytes for each size of a node, by order (outermost axis first); total: the bytes of the step; sizes:
    ranks per node.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.4 * len(crossing)))
    orders = sorted(crossing, key=lambda order: tuple(crossing[order]))
    for number, (size, color) in enumerate(zip(sizes, KINDS, strict=False)):
        positions = [y + 0.4 * number - 0.2 for y in range(len(orders))]
        values = [crossing[order][number] for order in orders]
        label = f"nodes of {size} ranks"
        axes.barh(positions, [value / KB for value in values], 0.38, color=color, label=label)
        for y, value in zip(positions, values, strict=True):
            axes.text(value / KB, y, f" {value / total:.0%}", va="center")
    axes.set_yticks(range(len(orders)), [" > ".join(order) for order in orders])
    axes.set(xlabel="kB that leave a node in a step", ylabel="axes, outermost first")
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=len(sizes))
    return figure
