"""Memory by stage, computed and measured; norms, steps over time, an arena's addresses, and what the gathers cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_kit.figures.rectangles import legend_below, stacked
from course_kit.figures.style import (
    GRAY,
    KINDS,
    LIMIT,
    MEMORY,
    PHASES,
    RANKS,
    WIDTH,
    limit_line,
    readable,
    styled,
)
from course_kit.figures.timelines import draw_spans
from course_kit.figures.zero.drawings import GATHER, SCATTER
from course_kit.labs.zero import STATES, arena_gib, step_spans
from course_lib.recompute.profiling import Span
from course_lib.single_gpu.memory import POLICIES, gpt_activation_bytes, param_count, state_bytes
from course_lib.single_gpu.model import PRESETS
from course_lib.single_gpu.profile import MemoryProfile, category
from course_lib.zero import defragmentation

GiB, MiB = 2**30, 2**20
STAGES = [f"stage {stage}" for stage in range(4)]
COLORS = {name: PHASES[name] for name in ("forward", "backward", "wait")} | {
    "update": PHASES["optimizer"],
    "gloo:all_reduce": SCATTER,  # gloo makes its reduce-scatter out of an all-reduce
    "gloo:all_gather": GATHER,
}
LARGEST_GPU = 192  # GiB: the last choice of the widget


@styled
def memory_by_rank(states: Sequence[Mapping[str, int]]) -> Figure:
    """Return the MiB that each rank keeps between two steps, by part. states: by rank, the bytes of each part."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.5))
    stacked(ax, range(len(states)), {part: [rank[part] / MiB for rank in states] for part in STATES}, across=True)
    ax.set_yticks(range(len(states)), [f"rank {rank}" for rank in range(len(states))])
    ax.set_xlabel("MiB kept between two steps")
    legend_below(figure, ax)
    return figure


@styled
def memory_by_stage(params: int, ranks: int = 8, gpu_gib: float = 80) -> Figure:
    """Return the GB per rank of this many parameters in each stage, on `ranks` ranks, and by number of ranks."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.1))
    by_stage = [state_bytes(params, "bf16", stage, ranks) for stage in range(4)]
    total = stacked(left, range(4), {part: [by[part] / 1e9 for by in by_stage] for part in STATES}, across=True)
    for stage, size in enumerate(total):
        left.text(size, stage, f" {size:g}", va="center")
    left.set_yticks(range(4), STAGES)
    left.set(xlabel=f"GB per rank, on {ranks} ranks", xlim=(0, 1.18 * max(total)))
    many = 2 ** np.arange(11)
    for stage in range(4):
        each = [sum(state_bytes(params, "bf16", stage, int(n)).values()) / 1e9 for n in many]
        right.plot(many, each, color=KINDS[stage])
        right.text(1200, each[-1], STAGES[stage], color=readable(KINDS[stage]), va="bottom")
    gpu = gpu_gib * GiB / 1e9
    right.axhline(gpu, color=LIMIT, linestyle="--", linewidth=1)
    right.text(16, gpu, f"a GPU: {gpu_gib:g} GiB", color=LIMIT, va="bottom")
    right.set_xscale("log", base=2)
    right.set_xticks(many[::2], many[::2])
    right.set(xlabel="ranks", ylabel="GB per rank", ylim=(0, 1.18 * max(total)), xlim=(1, 9000))
    legend_below(figure, left)
    return figure


@styled
def clipping(runs: Sequence[Mapping[str, Sequence[float]]]) -> Figure:
    """Return a run's loss, the norm it clipped by, and the cosine of update and gradient by step, a line per rank."""
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.8))
    titles = {
        "loss": "loss on own batch",
        "used": "norm it clipped by",
        "cosine": "cosine of update\nand gradient (all ranks)",
    }
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        for rank, run in enumerate(runs):
            ax.plot(run[name], color=RANKS[rank], linewidth=2.5 - 0.5 * rank, label=f"rank {rank}")
        ax.set(title=title, xlabel="step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[2].set_ylim(0, 1.05)
    legend_below(figure, axes[0])
    return figure


@styled
def step_over_time(all_spans: list[Span], title: str, with_next_forward: bool = False) -> Figure:
    """Return phases and communication of the second of three profiled steps, of a rank.

    with_next_forward: and of the forward after it.
    """
    shown, length = step_spans(all_spans, set(COLORS), with_next_forward)
    figure, ax = plt.subplots(figsize=(WIDTH, 2.6))
    draw_spans(ax, shown, COLORS, ("forward", "backward", "update", "wait"), length)
    names = {"reduce-scatter": SCATTER, "all-gather": GATHER, "update": PHASES["optimizer"], "wait": PHASES["wait"]}
    for name, color in names.items():
        if all(COLORS[span.name] != color for span in shown):
            continue
        ax.bar(0, 0, color=color, label=name)
    ax.set(title=title, xlim=(0, length))
    legend_below(figure, ax)
    return figure


@styled
def gradient_memory(
    levels: Mapping[int, tuple[Sequence[int], int]], by_depth: Mapping[int, Mapping[int, int]]
) -> Figure:
    """Return MiB of gradients in stages 1 and 2, over a backward and by number of layers.

    levels[stage]: bytes in use after each gradient, and bytes reserved; by_depth[stage][layers]: bytes that hold full
    gradients.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3))
    for stage, (in_use, reserved) in levels.items():
        left.plot(np.array(in_use) / MiB, color=KINDS[stage], label=f"stage {stage}")
        left.axhline(reserved / MiB, color=KINDS[stage], linestyle=":", label=f"stage {stage}, reserved")
        depths = list(by_depth[stage])
        right.plot(depths, [size / MiB for size in by_depth[stage].values()], "o-", color=KINDS[stage])
        right.set_xticks(depths)
    left.set(xlabel="gradients made, in the order of backward", ylabel="MiB of gradients in use", ylim=(0, None))
    right.set(xlabel="layers", ylabel="MiB for full gradients", ylim=(0, None))
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, left)
    return figure


@styled
def measured_by_stage(measured: Mapping[tuple[int, int], tuple[Mapping[str, int], int, int]]) -> Figure:
    """Return the MiB that a rank keeps by stage, a panel per number of ranks; black lines: the formula.

    measured[stage, ranks]: bytes of each part, other bytes, number of parameters.
    """
    counts = sorted({n for _, n in measured})
    figure, axes = plt.subplots(1, len(counts), figsize=(WIDTH, 2.7), sharex=True, sharey=True)
    for ax, n in zip(axes, counts, strict=True):
        saved = [dict(measured[stage, n][0]) for stage in range(4)]
        names = {part: part for part in STATES} | {"temporary": "buffers"}
        parts = {part: [by.get(name, 0) / MiB for by in saved] for part, name in names.items()}
        stacked(ax, range(4), parts, across=True)
        for stage in range(4):
            size = sum(state_bytes(measured[stage, n][2], "bf16", stage, n).values()) / MiB
            ax.plot([size, size], [stage - 0.45, stage + 0.45], "k", linewidth=1.5)
        ax.set(title=f"{n} rank{'s' * (n > 1)}", xlabel="MiB on rank 0")
    axes[0].set_yticks(range(4), STAGES)
    handles, _ = axes[0].get_legend_handles_labels()
    figure.legend(handles, [*STATES, "buffers"], loc="outside lower center", ncols=4)
    return figure


def addresses(axes: Axes, profile: MemoryProfile, title: str) -> None:
    """Draw a profile's blocks of 4 MiB or more: address against time, which counts births and deaths."""
    lives = profile.allocations
    order = {moment: i for i, moment in enumerate(sorted({m for a in lives for m in (a.born, a.died)}))}
    blocks: dict[str, list] = {name: [] for name in ("parameters", "gradients", "activations", "temporary")}
    for a, (address, size) in zip(lives, defragmentation.replay(lives), strict=True):
        if size >= 4 * MiB:
            left, right, low, high = order[a.born], order[a.died], address / GiB, (address + size) / GiB
            blocks[category(a)].append([(left, low), (left, high), (right, high), (right, low)])
    for name, corners in blocks.items():
        axes.add_collection(PolyCollection(corners, color=MEMORY[name], linewidth=0.6, label=name))
    axes.axhline(arena_gib(profile)[0], color="black", linestyle=":", label="alive at most")
    axes.set(title=title, xlabel="time, in births and deaths", xlim=(0, len(order)))


@styled
def arenas(cures: Mapping[str, MemoryProfile]) -> Figure:
    """Return the addresses of blocks over time in the first and the last profile, and each one's smallest arena.

    cures: profiles by what has a buffer of its own in them.
    """
    names = list(cures)
    figure, axes = plt.subplot_mosaic("AB;CC", figsize=(WIDTH, 5.2), height_ratios=[3, 1.3])
    alive, needed = np.array([arena_gib(profile) for profile in cures.values()]).T
    for ax, name, title in zip(
        "AB", (names[0], names[-1]), ("as it comes", "gradients and checkpoints in buffers"), strict=True
    ):
        addresses(axes[ax], cures[name], title)
        axes[ax].set_ylim(0, 1.05 * max(needed))
    axes["A"].set_ylabel("address, GiB")
    bars = axes["C"].barh(names, needed, color=KINDS[0], label="arena needed")
    axes["C"].barh(names, alive, color=GRAY, label="of it alive at most")
    axes["C"].bar_label(bars, [f" {n / a - 1:+.1%}" for n, a in zip(needed, alive, strict=True)])
    axes["C"].set(xlim=(0, 1.15 * max(needed)), xlabel="GiB", ylabel="in a buffer")
    axes["C"].invert_yaxis()
    axes["C"].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    legend_below(figure, axes["B"])
    return figure


@styled
def fits_by_stage(preset: str, lengths: Sequence[int], gpus: int = 8, gpu_gib: float = 80) -> Figure:
    """Return the GiB of a model on each GPU by tokens in a sequence, a panel per stage; selective recomputation."""
    shape = PRESETS[preset]
    saved = [gpt_activation_bytes(shape.layers, shape.hidden, shape.heads, 1, n, "selective") / GiB for n in lengths]
    figure, axes = plt.subplots(1, 4, figsize=(WIDTH, 3.2), sharey=True)
    for stage, ax in enumerate(axes):
        states = {part: size / GiB for part, size in state_bytes(param_count(shape), "bf16", stage, gpus).items()}
        stacked(ax, range(len(lengths)), states | {"activations": saved})
        ax.set(title=f"stage {stage}\nstates {sum(states.values()):.1f} GiB", xlabel="tokens")
        ax.set_xticks(range(len(lengths)), [f"{n // 1024}k" for n in lengths])
        ax.axhline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1)
    limit_line(axes[3], gpu_gib, "a GPU")
    axes[0].set_ylabel(f"GiB on each of {gpus} GPUs")
    legend_below(figure, axes[0])
    return figure


@styled
def states_by_stage(preset: str = "llama3-8B", gpus: int = 8, policy: str = "bf16", gpu_gib: float = 80) -> Figure:
    """Return the GiB per GPU of a model's states in each stage. The axis depends on the model alone."""
    params = param_count(PRESETS[preset])
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    by_stage = [state_bytes(params, policy, stage, gpus) for stage in range(4)]
    totals = stacked(ax, range(4), {part: [by[part] / GiB for by in by_stage] for part in STATES}, across=True)
    for stage, size in enumerate(totals):
        ax.text(size, stage, f" {size:,.1f}", va="center")
    ax.axvline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1)
    ax.set_title(f"{params / 1e9:.2f} billion parameters, {gpus} GPUs of {gpu_gib:g} GiB each")
    ax.set_yticks(range(4), STAGES)
    largest = max(sum(state_bytes(params, each).values()) for each in POLICIES) / GiB
    ax.set(xlabel="GiB per GPU", xlim=(0, 1.15 * max(largest, LARGEST_GPU)))
    legend_below(figure, ax)
    return figure


@styled
def gather_over_forward(ratios: Mapping[int, Mapping[int, float]]) -> Figure:
    """Return the time of stage 3's all-gather over that of forward. ratios: by tokens per GPU, by number of GPUs."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 3))
    for (tokens, by_gpus), style, color in zip(ratios.items(), ("o-", "s-", "^-"), KINDS, strict=False):
        gpus, values = list(by_gpus), list(by_gpus.values())
        ax.plot(gpus, values, style, color=color, markersize=4)
        ax.text(1.1 * gpus[-1], values[-1], f"{tokens:,} tokens per GPU", color=readable(color), va="center")
    ax.axhline(1, color=GRAY, linestyle="--", linewidth=1)
    ax.text(gpus[0], 1.05, "1: just hidden", color=GRAY, va="bottom")
    ax.set_xscale("log", base=2)
    ax.set_xticks(gpus, gpus)
    ax.set(xlabel="GPUs (H100, 8 per node)", ylabel="all-gather / forward", ylim=(0, None))
    return figure
