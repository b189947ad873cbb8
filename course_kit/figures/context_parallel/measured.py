"""Work, memory and time of attention over a split sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from course_kit.figures.style import KINDS, LIMIT, MEMORY, PHASES, RANKS, WIDTH, ink_on, styled
from course_lib.context_parallel import model as program
from course_lib.single_gpu.memory import gpt_activation_bytes, param_count, state_bytes
from course_lib.single_gpu.model import ModelConfig

GiB, MiB = 2**30, 2**20


@styled
def work_by_rank(taken_ms: Mapping[str, Sequence[float]], cells: Mapping[str, Sequence[int]]) -> Figure:
    """Return the ms of attention on each rank by order of the tokens, and what its number of scores would take."""
    figure, axes = plt.subplots(1, len(taken_ms), figsize=(WIDTH, 3), sharey=True)
    for ax, (order, taken) in zip(axes, taken_ms.items(), strict=True):
        ax.bar(range(len(taken)), taken, color=RANKS[: len(taken)], width=0.6)
        for rank, ms in enumerate(taken):
            ax.text(rank, ms / 2, f"{ms:.0f} ms", ha="center", va="center", color=ink_on(RANKS[rank]))
        per_cell = sum(taken) / sum(cells[order])
        positions = np.arange(len(taken))
        ax.hlines(
            [c * per_cell for c in cells[order]], positions - 0.35, positions + 0.35, color="black", label="by cells"
        )
        ax.set(
            title=f"{order}: slowest {max(taken):.0f} ms, mean {np.mean(taken):.0f}", xlabel="rank", xticks=positions
        )
    axes[0].set(ylabel="ms of attention", ylim=(0, 1.2 * max(map(max, taken_ms.values()))))
    axes[0].legend(loc="upper left")
    return figure


@styled
def saved_and_peak(
    cps: Sequence[int], saved: Sequence[int], formula: Sequence[float], peaks: Mapping[str, Sequence[float]]
) -> Figure:
    """Return the bytes that a rank keeps by cp, with the formula's, and the peak of one attention by method.

    peaks: in sizes of the full k.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.2))
    positions = np.arange(len(cps))
    color = MEMORY["activations"]
    bars = left.bar(positions, [size / MiB for size in saved], color=color, width=0.6, label="measured on rank 0")
    labels = [f"{size / MiB:.1f}" for size in saved]
    left.bar_label(bars, labels, label_type="center", color=ink_on(color))
    left.hlines([size / MiB for size in formula], positions - 0.3, positions + 0.3, color="black", label="formula")
    left.plot(positions, [saved[0] / cp / MiB for cp in cps], ":", color="black", label="1/cp")
    left.set(title="kept for backward, full model", ylabel="MiB per rank", ylim=(0, 1.2 * saved[0] / MiB))
    for number, (method, sizes) in enumerate(peaks.items()):
        bars = right.bar(positions + 0.28 * number, sizes, width=0.27, color=KINDS[number], label=method)
        right.bar_label(bars, [f"{size:.1f}" for size in sizes], fontsize=8)
    right.set(title="peak of one attention, forward and backward", ylabel="sizes of the full k")
    for ax, shift in ((left, 0), (right, 0.28)):
        ax.set_xticks(positions + shift, [f"{cp}" for cp in cps])
        ax.set_xlabel("cp")
        ax.legend()
    return figure


@styled
def layouts_for_long_sequences(
    config: ModelConfig, layouts: Mapping[str, tuple[int, bool, int]], lengths: Sequence[int], gpu_gib: float = 80
) -> Figure:
    """Return GiB on each GPU by length, a panel per layout (tp, with SP, cp); bars beyond the axis name their total."""
    figure, axes = plt.subplots(1, len(layouts), figsize=(WIDTH, 3.4), sharey=True)
    top, positions = 2 * gpu_gib, range(len(lengths))
    sizes = config.layers, config.hidden, config.heads
    for (name, (tp, sp, cp)), ax in zip(layouts.items(), axes, strict=True):
        bottom = np.zeros(len(lengths))
        parts = {part: [size] * len(lengths) for part, size in
                 state_bytes(param_count(config, tp), "bf16, no master weights").items()}  # fmt: skip
        parts["activations"] = [gpt_activation_bytes(*sizes, 1, n, "selective", tp=tp, sp=sp, cp=cp) for n in lengths]
        for part, size in parts.items():
            end = bottom + np.array(size) / GiB
            height = np.minimum(end, top) - np.minimum(bottom, top)
            ax.bar(positions, height, bottom=bottom, color=MEMORY[part], label=part, edgecolor="white", linewidth=0.5)
            bottom = end
        for position, total in zip(positions, bottom, strict=True):
            ax.text(position, min(total, top) + 1, f"{total:,.0f}", ha="center", va="bottom", fontsize=8)
        ax.axhline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1)
        ax.set(title=f"{name}:\n{tp * cp} GPU{'s' * (tp * cp > 1)}", ylim=(0, 1.12 * top), xlabel="tokens")
        ax.set_xticks(positions, [f"{n // 1024}k" for n in lengths])
    axes[0].set_ylabel("GiB on each GPU, in total")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@styled
def overlap(drawn: Mapping[str, Sequence[Sequence[tuple[str, str, float, float]]]]) -> Figure:
    """Return attention and transfers of the first two ranks over time, a panel per method.

    drawn: by method and rank, (lane, name, start, end) in ms; the lanes are attention and network.
    """
    figure, axes = plt.subplots(len(drawn), 1, figsize=(WIDTH, 4.4), sharex=True)
    longest = max(span[3] for of_ranks in drawn.values() for spans in of_ranks[:2] for span in spans)
    for ax, (method, of_ranks) in zip(axes, drawn.items(), strict=True):
        for rank, spans in enumerate(of_ranks[:2]):
            base, count = 2.6 * (1 - rank), {"network": 0, "attention": 0}
            for lane, _, start, end in sorted(span for span in spans if span[0] in count):
                sends = lane == "network"
                at, color = (base, PHASES["communication"]) if sends else (base + 1, RANKS[rank])
                word = str(count[lane]) if not sends else "all K, V" if method == "all_gather" else "K, V"
                ax.broken_barh([(start, end - start)], (at, 0.9), facecolors=color, edgecolor="white")
                if end - start > (0.08 if sends else 0.03) * longest:
                    center = (start + end) / 2, at + 0.45
                    ax.text(*center, word, ha="center", va="center", color=ink_on(color))
                count[lane] += 1
        ax.set_yticks((0.45, 1.45, 3.05, 4.05), ("network", "rank 1", "network", "rank 0"))
        ax.set_title(method)
    axes[-1].set_xlabel("ms; numbers are blocks of attention, 0 the local one")
    return figure


@styled
def exchange_ratios(lengths: Sequence[int], peak: float) -> Figure:
    """Return the time of the exchange over attention's by tokens per rank, for two links and two K/V counts."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.1))
    for name, bandwidth, style in (("NVLink, 450 GB/s", 450e9, "o-"), ("between nodes, 50 GB/s", 50e9, "s--")):
        for kv, color in ((8, KINDS[0]), (32, KINDS[2])):
            results = [program.exchange_ratio(n, 32, kv, bandwidth, peak) for n in lengths]
            ax.plot(range(len(lengths)), results, style, color=color, markersize=4, label=f"{name}, {kv} K/V heads")
    ax.axhline(1, color=LIMIT, linestyle="--", linewidth=1)
    ax.set(yscale="log", xlabel="tokens on each rank, s/n", ylabel="exchange / attention")
    ax.set_xticks(range(len(lengths)), [f"{n // 1024}k" for n in lengths])
    ax.legend()
    return figure
