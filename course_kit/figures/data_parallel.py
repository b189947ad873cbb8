"""Figures of notebook 04: replicas, buckets, and which transfers hide behind backward."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from course_kit.figures.rectangles import rectangle
from course_kit.figures.style import (
    GRAY,
    KINDS,
    LIGHT,
    LIMIT,
    MEMORY,
    PHASES,
    RANKS,
    WIDTH,
    ink_on,
    limit_line,
    styled,
)
from course_kit.labs.collectives import published
from course_lib.data_parallel import replicas
from course_lib.single_gpu.memory import gpt_activation_bytes, param_count, state_bytes
from course_lib.single_gpu.model import PRESETS

GiB = 2**30
PEAK = 989.5e12  # FLOP/s of an H100 in BF16
LATENCY, CARRY = 0.45, 0.2  # in the drawing of a step: of an all-reduce, and of one parameter's gradient


@styled
def published_speed(scaling: list[dict[str, float]]) -> Figure:
    """Return published tokens/s on each GPU by number of data-parallel GPUs; scaling: rows of data/dp_scaling.csv."""
    speed = [row["tokens_per_s_per_gpu"] for row in scaling]
    figure, ax = plt.subplots(figsize=(WIDTH, 3.1))
    bars = ax.bar(range(len(scaling)), speed, color=KINDS[0], width=0.65)
    labels = [""] + [f"{after / before - 1:+.1%}" for before, after in zip(speed, speed[1:], strict=False)]
    ax.bar_label(bars, [f"{value / 1e3:.1f}k\n{label}" for value, label in zip(speed, labels, strict=True)])
    names = [f"{row['gpus']:.0f}\n{row['micro_batch']:.0f} × {row['grad_accum']:.0f}" for row in scaling]
    ax.set_xticks(range(len(scaling)), names)
    ax.set(xlabel="GPUs, and on each: sequences at a time × accumulation steps")
    ax.set(ylabel="tokens/s on each GPU", ylim=(0, 49_000))
    ax.set_title("1B model, 256 sequences of 4,096 tokens per step, H100 (published)")
    return figure


@styled
def replicas_of_a_model() -> Figure:
    """Return a drawing of three GPUs: a batch each, the mean of their gradients, the same new weights."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    ax.set(xlim=(0, 12.5), ylim=(0, 3.2))
    ax.axis("off")
    for gpu in range(3):
        y = 2.4 - 1.1 * gpu
        ax.text(0, y + 0.3, f"GPU {gpu}", va="center", weight="bold")
        rectangle(ax, 1.2, y, (1.6, 0.6), f"batch {gpu}", LIGHT)
        rectangle(ax, 3, y, (1.6, 0.6), "forward", PHASES["forward"])
        rectangle(ax, 4.8, y, (1.6, 0.6), "backward", PHASES["backward"])
        rectangle(ax, 9, y, (1.6, 0.6), "optimizer", PHASES["optimizer"])
        rectangle(ax, 10.8, y, (1.6, 0.6), "new weights", MEMORY["parameters"])
        for x in (6.45, 8.4):
            ax.annotate("", (x + 0.5, y + 0.3), (x, y + 0.3), arrowprops={"arrowstyle": "->"})
    rectangle(ax, 6.98, 0.2, (1.4, 2.8), "all-reduce:\nmean\nof the\ngradients", PHASES["communication"])
    return figure


@styled
def buckets() -> Figure:
    """Return a drawing of parameters that fill three buckets in the order in which backward comes to them."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    ax.set(xlim=(-0.1, 16.1), ylim=(-1.3, 2.7))
    ax.axis("off")
    names = ["embed", "L0 attn", "L0 mlp", "L1 attn", "L1 mlp", "L2 attn", "L2 mlp", "head"]
    for i, (name, bucket) in enumerate(zip(names, [2, 2, 2, 1, 1, 1, 0, 0], strict=True)):
        rectangle(ax, 2 * i, 1.5, (1.8, 0.6), name, KINDS[bucket])
        rectangle(ax, 2 * (7 - i), -0.5, (2, 0.6), name, KINDS[bucket])
    ax.text(8, 2.4, "parameters, in the order of the model", ha="center")
    ax.annotate("", (0.5, 1.15), (15.5, 1.15), arrowprops={"arrowstyle": "->", "linewidth": 1.5})
    ax.text(8, 0.7, "backward comes from the right", ha="center")
    for start, end, word in ((0, 4, "bucket 0: sent first"), (4, 10, "bucket 1"), (10, 16, "bucket 2: the tail")):
        ax.add_patch(plt.Rectangle((start + 0.03, -0.55), end - start - 0.06, 0.7, fill=False, linewidth=2))
        ax.text((start + end) / 2, -1.1, word, ha="center")
    return figure


@styled
def one_bucket() -> Figure:
    """Return a drawing of a bucket: a flat buffer; each .grad is a view of its part, each parameter has a flag."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.2))
    ax.set(xlim=(-0.1, 12.1), ylim=(-1.1, 1.9))
    ax.axis("off")
    start = 0.0
    for number, (name, width) in enumerate({"mlp.down": 5, "mlp.up": 3.5, "norm": 1.5}.items()):
        missing = name == "norm"
        rectangle(ax, start, 0, (width - 0.06, 0.7), "zeros" if missing else "", MEMORY["gradients"])
        ax.text(start + width / 2, 1.45, "no norm.grad" if missing else f"{name}.grad", ha="center")
        if not missing:
            ax.annotate("", (start + width / 2, 0.75), (start + width / 2, 1.35), arrowprops={"arrowstyle": "->"})
        rectangle(ax, 10.15 + 0.62 * number, 0, (0.56, 0.7), "110"[number], LIGHT)
        start += width
    ax.text(11.05, 1.45, "flags", ha="center")
    ax.annotate("", (0, -0.35), (12, -0.35), arrowprops={"arrowstyle": "<->"})
    ax.text(6, -0.85, "self.flat: sent by one all-reduce", ha="center")
    return figure


def drawn_sends(mode: str) -> list[tuple[float, float]]:
    """Return (start, length) of each all-reduce of the drawing.

    The link carries one at a time, in the order in which gradients are ready; backward takes from 3 to 9.
    """
    ready = {"naive": [9.0] * 12, "overlap": [3 + 0.5 * (number + 1) for number in range(12)]}
    ready["bucket"] = ready["overlap"][3::4]
    length, free, sends = LATENCY + CARRY * 12 / len(ready[mode]), 0.0, []
    for moment in ready[mode]:
        sends.append((max(moment, free), length))
        free = sum(sends[-1])
    return sends


@styled
def drawn_steps() -> Figure:
    """Return a drawing of compute and communication of a step in three modes."""
    figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 3.8), sharex=True)
    for ax, mode in zip(axes, ("naive", "overlap", "bucket"), strict=True):
        for layer in range(3):
            for word, start, width in (("forward", layer, 1), ("backward", 3 + 2 * layer, 2)):
                number = layer if word == "forward" else 2 - layer
                ax.broken_barh([(start, width)], (0.6, 0.8), color=PHASES[word], edgecolor="white")
                label, ink = f"{word[0].upper()}{number}", ink_on(PHASES[word])
                ax.text(start + width / 2, 1, label, ha="center", va="center", color=ink)
        sends = drawn_sends(mode)
        end = sum(sends[-1])
        ax.broken_barh([(9, end - 9)], (0.6, 0.8), color=PHASES["wait"], edgecolor="white")
        ax.text((9 + end) / 2, 1, "wait", ha="center", va="center")
        ax.broken_barh(sends, (-0.4, 0.8), color=PHASES["communication"], edgecolor="white")
        ax.set(yticks=[1, 0], yticklabels=["compute", "communication"], xticks=[], title=mode, xlim=(0, 17))
    axes[-1].set_xlabel("time (drawn, not measured)")
    return figure


@styled
def measured_steps(timelines: dict[str, list[tuple[str, float, float]]]) -> Figure:
    """Return one step of rank 0 over time in each mode; timelines: (name, start, length in ms) of each phase."""
    longest = max(start + ms for step in timelines.values() for _, start, ms in step)
    figure, axes = plt.subplots(len(timelines), 1, figsize=(WIDTH, 4), sharex=True)
    for ax, (mode, step) in zip(axes, timelines.items(), strict=True):
        for name, start, ms in step:
            sends = name == "all-reduce"
            color = PHASES["communication" if sends else name]
            ax.broken_barh([(start, ms)], (-0.4 if sends else 0.6, 0.8), color=color, edgecolor="white", linewidth=0.5)
            if not sends and ms > 0.1 * longest:
                ax.text(start + ms / 2, 1, name, ha="center", va="center", color=ink_on(color))
        count, end = sum(name == "all-reduce" for name, *_ in step), max(start + ms for _, start, ms in step)
        ax.set(yticks=[1, 0], yticklabels=["compute", "communication"])
        ax.set_title(f"{mode}: {count} all-reduces, step {end:.0f} ms")
    axes[-1].set_xlabel("ms")
    return figure


@styled
def step_by_bucket_size(swept: dict[float, Sequence[float]], naive_ms: Sequence[float]) -> Figure:
    """Return the ms of a step by bucket size in MB, median and range of the repeats, and those of naive averaging."""
    sizes = list(swept)
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 3))
    ax.semilogx(sizes, [np.median(times) for times in swept.values()], "o-", color=KINDS[0])
    low, high = ([limit(times) for times in swept.values()] for limit in (min, max))
    ax.fill_between(sizes, low, high, color=KINDS[0], alpha=0.2)
    naive = float(np.median(naive_ms))
    ax.axhline(naive, color=GRAY, linestyle="--", linewidth=1)
    ax.text(sizes[-1], naive, "naive: one each, afterwards", va="bottom", ha="right", color=GRAY)
    ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
    ax.minorticks_off()
    ax.set(xlabel="MB per bucket (all gradients: 18)", ylabel="ms per step")
    ax.set_ylim(0, 1.2 * max(naive, *(max(times) for times in swept.values())))
    return figure


@styled
def drift(runs: list[dict[str, Sequence[float]]], fault: int) -> Figure:
    """Return losses and gradient norms by step, a line per rank; fault: the step in which one rank was early.

    runs: by rank, the loss, the norm of the averaged gradient, and the norm on a shared batch ("probe") of each step.
    """
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 3))
    titles = {
        "loss": "loss on own batch",
        "averaged": "norm of averaged gradient",
        "probe": "norm on a shared batch:\ndistance from the median",
    }
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        values = np.array([run[name] for run in runs])
        if name == "probe":
            values = np.abs(values / np.median(values, axis=0) - 1).clip(1e-8)  # 0 has no place on a log scale
            ax.set_yscale("log")
        for rank, run in enumerate(values):
            ax.plot(run, "o-", markersize=6 - rank, linewidth=3 - 0.6 * rank, color=RANKS[rank], label=f"rank {rank}")
        ax.axvline(fault, color="black", linestyle=":", linewidth=1)
        ax.set_title(title)
        ax.set(xlabel="step (dotted: the fault)", xticks=range(0, values.shape[1], 2))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
    return figure


@styled
def overlap(
    scaling: list[dict[str, float]], reached: float = 0.392, gradient_bytes: int = 4, larger: int = 1
) -> Figure:
    """Return published speed beside what the ratio of all-reduce to backward leaves of it, and the ratio, by GPUs.

    reached: the share of the peak that compute reaches; larger: micro-batches as large as this many of the published.
    """
    gpus = [int(row["gpus"]) for row in scaling]
    speed = [row["tokens_per_s_per_gpu"] for row in scaling]
    bandwidths = dict(zip(published("all_reduce", "gpus"), published("all_reduce", "median_gb_s"), strict=True))
    ratios, saved = [], []
    for row, n in zip(scaling, gpus, strict=True):
        tokens, steps = int(4096 * row["micro_batch"] * larger), row["grad_accum"]
        ratios.append(replicas.overlap_ratio(tokens, n, 1e9 * bandwidths[n], PEAK * reached, gradient_bytes))
        saved.append(100 * 1.5 * steps / (1.5 * steps - 1 + max(1, ratios[-1])))  # forward is half of backward
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.1))
    left.plot(gpus, [100 * value / speed[0] for value in speed], "o-", color=KINDS[0], label="published")
    left.plot(gpus, saved, "s--", color=KINDS[4], markersize=4, label="by the ratio alone")
    left.set(ylabel="% of the speed on 8 GPUs", ylim=(0, 105), title="speed of a GPU")
    left.legend(loc="lower left")
    right.semilogy(gpus, ratios, "o-", color=PHASES["communication"])
    right.axhline(1, color=GRAY, linestyle="--", linewidth=1)
    right.text(8, 5, "above the line it can't be hidden", color=GRAY)
    right.set(title=f"all-reduce / backward, {gradient_bytes} bytes per gradient", ylim=(0.01, 10))
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(gpus, [f"{n}" for n in gpus])
        ax.set_xlabel("GPUs")
    return figure


@styled
def what_fits(presets: dict[str, str], lengths: Sequence[int], gpu_gib: float = 80) -> Figure:
    """Return GiB on each GPU of data-parallel training by sequence length, a panel per model (name: preset)."""
    figure, axes = plt.subplots(1, len(presets), figsize=(WIDTH, 3.2))
    for ax, (name, preset) in zip(axes, presets.items(), strict=True):
        shape = PRESETS[preset]
        states = state_bytes(param_count(shape), "bf16, no master weights")
        saved = [gpt_activation_bytes(shape.layers, shape.hidden, shape.heads, 1, n, "selective") for n in lengths]
        parts = {part: np.full(len(lengths), size / GiB) for part, size in states.items()}
        bottom = np.zeros(len(lengths))
        for part, size in (parts | {"activations": np.array(saved) / GiB}).items():
            ax.bar(range(len(lengths)), size, bottom=bottom, color=MEMORY[part], label=part, edgecolor="white")
            bottom = bottom + size
        ax.axhline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1)
        ax.set(title=f"{name}: states {sum(states.values()) / GiB:,.0f} GiB", xlabel="tokens per sequence")
        ax.set_xticks(range(len(lengths)), [f"{n // 1024}k" for n in lengths])
    limit_line(axes[0], gpu_gib, "H100")
    axes[0].set(ylabel="GiB on each GPU", ylim=(0, 1.15 * gpu_gib))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
