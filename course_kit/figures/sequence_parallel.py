"""Figures of notebook 07, part one: what tensor parallelism leaves unsharded, and sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_kit.figures.style import GRAY, KINDS, LIMIT, MEMORY, PHASES, RANKS, WIDTH, ink_on, styled
from course_lib.single_gpu.memory import gpt_activation_bytes, param_count, state_bytes
from course_lib.single_gpu.model import ModelConfig

GiB, MiB = 2**30, 2**20
FULL, BY_HEADS, BY_TOKENS = MEMORY["activations"], KINDS[0], KINDS[1]  # activations: unsharded, and sharded
TP, TP_SP = KINDS[3], KINDS[1]


@styled
def unsharded_activations(config: ModelConfig, seq: int, degrees: Sequence[int], gpu_gib: float = 80) -> Figure:
    """Return the activations of one sequence on each GPU by tp: what is split, and what every GPU has in full.

    By 10 sbh + 24 sbh / t (Korthikanti et al. 2022), without the scores.
    """
    unit = seq * config.hidden * config.layers / GiB  # s·b·h·L bytes
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.9))
    positions = range(len(degrees))
    inside = [24 * unit / t for t in degrees]
    words = "in full on every GPU: norms, and between layers", "split by tensor parallelism"
    ax.bar(positions, [10 * unit] * len(degrees), color=FULL, width=0.6, label=words[0])
    ax.bar(positions, inside, bottom=10 * unit, color=BY_HEADS, width=0.6, label=words[1])
    for position, size in enumerate(inside):
        ax.text(position, 10 * unit + size, f"{10 * unit + size:.0f}", ha="center", va="bottom")
    ax.axhline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1, label=f"one H100: {gpu_gib:g} GiB")
    ax.set(xlabel="tp", ylabel="GiB on each GPU")
    ax.set_xticks(positions, [f"{t}" for t in degrees])
    ax.legend()
    return figure


def draw_layer(ax: Axes, title: str, outside: str, color: str, gates: Sequence[tuple[str, str]]) -> None:
    """Draw a layer from norm to norm; outside: shape between the gates' far sides; gates: name, and what it sends."""
    rectangles = [
        (f"norm\n[{outside}]", 2, color),
        (None, 0.5, ""),
        ("q, k, v: heads/t\nattention\n[b, s, h/t]", 2.6, BY_HEADS),
        ("o: rows\n[b, s, h]", 1.6, BY_HEADS),
        (None, 0.5, ""),
        (f"+ residual, norm\n[{outside}]", 2.4, color),
    ]
    x, waiting = 0.0, list(gates)
    for text, width, fill in rectangles:
        if text is None:
            name, sends = waiting.pop(0)
            ax.add_patch(plt.Rectangle((x, 0), 0.4, 1, color=PHASES["communication"]))
            ink = ink_on(PHASES["communication"])
            ax.text(x + 0.2, 0.5, name, ha="center", va="center", color=ink, weight="bold")
            ax.text(x + 0.2, 1.06, sends, ha="center", va="bottom", fontsize=8)
        else:
            ax.add_patch(plt.Rectangle((x, 0.05), width - 0.1, 0.9, color=fill))
            ax.text(x + width / 2 - 0.05, 0.5, text, ha="center", va="center", color=ink_on(fill))
        x += width
    ax.set(xlim=(-0.1, x), ylim=(-0.1, 1.7))
    ax.axis("off")
    ax.set_title(title, loc="left")


@styled
def regions() -> Figure:
    """Return one layer from norm to norm, between f and f* and between g and g*."""
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 3.8))
    gates = ("f", "forward: nothing\nbackward: all-reduce"), ("f*", "forward: all-reduce\nbackward: nothing")
    draw_layer(axes[0], "tensor parallelism: red is on every rank in full", "b, s, h", FULL, gates)
    gates = (
        ("g", "forward: all-gather\nbackward: reduce-scatter"),
        ("g*", "forward: reduce-scatter\nbackward: all-gather"),
    )
    title = "with sequence parallelism: yellow is split by tokens"
    draw_layer(axes[1], title, "b, s/t, h", BY_TOKENS, gates)
    return figure


@styled
def backward_overlap() -> Figure:
    """Return a drawing of which transfer of backward runs beside which matmul."""
    figure, ax = plt.subplots(figsize=(WIDTH, 1.6))
    compute, network = PHASES["backward"], PHASES["communication"]
    for lane, start, length, color, word in (
        (1, 0, 3, compute, "matmul: gradient of x"),
        (1, 3, 3, PHASES["weight gradient"], "matmuls: gradients of weights"),
        (0, 0, 2.4, network, "all-gather of x"),
        (0, 3, 2.4, network, "reduce-scatter of x's gradient"),
    ):
        ax.add_patch(plt.Rectangle((start + 0.02, lane + 0.1), length - 0.04, 0.8, color=color))
        ax.text(start + length / 2, lane + 0.5, word, ha="center", va="center", color=ink_on(color))
    ax.set(xlim=(0, 6.1), ylim=(0, 2), yticks=(0.5, 1.5), yticklabels=("network", "compute"), xticks=[])
    ax.spines["bottom"].set_visible(False)
    return figure


@styled
def swapped_gates(expected: Sequence[float], losses: Sequence[float], norms: Sequence[Sequence[float]]) -> Figure:
    """Return the losses of one process and of ranks with g and g* swapped, and an element of a norm on each rank."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3))
    left.plot(expected, color="black", linewidth=3, alpha=0.5, label="one process")
    left.plot(losses, "--", color=KINDS[2], label=f"{len(norms)} ranks, g and g* swapped in")
    left.set(ylabel="loss")
    left.legend()
    for rank, values in enumerate(norms):
        right.plot(values, color=RANKS[rank], label=f"rank {rank}")
    right.set(title="an element of a norm's weight, on each rank")
    right.legend()
    for ax in (left, right):
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


@styled
def saved_by_degree(
    degrees: Sequence[int], saved: Mapping[str, Sequence[int]], formula: Mapping[str, Sequence[float]]
) -> Figure:
    """Return the bytes that a rank keeps by tp, without and with SP, and the formula's: {"TP": ..., "TP + SP": ...}."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.9))
    for position, (word, color) in enumerate((("TP", TP), ("TP + SP", TP_SP))):
        at = np.arange(len(degrees)) + 0.36 * position
        sizes = [size / MiB for size in saved[word]]
        bars = ax.bar(at, sizes, width=0.34, color=color, label=f"{word}, measured on rank 0")
        ax.bar_label(bars, [f"{size:.1f}" for size in sizes], label_type="center", color=ink_on(color))
        lines = [size / MiB for size in formula[word]]
        ax.hlines(lines, at - 0.17, at + 0.17, color="black", label="formula" if position else None)
    one = saved["TP + SP"][0] / MiB
    ax.plot(np.arange(len(degrees)) + 0.36, [one / t for t in degrees], ":", color="black", label="1/tp")
    ax.set(xlabel="tp", ylabel="MiB kept per rank")
    ax.set_xticks(np.arange(len(degrees)) + 0.18, [f"{t}" for t in degrees])
    ax.legend()
    return figure


@styled
def layer_over_time(spans: Mapping[str, Sequence[tuple[str, str, float, float]]]) -> Figure:
    """Return one layer over time, a panel per way: (lane, name, start, end) in ms; lanes: phase, network, wait."""
    figure, axes = plt.subplots(len(spans), 1, figsize=(WIDTH, 3.8), sharex=True)
    colors = {"network": PHASES["communication"], "wait": PHASES["wait"]}
    for ax, (way, results) in zip(axes, spans.items(), strict=True):
        last = max(end for *_, end in results)
        for lane, word, start, end in sorted(results, key=lambda span: ("phase", "wait", "network").index(span[0])):
            color = colors.get(lane) or PHASES["backward" if word == "backward" else "forward"]
            y = 0 if lane == "network" else 1
            ax.broken_barh([(start, end - start)], (y, 0.9), facecolors=color, edgecolor="white")
            if lane == "network" and end - start > 0.045 * last:
                ax.text((start + end) / 2, 0.45, word, ha="center", va="center", color=ink_on(color), fontsize=8)
        waited = sum(end - start for lane, _, start, end in results if lane == "wait")
        ax.set_title(f"{way}: waits {waited:.1f} of {last:.1f} ms")
        ax.set(yticks=(0.45, 1.45), yticklabels=("network", "compute"))
    axes[-1].set_xlabel("ms; AR all-reduce, AG all-gather, RS reduce-scatter")
    names = ("forward", "backward", "wait", "communication")
    handles = [plt.Rectangle((0, 0), 1, 1, color=PHASES[name]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    return figure


@styled
def published_scaling(rows: Sequence[Mapping[str, str]]) -> Figure:
    """Return published tokens/s per GPU and the largest batch by tp, without and with SP.

    rows: of data/tp_scaling.csv.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.2))
    for number, (sp, word, color) in enumerate((("no", "TP", TP), ("yes", "TP + SP", TP_SP))):
        local_rows = [row for row in rows if row["sequence_parallel"] == sp]
        at = np.arange(len(local_rows)) + 0.4 * number
        speeds = [float(row["tokens_per_s_per_gpu"]) for row in local_rows]
        for ax, values, labels in (
            (left, [speed / 1e3 for speed in speeds], [f"{speed / 1e3:.1f}" for speed in speeds]),
            (right, [int(row["max_batch"]) for row in local_rows], None),
        ):
            bars = ax.bar(at, values, width=0.38, color=color, label=word)
            ax.bar_label(bars, labels, fontsize=8)
            ax.set_xticks(np.arange(len(local_rows)) + 0.2, [row["tp"] for row in local_rows])
            ax.set_xlabel("tp")
    left.set(title="thousand tokens/s per GPU")
    right.set(title="largest batch that fits, sequences")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@styled
def memory_by_degree(
    config: ModelConfig, degrees: Sequence[int], lengths: Sequence[int], gpu_gib: float = 80
) -> Figure:
    """Return GiB on each GPU with TP and SP by sequence length, a panel per degree; dotted: without SP."""
    figure, axes = plt.subplots(1, len(degrees), figsize=(WIDTH, 3.4))
    sizes, positions = (config.layers, config.hidden, config.heads), np.arange(len(lengths))
    for tp, ax in zip(degrees, axes, strict=True):
        states = state_bytes(param_count(config, tp), "bf16, no master weights")
        saved = [gpt_activation_bytes(*sizes, 1, n, "selective", tp=tp, sp=True) / GiB for n in lengths]
        alone = [gpt_activation_bytes(*sizes, 1, n, "selective", tp=tp) / GiB for n in lengths]
        parts = {part: np.full(len(lengths), size / GiB) for part, size in states.items()}
        bottom = np.zeros(len(lengths))
        for part, size in (parts | {"activations": np.array(saved)}).items():
            ax.bar(positions, size, bottom=bottom, color=MEMORY[part], label=part, edgecolor="white", linewidth=0.5)
            bottom = bottom + size
        local_rows = sum(states.values()) / GiB
        ax.hlines(
            local_rows + np.array(alone),
            positions - 0.4,
            positions + 0.4,
            color=GRAY,
            linestyle=":",
            label="without SP",
        )
        ax.axhline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1)
        ax.set(title=f"tp {tp}: states {local_rows:,.0f} GiB", ylim=(0, 1250 if tp == 1 else 240))
        names = [f"{n // 1024}k\n{size:.3g}" for n, size in zip(lengths, saved, strict=True)]
        ax.set_xticks(positions, names)
        ax.set_xlabel("tokens (own scale)" if tp == 1 else "tokens")
    axes[0].set_ylabel("GiB on each GPU")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure
