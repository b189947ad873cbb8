"""Drawings: what the stages share out, a flat buffer and its shards, and when transfers travel."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_kit.figures.rectangles import arrow, drawing, lane, rectangle
from course_kit.figures.style import GRAY, LIGHT, MEMORY, PHASES, RANKS, WIDTH, styled

GATHER = PHASES["communication"]
SCATTER = to_hex([0.5 + part / 2 for part in to_rgb(GATHER)])  # reduce-scatter: the same color, half as strong
FORWARD, BACKWARD, OPTIMIZER = PHASES["forward"], PHASES["backward"], PHASES["optimizer"]
SIZES = {"parameters": 2, "gradients": 2, "optimizer states": 12}  # bytes per parameter
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer states": 1}  # the first stage that shards a part


@styled
def stages() -> Figure:
    """Return a drawing of what each of four ranks keeps of each part in stages 0 to 3: full, or a shard."""
    figure, axes = plt.subplots(1, 4, figsize=(WIDTH, 2.3), sharey=True)
    for stage, ax in enumerate(axes):
        left = 0.0
        for part, width in SIZES.items():
            for rank in range(4):
                shards = 4 if stage >= SHARDED_FROM[part] else 1
                start = left + (rank * width / 4 if shards == 4 else 0)
                ax.add_patch(Rectangle((left, rank - 0.35), width, 0.7, facecolor="white", edgecolor=LIGHT))
                ax.add_patch(Rectangle((start, rank - 0.35), width / shards, 0.7, color=MEMORY[part], linewidth=0))
            left += width + 0.4
        ax.set(title=f"stage {stage}", xlim=(-0.2, left), ylim=(3.6, -0.6), xticks=[])
        ax.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
        ax.tick_params(length=0)
        ax.spines[["left", "bottom"]].set_visible(False)
    figure.legend([Patch(color=MEMORY[part]) for part in SIZES], list(SIZES), loc="outside lower center", ncols=3)
    return figure


@styled
def flat_buffer() -> Figure:
    """Return a drawing of four tensors and padding in a flat buffer of 40 elements, cut into four equal shards."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2))
    drawing(ax, (-0.5, 41), (-1.7, 1.9))
    start = 0
    for i, (name, size) in enumerate({"weight 0": 15, "bias": 3, "weight 1": 16, "norm": 3, "pad": 3}.items()):
        rectangle(ax, start, 0.3, (size - 0.1, 0.7), name, LIGHT if name == "pad" else (GRAY, "#444444")[i % 2])
        start += size
    for rank in range(4):
        rectangle(ax, 10 * rank, -0.7, (9.9, 0.7), f"owned by rank {rank}", RANKS[rank])
    for cut in range(0, 41, 10):
        ax.text(cut, -1.3, f"{cut}", ha="center")
    ax.text(20, 1.35, "37 elements and 3 of padding", ha="center")
    return figure


@styled
def stage_1_step() -> Figure:
    """Return a drawing of what four ranks hold in a step of stage 1, from gradients to new parameters."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.9))
    drawing(ax, (-1.2, 18), (-1.3, 4.6))
    columns = {
        "own gradients": "full, of own batch",
        "reduce-scatter": "a shard of the mean",
        "update": "Adam on that shard,\nwith its states",
        "all-gather": "new parameters,\nfull again",
    }
    for k, (title, text) in enumerate(columns.items()):
        x = 4.8 * k
        ax.text(x + 1.6, 4.1, title, ha="center", weight="bold")
        ax.text(x + 1.6, -0.3, text, ha="center", va="top")
        for rank in range(4):
            for shard in range(4):
                other = ("#BBBBBB", "white", LIGHT, RANKS[shard])[k]
                color = RANKS[shard] if k and rank == shard else other
                edge = "#BBBBBB" if color == "white" else "white"
                corner = (x + 0.8 * shard, 2.95 - rank)
                ax.add_patch(Rectangle(corner, 0.75, 0.6, facecolor=color, edgecolor=edge))
        if k < 3:
            arrow(ax, (x + 3.5, 1.75), (x + 4.6, 1.75))
    for rank in range(4):
        ax.text(-0.2, 3.25 - rank, f"rank {rank}", ha="right", va="center")
    return figure


@styled
def two_buffers() -> Figure:
    """Return a drawing of stage 2: backward fills one buffer while the gradients in the other are sent."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.4))
    drawing(ax, (-1.7, 12), (-1.4, 2.3))
    for k in range(4):
        bucket, start = 3 - k, 2.4 * k
        lane(ax, 1.6, 0.6, [(BACKWARD, f"backward {bucket}", start, 2.4)])
        lane(ax, 0.6, 0.6, [(SCATTER, f"scatter {bucket}", start + 2.4, 2.1)])
        lane(ax, (-0.4, -1.2)[k % 2], 0.6, [((LIGHT, "#BBBBBB")[k % 2], f"gradients of {bucket}", start, 4.5)])
    for y, name in ((1.9, "compute"), (0.9, "network"), (-0.1, "buffer 0"), (-0.9, "buffer 1")):
        ax.text(-0.15, y, name, ha="right", va="center")
    return figure


@styled
def hidden_gather() -> Figure:
    """Return a drawing of stage 1's all-gather before the next forward, and under it, layer by layer."""
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 3), sharex=True)
    compute = [(BACKWARD, f"B{2 - k}", 1.5 * k, 1.5) for k in range(3)] + [(OPTIMIZER, "update, all shards", 6, 3)]
    network = [(SCATTER, f"RS {2 - k}", 1.5 * k + 1.5, 1.4) for k in range(3)]
    after = [(FORWARD, f"F{k}", 13.2 + k, 1) for k in range(3)]
    under = [(FORWARD, f"F{k}", 10.4 + 1.4 * k, 1) for k in range(3)]
    layers = [(GATHER, f"AG {k}", 9 + 1.4 * k, 1.4) for k in range(3)]
    cases: dict[str, tuple[list, list]] = {
        "plain": (compute + after, [*network, (GATHER, "all-gather, everything", 9, 4.2)]),
        "the first layers first; each layer waits for its own": (compute + under, network + layers),
    }
    for ax, (title, lanes) in zip(axes, cases.items(), strict=True):
        drawing(ax, (0, 16.4), (-1.1, 0.9))
        ax.set_title(title)
        for row, bars in enumerate(lanes):
            lane(ax, -row, 0.8, bars)
    return figure


@styled
def stage_3_step() -> Figure:
    """Return a drawing of a step of stage 3 with three units: compute, network, and when each unit is unsharded."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    drawing(ax, (-2.7, 14.2), (-2.3, 1.5))
    compute = [(FORWARD, f"F{k}", 1 + 1.4 * k, 1.4) for k in range(3)]
    gathers = [(GATHER, f"AG {k}", start, 1) for k, start in ((0, 0), (1, 1), (2, 2.4), (1, 5.3), (0, 8.9))]
    scatters = [(SCATTER, f"RS {2 - k}", 7.9 + 2.6 * k, 1) for k in range(3)]
    lanes: dict[str, list] = {
        "compute": [*compute, *((BACKWARD, f"B{2 - k}", 5.3 + 2.6 * k, 2.6) for k in range(3))],
        "network": gathers + scatters,
        "unit 0 unsharded": [(LIGHT, "", 0, 2.4), (LIGHT, "", 8.9, 4.2)],
        "unit 1 unsharded": [(LIGHT, "", 1, 2.8), (LIGHT, "", 5.3, 5.2)],
        "unit 2 unsharded": [(LIGHT, "kept: its backward comes at once", 2.4, 5.5)],
    }
    for row, name in enumerate(lanes):
        y = 0.8 - 0.75 * row
        ax.text(-0.2, y + 0.27, name, ha="right", va="center")
        lane(ax, y, 0.55, lanes[name])
    return figure
