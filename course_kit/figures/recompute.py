"""Figures of notebook 02: what recomputation and gradient accumulation keep, and what they cost in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_kit.figures.style import GRAY, KINDS, LIMIT, MEMORY, PHASES, WIDTH, ink_on, limit_line, readable, styled
from course_kit.figures.timelines import OTHER, draw_spans
from course_lib.recompute.profiling import spans
from course_lib.single_gpu.memory import activation_bytes, gpt_activation_bytes, gpt_param_count
from course_lib.single_gpu.model import ModelConfig

GiB, MiB = 2**30, 2**20
MODES = {"none": KINDS[0], "selective": KINDS[1], "full": KINDS[2], "matmuls": KINDS[3]}  # of recomputation
MARKERS = {"none": "o", "selective": "s", "full": "D", "matmuls": "^"}
SHAPES = {  # of GPTs: layers, hidden size, heads
    "1B": (16, 2048, 32),
    "3B": (28, 3072, 24),
    "8B": (32, 4096, 32),
    "70B": (80, 8192, 64),
    "405B": (126, 16384, 128),
}
LENGTHS = (1024, 2048, 4096, 8192)
STEP = {  # the phases of a profiled step, and its outermost operators
    "data": KINDS[3],
    "forward": PHASES["forward"],
    "backward": PHASES["backward"],
    "clip": KINDS[2],
    "optimizer": PHASES["optimizer"],
}
OPERATORS = {"aten::linear": STEP["forward"], "autograd::engine": STEP["backward"], "Optimizer": STEP["optimizer"]}


@styled
def activations_by_batch(config: ModelConfig, seq: int, batches: Sequence[int], gpu_gib: float = 80) -> Figure:
    """Return the activations of a batch in GiB by the number of its sequences, recomputation none and full."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    for mode in ("none", "full"):
        sizes = [activation_bytes(config, n, seq, recompute=mode) / GiB for n in batches]
        ax.loglog(batches, sizes, f"{MARKERS[mode]}-", color=MODES[mode], markersize=4, label=f"recomputation: {mode}")
    limit_line(ax, gpu_gib, "one H100")
    ax.set_xticks(batches, [f"{n:,}" for n in batches])
    ax.minorticks_off()
    ax.set(xlabel=f"sequences of {seq:,} tokens", ylabel="GiB of activations, BF16")
    ax.legend(loc="lower right")
    return figure


def rectangle(ax: Axes, x: float, y: float, width: float, text: str, color: str, dashed: bool = False) -> None:
    """Draw a rectangle of height 0.6 with a text in it; dashed: its outline alone."""
    style: dict[str, Any] = {"fill": False, "linestyle": "--", "edgecolor": color} if dashed else {"color": color}
    ax.add_patch(plt.Rectangle((x, y), width, 0.6, **style))
    ink = readable(color) if dashed else ink_on(color)
    ax.text(x + width / 2, y + 0.3, text, ha="center", va="center", color=ink)


@styled
def replay() -> Figure:
    """Return a drawing of block 2 that is run again from its kept input, just before its backward."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    ax.set(xlim=(0, 10.2), ylim=(-0.1, 3.5))
    ax.axis("off")
    for y, name in ((2.4, "forward"), (1.2, "replay"), (0.0, "backward")):
        ax.text(0, y + 0.3, name, va="center", weight="bold")
    for i in range(4):
        rectangle(ax, 2.4 + 2 * i, 2.4, 1.5, f"block {i}", PHASES["forward"])
        ax.plot([2.15 + 2 * i] * 2, [2.3, 3.1], color=MEMORY["activations"], linewidth=3)
        ax.text(2.15 + 2 * i, 3.2, "kept", ha="center", color=readable(MEMORY["activations"]))
    rectangle(ax, 6.4, 1.2, 1.5, "block 2", PHASES["forward"], dashed=True)
    for i in (2, 3):
        rectangle(ax, 2.4 + 2 * i, 0, 1.5, f"gradient {i}", PHASES["backward"])
    for end, start in (((6.25, 1.5), (6.15, 2.25)), ((7.15, 0.65), (7.15, 1.15)), ((7.95, 0.3), (8.35, 0.3))):
        ax.annotate("", end, start, arrowprops={"arrowstyle": "->"})
    ax.text(8.1, 1.5, "from the kept input;\nfreed after gradient 2", va="center", color=GRAY)
    return figure


@styled
def step_flops(flops: dict[str, dict[str, float]], counted: dict[str, float]) -> Figure:
    """Return the FLOPs of a step's matmuls by part, a bar per mode, and the counter's total beside it."""
    figure, ax = plt.subplots(figsize=(WIDTH, 1.9))
    for row, (mode, parts) in enumerate(flops.items()):
        left = 0.0
        for (part, count), color in zip(parts.items(), KINDS, strict=True):
            ax.barh(row, count / 1e9, left=left, color=color, label=None if row else part, edgecolor="white")
            left += count / 1e9
        ax.text(left, row, f"  {counted[mode] / 1e9:.2f} GFLOP counted", va="center")
    ax.invert_yaxis()
    ax.set(yticks=range(len(flops)), yticklabels=list(flops), xlabel="GFLOP of a step's matmuls", xlim=(0, 22))
    figure.legend(*ax.get_legend_handles_labels(), ncols=5, loc="outside upper center")
    return figure


@styled
def time_against_memory(saved: dict[str, int], relative: dict[str, float], rows: dict[str, tuple[str, bool]]) -> Figure:
    """Return the time of forward and backward against the bytes kept, a marker per way to compute.

    kept: bytes; relative: times of that of flash attention without recomputation; rows: mode, and whether attention
    keeps its scores.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 3.4))
    for name, (mode, plain) in rows.items():
        x, y = saved[name] / MiB, relative[name]
        face = "white" if plain else MODES[mode]
        size = 12 if name == "flash, none" else 8  # flash, selective lies on it
        ax.plot(x, y, MARKERS[mode], color=MODES[mode], markerfacecolor=face, markersize=size)
        left = name in ("flash, keep_matmuls", "plain core, selective")  # to the right of these stands another marker
        position = (-9 if left else 9, -14 if name in ("flash, none", "flash, keep_matmuls") else 6)
        ax.annotate(name, (x, y), textcoords="offset points", xytext=position, ha="right" if left else "left")
    ax.axhline(1, color=GRAY, linewidth=0.5)
    ax.set(xlabel="MiB kept at the end of forward", ylabel="time (flash, none = 1)")
    ax.set(xlim=(0, 1.3 * max(saved.values()) / MiB), ylim=(0.8, 1.15 * max(relative.values())))
    ax.set_title("hollow: attention that keeps its scores")
    return figure


@styled
def utilization(used: dict[str, tuple[float, float]], peak: float) -> Figure:
    """Return MFU and HFU of each mode, as shares (0 to 1) of the machine's best rate `peak` (FLOP/s)."""
    figure, ax = plt.subplots(figsize=(0.75 * WIDTH, 2.6))
    for position, ratios in enumerate(used.values()):
        bars = ax.bar(
            [position - 0.2, position + 0.2], [100 * r for r in ratios], width=0.36, color=[KINDS[0], KINDS[2]]
        )
        ax.bar_label(bars, [f"MFU {ratios[0]:.0%}", f"HFU {ratios[1]:.0%}"])
    ax.set_xticks(range(len(used)), [f"recomputation: {mode}" for mode in used])
    ax.set(ylabel="% of the best rate", title=f"best rate: {peak / 1e9:.0f} GFLOP/s", ylim=(0, 110))
    return figure


@styled
def accumulation() -> Figure:
    """Return a drawing of four micro-batches that add to one buffer of gradients, one after the other."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.5))
    ax.set(xlim=(0, 13), ylim=(0, 2.7))
    ax.axis("off")
    for i in range(4):
        x = 0.1 + 2.75 * i
        rectangle(ax, x, 1.5, 1.2, "forward", PHASES["forward"])
        rectangle(ax, x + 1.25, 1.5, 1.3, "backward", PHASES["backward"])
        ax.text(x + 1.25, 2.3, f"micro-batch {i}", ha="center")
        ax.annotate("", (x + 1.9, 0.72), (x + 1.9, 1.45), arrowprops={"arrowstyle": "->"})
        ax.text(x + 2.0, 1.05, "adds", color=GRAY)
    text = "gradients: one buffer, from the first backward to the optimizer step"
    rectangle(ax, 0.1, 0.1, 10.8, text, MEMORY["gradients"])
    ax.annotate("", (11.35, 0.4), (10.95, 0.4), arrowprops={"arrowstyle": "->"})
    rectangle(ax, 11.4, 0.1, 1.5, "optimizer", PHASES["optimizer"])
    return figure


@styled
def gradient_errors(lengths: Sequence[int], errors: dict[str, Sequence[float]]) -> Figure:
    """Return the relative errors of the gradient by the number of targets in three of the four micro-batches."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.7))
    for (name, values), color, mark in zip(errors.items(), (KINDS[2], KINDS[0]), "os", strict=True):
        ax.semilogy(lengths, values, f"{mark}-", color=color, label=name, markersize=4)
    ax.set(xlabel="targets in three of the four micro-batches (the first has 48)")
    ax.set(ylabel="relative error of the gradient")
    ax.invert_xaxis()
    ax.legend()
    return figure


@styled
def peaks_by_batch(batches: Sequence[int], peaks: dict[str, Sequence[float]], states_mib: float) -> Figure:
    """Return peak memory in MiB by batch size, a line per way to split the batch, and the states in it."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.8))
    for (name, values), color, mark in zip(peaks.items(), (KINDS[2], KINDS[0]), "os", strict=True):
        ax.plot(batches, values, f"{mark}-", color=color, label=name)
    ax.axhline(states_mib, color=GRAY, linestyle=":", label="parameters and gradients")
    ax.set(xlabel="sequences of 64 tokens in the batch", ylabel="peak MiB", ylim=0, xticks=batches)
    ax.legend()
    return figure


@styled
def sum_errors(counts: Sequence[int], errors: dict[str, Sequence[float]]) -> Figure:
    """Return the relative error of a sum of BF16 gradients by their number, a line per dtype of the buffer."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.8))
    for (name, values), color, mark in zip(errors.items(), (KINDS[2], KINDS[0]), "os", strict=True):
        ax.loglog(counts, values, f"{mark}-", color=color, markersize=4, label=f"{name} buffer")
    ax.set_xticks(counts, [f"{count}" for count in counts])
    ax.minorticks_off()
    ax.set(xlabel="micro-batches added up", ylabel="relative error of the sum")
    ax.legend()
    return figure


@styled
def gpu_trace() -> Figure:
    """Return a drawing of a trace's rows on a GPU: launches, kernels, and transfers beside them."""
    names = ("forward", "backward", "communication", "wait")
    forward, backward, communication, waiting = (PHASES[name] for name in names)
    launches = [(0.45 * i, 0.35, forward, "") for i in range(4)] + [(1.8, 3.7, waiting, ".item(): the CPU waits")]
    launches += [(6.2 + 0.45 * i, 0.35, backward, "") for i in range(4)]
    kernels = [(0.5 + 1.25 * i, 1.2, forward, "kernel") for i in range(4)]
    kernels += [(6.7 + 1.45 * i, 1.4, backward, "kernel") for i in range(4)]
    transfers = [(8.2, 1.6, communication, "all-reduce"), (11.1, 1.6, communication, "all-reduce")]
    lanes = {"CPU thread\n(launches)": launches, "GPU stream 7\n(computes)": kernels}
    lanes["GPU stream 13\n(sends)"] = transfers
    figure, ax = plt.subplots(figsize=(WIDTH, 2.4))
    for row, bars in enumerate(lanes.values()):
        for start, length, color, word in bars:
            ax.barh(row, length, left=start, height=0.55, color=color)
            ax.text(start + length / 2, row, word, ha="center", va="center", color=ink_on(color))
    for launch, kernel in ((0.2, 0.6), (6.4, 6.8)):
        ax.annotate("", (kernel, 0.72), (launch, 0.28), arrowprops={"arrowstyle": "->", "color": GRAY})
    arrow = {"arrowstyle": "->"}
    ax.annotate("gap: no kernel is queued", (6.05, 1.05), (6.05, 1.75), ha="center", arrowprops=arrow)
    ax.set(yticks=range(3), yticklabels=list(lanes), xticks=[], xlabel="time", xlim=(-0.1, 12.9), ylim=(2.4, -0.4))
    return figure


@styled
def step_timelines(**profiles) -> Figure:
    """Return the first step of each profile (torch.profiler), on one scale of time; gray: other operators."""
    figure, axes = plt.subplots(len(profiles), 1, figsize=(WIDTH, 1 + 1.4 * len(profiles)), sharex=True, squeeze=False)
    results = {name: spans(profile) for name, profile in profiles.items()}
    steps = [next(span for span in each if span.name.startswith("ProfilerStep")) for each in results.values()]
    longest = max(step.end_ms for step in steps)
    for ax, step, (name, everything) in zip(axes.flat, steps, results.items(), strict=True):
        shown = [span for span in everything if span.start_ms < step.end_ms and "#" not in span.name]
        shown = [span for span in shown if not span.name.startswith("ProfilerStep")]
        draw_spans(ax, shown, STEP | OPERATORS, tuple(STEP), longest)
        ax.set(title=f"{name}: {step.end_ms - step.start_ms:.0f} ms, profiler on", xlabel="")
    axes[-1, 0].set(xlabel="ms", xlim=(0, longest))
    names = STEP | {"other operators": OTHER}
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in names.values()]
    figure.legend(patches, list(names), loc="outside lower center", ncols=6)
    return figure


@styled
def activations_by_model(gpu_gib: float = 80) -> Figure:
    """Return the activations of GPTs in GiB by sequence length and mode: one sequence, 16 bits, plain attention."""
    figure, axes = plt.subplots(1, 5, figsize=(WIDTH, 3.2), sharey=True)
    for ax, (name, shape) in zip(axes, SHAPES.items(), strict=True):
        for mode in ("none", "selective", "full"):
            sizes = [gpt_activation_bytes(*shape, 1, seq, mode) / GiB for seq in LENGTHS]
            style = f"{MARKERS[mode]}-"
            ax.semilogy(range(4), sizes, style, color=MODES[mode], markersize=4, label=f"recomputation: {mode}")
        ax.axhline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1, label=f"one H100: {gpu_gib:g} GiB")
        ax.set(title=name, xlabel="tokens", xlim=(-0.3, 3.3))
        ax.set_xticks(range(4), [f"{seq // 1024}k" for seq in LENGTHS])
    axes[0].set(ylabel="GiB of activations", ylim=(0.03, 20_000))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@styled
def model_memory(model: str, recompute: str, gpu_gib: float = 80) -> Figure:
    """Return the memory of a GPT of SHAPES in GiB by sequence length; states in FP32, as in the playbook.

    The axis belongs to the model: it stays where it is when the mode changes.
    """
    layers, hidden, heads = SHAPES[model]
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    params = 4 * gpt_param_count(hidden, layers, 128256) / GiB
    sizes = [gpt_activation_bytes(layers, hidden, heads, 1, seq, recompute) / GiB for seq in LENGTHS]
    bottom = np.zeros(len(LENGTHS))
    parts: dict[str, Any] = {
        "parameters": params,
        "gradients": params,
        "optimizer states": 2 * params,
        "activations": np.array(sizes),
    }
    for part, size in parts.items():
        ax.bar(range(4), size, bottom=bottom, color=MEMORY[part], label=part, edgecolor="white", linewidth=0.5)
        bottom = bottom + size
    ax.bar_label(ax.containers[-1], [f"{size:,.4g}" for size in sizes])
    ax.axhline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1, label=f"one H100: {gpu_gib:g} GiB")
    most = 4 * params + gpt_activation_bytes(layers, hidden, heads, 1, LENGTHS[-1], "none") / GiB
    ax.set_xticks(range(4), [f"{seq:,} tokens" for seq in LENGTHS])
    ax.set(ylabel="GiB", ylim=(0, 1.1 * most), title=f"{model}, recomputation {recompute}; numbers: activations")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper")
    return figure


@styled
def peaks_by_micro_batch(micro: Sequence[int], peaks: dict[str, Sequence[float]], states_mib: float) -> Figure:
    """Return peak memory in MiB by sequences per micro-batch, a bar per mode, and the states in it."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 3))
    for index, (mode, values) in enumerate(peaks.items()):
        positions = [position + 0.28 * (index - 1) for position in range(len(micro))]
        bars = ax.bar(positions, values, width=0.26, color=MODES[mode], label=f"recomputation: {mode}")
        ax.bar_label(bars, [f"{value:.0f}" for value in values])
    ax.axhline(states_mib, color=GRAY, linestyle=":", label="parameters and gradients")
    ax.set_xticks(range(len(micro)), [f"{n}" for n in micro])
    ax.set(xlabel="sequences in a micro-batch, of 8 in the batch", ylabel="peak MiB")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure
