"""Memory and speed by degree of tensor parallelism (tp), losses of runs, steps over time, and dropout's masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap
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
    ink_on,
    readable,
    styled,
)
from course_kit.figures.tensor_parallel.drawings import SUM
from course_kit.figures.timelines import draw_spans
from course_kit.labs.tensor_parallel import Scaling, steps_of, waiting_shares
from course_lib.recompute.profiling import Span
from course_lib.single_gpu.memory import activation_bytes, gpt_activation_bytes, param_count, state_bytes
from course_lib.single_gpu.model import PRESETS, ModelConfig
from course_lib.tensor_parallel.model import all_reduce_ratio

GiB, MiB = 2**30, 2**20
COLORS = {name: PHASES[name] for name in ("wait", "forward", "backward")} | {"sum": SUM}
HALF_PEAK = 0.5 * 989.5e12  # FLOP/s: half of an H100's in BF16
LAYER_TOKENS = 8192  # of the layer on the clock


def activations_gib(preset: str, lengths: Sequence[int], tp: int = 1) -> list[float]:
    """Return the GiB of activations per rank of one sequence of each length, with selective recomputation."""
    shape = PRESETS[preset]
    sizes = shape.layers, shape.hidden, shape.heads
    return [gpt_activation_bytes(*sizes, 1, n, "selective", tp=tp) / GiB for n in lengths]


@styled
def memory_of_stage_3(preset: str, lengths: Sequence[int], gpus: int, gpu_gib: float = 80) -> Figure:
    """Return the GiB of states and activations on each of `gpus` GPUs in ZeRO's stage 3, by sequence length."""
    states = {part: size / GiB for part, size in state_bytes(param_count(PRESETS[preset]), "bf16", 3, gpus).items()}
    saved = activations_gib(preset, lengths)
    figure, ax = plt.subplots(figsize=(WIDTH, 2.7))
    total = stacked(ax, range(len(lengths)), states | {"activations": saved}, across=True)
    for row, size in enumerate(saved):
        ax.text(total[row], row, f" {sum(states.values()):.0f} + {size:.0f} GiB", va="center")
    ax.axvline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1)
    ax.set_title(f"an H100: {gpu_gib:g} GiB", color=LIMIT, x=gpu_gib / (1.2 * max(total)))
    ax.set_yticks(range(len(lengths)), [f"{n:,} tokens" for n in lengths])
    ax.set(xlabel=f"GiB on each of {gpus} GPUs: states + activations", xlim=(0, 1.2 * max(total)))
    legend_below(figure, ax)
    return figure


@styled
def memory_by_tp(saved: Mapping[int, tuple[int, int]], config: ModelConfig, batch: int = 4, seq: int = 128) -> Figure:
    """Return the MiB of weights and of activations per rank by tp, beside the formula and 1/tp.

    saved[tp]: bytes of weights, and bytes that a forward of batch sequences of seq tokens keeps for backward.
    """
    degrees = list(saved)
    weights = [4 * param_count(config, tp) for tp in degrees]
    activations = [activation_bytes(config, batch, seq, 4, fused_norm=False, tp=tp) for tp in degrees]
    panels = {"weights": ("parameters", weights), "activations, saved for backward": ("activations", activations)}
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3))
    for number, (ax, (title, (part, formula))) in enumerate(zip(axes, panels.items(), strict=True)):
        measured = [saved[tp][number] / MiB for tp in degrees]
        ax.bar(range(len(degrees)), measured, color=MEMORY[part], width=0.6)
        for at, value in enumerate(measured):  # at the foot of the bar, where no line is
            style = {"ha": "center", "va": "bottom", "color": ink_on(MEMORY[part])}
            ax.text(at, 0.02 * measured[0], f"{value:.1f}", **style)
        edges = np.arange(len(degrees)) - 0.3, np.arange(len(degrees)) + 0.3
        ax.hlines(np.array(formula) / MiB, *edges, color="black", label="formula")
        ax.plot(range(len(degrees)), [measured[0] / tp for tp in degrees], ":", color="black", label="1/tp")
        ax.set(title=title, ylabel="MiB on rank 0", xlabel="tp", ylim=(0, 1.2 * measured[0]))
        ax.set_xticks(range(len(degrees)), degrees)
    legend_below(figure, axes[0])
    return figure


@styled
def losses(runs: Sequence[Sequence[float]]) -> Figure:
    """Return the losses of runs by step, and how far each is from the first run."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3))
    for number, run in enumerate(runs):
        style = {"color": KINDS[number], "linestyle": ("-", "--", "-.", ":")[number], "label": f"run {number}"}
        left.plot(run, **style)
        right.plot(np.subtract(run, runs[0]), **style)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="loss less that of run 0")
    for ax in (left, right):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, left)
    return figure


@styled
def steps_over_time(profiles: Mapping[str, list[Span]], phases: Sequence[str] = ("forward", "backward")) -> Figure:
    """Return the shortest step of each profile over time, up to the end of the last of these phases.

    profiles: by title, spans of labs.profiled. A title tells the median length of each phase, and the share of it
    in which the rank waits.
    """
    figure, axes = plt.subplots(len(profiles), 1, figsize=(WIDTH, 1.6 * len(profiles) + 0.5), sharex=True)
    for ax, (title, all_spans) in zip(axes, profiles.items(), strict=True):
        step = next(iter(steps_of(all_spans)))
        last = max(span.end_ms for span in step if span.name in phases)
        drawn = [span for span in step if span.start_ms < last]
        drawn.sort(key=lambda span: (span.lane, span.name == "wait", span.start_ms))
        draw_spans(ax, drawn, COLORS)
        for span in drawn:
            if span.name in phases:
                ax.text((span.start_ms + span.end_ms) / 2, -0.45, span.name, ha="center", va="bottom")
        medians = [(phase, *waiting_shares(all_spans, phase)) for phase in phases]
        waits = [f"{phase} {length:.0f} ms, {share:.0%} of it waiting" for phase, length, share in medians]
        ax.set(title=f"{title}: {'; '.join(waits)}", xlabel="", ylim=(1.5, -0.95))
    for name, color in [(phase, PHASES[phase]) for phase in phases] + [("all-reduce", SUM), ("wait", PHASES["wait"])]:
        axes[-1].bar(0, 0, color=color, label=name)
    axes[-1].set_xlabel("ms")
    legend_below(figure, axes[-1])
    return figure


@styled
def dropout_masks(trials: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> Figure:
    """Return the elements that dropout keeps on each rank: of its head's probabilities, and of the output.

    trials: by title, two masks of each rank. Dropped elements are white.
    """
    first = next(iter(trials.values()))
    widths = [masks[kind].shape[1] for kind in (0, 1) for masks in first]
    figure = plt.figure(figsize=(WIDTH, 1.35 * len(trials)))
    rows = figure.subfigures(len(trials), 1, squeeze=False)[:, 0]
    for row, (title, of_ranks) in zip(rows, trials.items(), strict=True):
        axes = row.subplots(1, 2 * len(first), width_ratios=widths)
        for rank, masks in enumerate(of_ranks):
            for ax, mask, name in zip((axes[rank], axes[len(first) + rank]), masks, ("head", "output"), strict=True):
                ax.imshow(mask, cmap=ListedColormap(["white", RANKS[rank]]), vmin=0, vmax=1)
                ax.set(xticks=[], yticks=[])
                ax.set_xlabel(f"{name} {rank}")
                ax.spines[["top", "right"]].set_visible(True)
        row.suptitle(title)
    return figure


@styled
def checkpoints(saved: Mapping[str, int], sent: Mapping[str, int]) -> Figure:
    """Return the MiB that a rank keeps for backward and sends in a step; both by way of recomputation, in bytes."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.6))
    panels = {"saved for backward": (saved, MEMORY["activations"]), "sent in a step": (sent, SUM)}
    for ax, (title, (sizes, color)) in zip(axes, panels.items(), strict=True):
        values = [size / MiB for size in sizes.values()]
        ax.bar_label(ax.bar(list(sizes), values, color=color, width=0.6), [f"{value:.1f}" for value in values])
        ax.set(title=title, ylim=(0, 1.2 * max(values)), ylabel="MiB per rank")
    return figure


@styled
def published_speed(rows: Sequence[Scaling]) -> Figure:
    """Return published tokens/s per GPU, and the largest batch that fits, by tp."""
    speeds, names = [row.tokens_per_s for row in rows], [f"{row.tp}" for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.9))
    lost = [""] + [f"{after / before - 1:+.1%}" for before, after in zip(speeds, speeds[1:], strict=False)]
    bars = left.bar(names, speeds, color=KINDS[0], width=0.65)
    left.bar_label(bars, [f"{speed / 1e3:.1f}k\n{text}" for speed, text in zip(speeds, lost, strict=True)])
    left.set(ylabel="tokens/s per GPU", xlabel="tp", ylim=(0, 17500))
    right.bar_label(right.bar(names, [row.max_batch for row in rows], color=KINDS[2], width=0.65))
    right.set(ylabel="largest batch that fits, sequences", xlabel="tp", ylim=(0, 24))
    return figure


@styled
def speed_by_ratio(
    rows: Sequence[Scaling], predicted: Sequence[float], widths: Mapping[int, Sequence[float]]
) -> Figure:
    """Return tokens/s per GPU, published and predicted, and the ratio of all-reduces and matmuls, by tp.

    widths: by hidden size, the ratio at each tp.
    """
    names = [f"{row.tp}" for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.1))
    left.plot(names, [row.tokens_per_s for row in rows], "o-", color=KINDS[0], label="published")
    left.plot(names, predicted, "s--", color=KINDS[2], label=f"predicted from tp {names[0]}")
    left.set(xlabel="tp", ylabel="tokens/s per GPU", ylim=(0, 16000))
    left.legend(loc="lower left")
    for (hidden, ratios), style, color in zip(widths.items(), ("o-", "^-", "s-"), KINDS, strict=False):
        right.plot(names, ratios, style, color=color, markersize=4)
        right.text(len(names) - 0.85, ratios[-1], f"h = {hidden:,}", color=readable(color), va="center")
    right.axhline(1, color=GRAY, linestyle="--", linewidth=1)
    right.text(0, 1.05, "1: equally long", color=GRAY, va="bottom")
    right.set(xlabel="tp", ylabel="all-reduces / matmuls, forward", yscale="log")
    return figure


@styled
def layer_on_the_clock(hidden: int = 4096, gb_s: float = 436, tp: int = 8) -> Figure:
    """Return matmuls and all-reduces of a layer's forward as shares of its time, and their ratio by tp.

    gb_s: bandwidth of an all-reduce, GB/s; matmuls reach half of an H100's peak. The axes are the same for all values.
    """
    matmuls = 2 * 12 * hidden**2 * LAYER_TOKENS / (tp * HALF_PEAK) * 1e3
    ratio = all_reduce_ratio(hidden, tp, gb_s * 1e9, HALF_PEAK)
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.8), width_ratios=[3, 2])
    start, percent = 0.0, 100 / (1 + ratio)
    for share in (1 / 3, 2 / 3):  # attention and MLP: 4h² and 8h² of 12h² weights
        for length, color, row in ((percent * share, PHASES["forward"], 1), (percent * ratio / 2, SUM, 0)):
            left.barh(row, length, left=start, color=color, height=0.7, edgecolor="white", linewidth=0.5)
            start += length
    left.set(yticks=(0, 1), yticklabels=("all-reduce", "matmuls"), xlabel="% of one layer's forward", xlim=(0, 100))
    left.set_title(f"matmuls {matmuls:.3g} ms, all-reduces {matmuls * ratio:.3g} ms: {percent:.0f}% at work")
    degrees = [2**n for n in range(1, 7)]
    right.plot(degrees, [all_reduce_ratio(hidden, n, gb_s * 1e9, HALF_PEAK) for n in degrees], "o-", color=KINDS[0])
    right.plot(tp, ratio, "o", color=KINDS[2], markersize=9)
    right.axhline(1, color=GRAY, linestyle="--", linewidth=1)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set(xlabel="tp", ylabel="all-reduces / matmuls", ylim=(1e-3, 1e3))
    right.set_xticks(degrees, degrees)
    return figure


@styled
def fits_by_tp(preset: str, lengths: Sequence[int], degrees: Sequence[int], gpu_gib: float = 80) -> Figure:
    """Return the GiB of a model on each GPU by sequence length, a panel per tp; numbers: activations."""
    figure, axes = plt.subplots(1, len(degrees), figsize=(WIDTH, 3.3))
    for tp, ax in zip(degrees, axes, strict=True):
        states = {part: size / GiB for part, size in state_bytes(param_count(PRESETS[preset], tp), "bf16").items()}
        saved = activations_gib(preset, lengths, tp)
        total = stacked(ax, range(len(lengths)), states | {"activations": saved})
        panel_top = 1500 if tp == 1 else 280
        ax.set(title=f"tp {tp}: states {sum(states.values()):,.0f} GiB", ylim=(0, panel_top))
        ax.set_xlabel("tokens (own scale)" if tp == 1 else "tokens")
        ax.set_xticks(range(len(lengths)), [f"{n // 1024}k" for n in lengths])
        above = gpu_gib + 0.02 * panel_top
        for at, (top, size) in enumerate(zip(total, saved, strict=True)):
            under_line = gpu_gib - 0.09 * panel_top < top < above
            ax.text(at, above if under_line else top, f"{size:.4g}", ha="center", va="bottom")
        ax.axhline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1)
    axes[0].set_ylabel("GiB on each GPU")
    axes[0].plot([], [], "--", color=LIMIT, linewidth=1, label=f"a GPU: {gpu_gib:g} GiB")
    legend_below(figure, axes[0])
    return figure
