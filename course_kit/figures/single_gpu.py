"""Figures of notebook 01: what training keeps in memory, and what a step does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_kit.figures.style import GRAY, KINDS, LIMIT, MEMORY, PHASES, WIDTH, ink_on, limit_line, styled
from course_lib.single_gpu.memory import (
    activation_bytes,
    gpt_activation_bytes,
    gpt_param_count,
    param_count,
    parameter_parts,
    state_bytes,
)
from course_lib.single_gpu.model import PRESETS, ModelConfig
from course_lib.single_gpu.profile import MemoryProfile

GiB, MiB = 2**30, 2**20
OPERATIONS = [  # of a GPT layer: name, bytes in sbh of what is h or 4h wide, in sbh · as/h of what is a·s wide
    ("Layer-\nNorm", 2, 0),
    ("Q, K, V", 2, 0),
    ("Q Kᵀ", 4, 0),
    ("soft-\nmax", 0, 2),
    ("drop-\nout", 0, 1),
    ("× V", 2, 2),
    ("output", 2, 0),
    ("drop-\nout", 1, 0),
    ("add", 0, 0),
    ("Layer-\nNorm", 2, 0),
    ("up", 2, 0),
    ("GELU", 8, 0),
    ("down", 8, 0),
    ("drop-\nout", 1, 0),
    ("add", 0, 0),
]


def stack(
    ax: Axes, position: float, parts: dict[str, float], named: bool, width: float = 0.6, across: bool = False
) -> float:
    """Draw one bar of parts, in GiB, in the colors of MEMORY; `named`: for the legend. Return its length."""
    end = 0.0
    for name, size in parts.items():
        at: dict[str, Any] = {
            "color": MEMORY[name],
            "label": name if named else None,
            "edgecolor": "white",
            "linewidth": 0.5,
        }
        if across:
            ax.barh(position, size / GiB, left=end, height=width, **at)
        else:
            ax.bar(position, size / GiB, bottom=end, width=width, **at)
        end += size / GiB
    return end


@styled
def training_memory(config: ModelConfig, lengths: Sequence[int], gpu_gib: float = 80) -> Figure:
    """Return bars in GiB: a model's file in BF16, and training it on one sequence of each of these lengths."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.2))
    ax.bar(0, 2 * param_count(config) / GiB, width=0.6, color=MEMORY["parameters"])
    for position, seq in enumerate(lengths, start=1):
        parts = state_bytes(param_count(config), "bf16") | {"activations": activation_bytes(config, batch=1, seq=seq)}
        stack(ax, position, parts, named=position == 1)
    limit_line(ax, gpu_gib, "one H100")
    ax.set_xticks(range(len(lengths) + 1), ["the file"] + [f"training,\n{seq:,} tokens" for seq in lengths])
    ax.set(ylabel="GiB", title="BF16 mixed precision, AdamW, flash attention, one sequence")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper")
    return figure


@styled
def step_phases() -> Figure:
    """Return a drawing of a step's three phases, layer by layer, and what each hands to the next."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    ax.set(xlim=(0, 12.3), ylim=(-0.1, 4))
    ax.axis("off")
    rows = [
        (3.3, "forward", "layer", PHASES["forward"], 1),
        (2.2, "kept", "activations", MEMORY["activations"], 0),
        (1.1, "backward", "gradient", PHASES["backward"], -1),
        (0.0, "optimizer step", "new layer", PHASES["optimizer"], 0),
    ]
    for y, phase, word, color, direction in rows:
        ax.text(0, y + 0.3, phase, va="center", weight="bold")
        for i in range(4):
            x = 3 + 2.5 * i
            ax.add_patch(plt.Rectangle((x, y), 1.7, 0.6, color=color))
            ax.text(x + 0.85, y + 0.3, f"{word} {i}", ha="center", va="center", color=ink_on(color))
            if direction and i < 3:
                start, end = (x + 1.7, x + 2.5) if direction > 0 else (x + 2.5, x + 1.7)
                ax.annotate("", (end, y + 0.3), (start, y + 0.3), arrowprops={"arrowstyle": "->"})
            if y > 0:
                ax.annotate("", (x + 0.85, y - 0.5), (x + 0.85, y), arrowprops={"arrowstyle": "->", "color": GRAY})
    return figure


def parameter_shares(config: ModelConfig) -> dict[str, float]:
    """Return the shares of a model's parameters in attention, MLPs, norms, and embedding and head."""
    parts = parameter_parts(config)
    counts = {
        "attention": config.layers * (parts["q_o"] + parts["kv"]),
        "MLP": config.layers * parts["mlp"],
        "norms": config.layers * parts["norms"] + parts["final_norm"],
        "embedding and head": parts["embedding"] + parts["head"],
    }
    return {name: count / param_count(config) for name, count in counts.items()}


@styled
def where_parameters_are(names: Sequence[str]) -> Figure:
    """Return the shares of the parameters of some presets by part, a bar each."""
    figure, ax = plt.subplots(figsize=(WIDTH, 0.7 + 0.4 * len(names)))
    for row, name in enumerate(names):
        left = 0.0
        for (part, share), color in zip(parameter_shares(PRESETS[name]).items(), KINDS, strict=False):
            ax.barh(
                row, share, left=left, label=part if row == 0 else None, color=color, edgecolor="white", linewidth=0.5
            )
            if share > 0.05:
                ax.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", color=ink_on(color))
            left += share
    ax.set(yticks=range(len(names)), yticklabels=list(names), xlabel="share of the parameters", xlim=(0, 1))
    ax.invert_yaxis()
    figure.legend(*ax.get_legend_handles_labels(), ncols=4, loc="outside upper center")
    return figure


@styled
def gpt_layer_activations() -> Figure:
    """Return the operations of a GPT layer with the bytes that each keeps (Korthikanti et al. 2022, section 4)."""
    per_score, red = 96 * 2048 / 12288, MEMORY["activations"]  # as/h of GPT-3 at 2,048 tokens: 16
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    ax.set(xlim=(-0.8, 14.6), ylim=(-13, 42))
    ax.axis("off")
    line = {"color": GRAY, "linewidth": 0.8, "zorder": 0}
    ax.plot([-0.8, 14], [-4.75, -4.75], **line)
    for start, end in ((-0.6, 8), (8.5, 14)):  # the residual
        ax.plot([start, start, end, end], [-4.75, -11, -11, -8], **line)
    for x, (name, wide, scores) in enumerate(OPERATIONS):
        ax.add_patch(plt.Rectangle((x - 0.46, -8), 0.92, 6.5, facecolor="#EEEEEE", edgecolor=GRAY, linewidth=0.5))
        ax.text(x, -4.75, name, ha="center", va="center", fontsize=8)
        ax.bar(x, wide, width=0.7, color=red, linewidth=0)
        if scores:
            ax.bar(x, scores * per_score, bottom=wide, width=0.7, facecolor="white", edgecolor=red, hatch="///")
        words = [str(wide)] * (wide > 0) + [f"{scores if scores > 1 else ''}as/h"] * (scores > 0)
        ax.text(x, wide + scores * per_score + 0.8, " + ".join(words), ha="center", fontsize=8)
    ax.text(7.6, 36, "bytes kept, in sbh: 34 solid, 5as/h hatched")
    ax.text(7.6, 31, "heights: GPT-3 at 2,048 tokens, as/h = 16")
    return figure


@styled
def activations_by_length(config: ModelConfig, lengths: Sequence[int], gpu_gib: float = 80) -> Figure:
    """Return the activations of one sequence in GiB by its length, for three ways to compute."""
    curves: dict[str, dict] = {
        "plain attention": {"flash": False},
        "flash attention": {},
        "full recomputation": {"recompute": "full"},
    }
    figure, ax = plt.subplots(figsize=(WIDTH, 3.2))
    for (name, options), color, mark in zip(curves.items(), KINDS, "osD", strict=False):
        sizes = [activation_bytes(config, 1, int(n), **options) / GiB for n in lengths]
        ax.loglog(lengths, sizes, f"{mark}-", color=color, markersize=4, label=name)
    ax.loglog(lengths, [4 * config.vocab * n / GiB for n in lengths], "k:", label="the loss alone, part of each")
    limit_line(ax, gpu_gib, "one H100", position=0.74)
    ax.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
    ax.minorticks_off()
    ax.set(xlabel="tokens in one sequence", ylabel="GiB of activations, BF16")
    ax.legend()
    return figure


@styled
def memory_over_steps(
    timeline: MemoryProfile, phases: Sequence[tuple[float, str]] = (), limit_mib: float = 0
) -> Figure:
    """Return a memory timeline in MiB by category, with names at some moments (s) and the memory of a device."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.6 if phases else 2.6))
    timeline.plot(ax, MEMORY)
    white = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
    for moment, phase in phases:
        ax.axvline(moment, color="white", linestyle=":", linewidth=0.8)
        ax.text(moment, 2, phase, rotation=90, va="bottom", fontsize=8, bbox=white)
    if limit_mib:
        ax.axhline(limit_mib, color=LIMIT, linestyle="--", linewidth=1)
        first = timeline.marks[0][0]
        ax.text(first, limit_mib + 2, f" a device of {limit_mib:.0f} MiB", color=LIMIT, bbox=white, va="bottom")
    figure.legend(*ax.get_legend_handles_labels(), ncols=5, loc="outside lower center")
    return figure


@styled
def training_loss(losses: Sequence[float], byte_counts: Sequence[int]) -> Figure:
    """Return the loss of each step, in nats per byte, with two levels: a uniform guess, and one by byte frequency.

    byte_counts: how often each of the 256 bytes comes in the text.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    ax.plot(losses, color=KINDS[0])
    shares = [count / sum(byte_counts) for count in byte_counts if count]
    entropy = -sum(share * math.log(share) for share in shares)
    for level, name in ((math.log(256), "a uniform guess"), (entropy, "a guess by\nbyte frequency")):
        ax.axhline(level, color=GRAY, linestyle=":")
        ax.text(1.01, level, name, va="center", color=GRAY, transform=ax.get_yaxis_transform())
    ax.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, len(losses) - 1), ylim=(1.5, 6.2))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


@styled
def states_and_activations(gpu_gib: float = 80) -> Figure:
    """Return training memory in GiB of three Llama-3.1 shapes by length: states in FP32, activations in two ways."""
    shapes = {"8B": (32, 4096, 32), "70B": (80, 8192, 64), "405B": (126, 16384, 128)}
    lengths = [1024, 2048, 4096, 8192, 16384]
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 3.4), sharey=True)
    for ax, (name, (layers, hidden, heads)) in zip(axes, shapes.items(), strict=True):
        states = sum(state_bytes(gpt_param_count(hidden, layers, 128256), "fp32").values()) / GiB
        ax.semilogy([0, 4], [states, states], color=KINDS[4], label="parameters, gradients and optimizer states")
        red = MEMORY["activations"]
        for core, mode, face in (("plain", "none", red), ("flash", "selective", "white")):
            sizes = [gpt_activation_bytes(layers, hidden, heads, 1, n, mode) / GiB for n in lengths]
            label = f"activations, {core} attention"
            ax.semilogy(range(5), sizes, "o-", color=red, markerfacecolor=face, markersize=5, label=label)
        ax.axhline(gpu_gib, color=LIMIT, linestyle="--", linewidth=1, label=f"one H100: {gpu_gib:g} GiB")
        ax.set_xticks(range(5), [f"{n // 1024}k" for n in lengths])
        ax.set(title=f"Llama-3.1 {name}", xlabel="tokens", ylim=(1, 60_000))
    axes[0].set_ylabel("GiB")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@styled
def memory_budget(cases: dict[str, dict[str, float]], gpu_gib: float, most_gib: float | None = None) -> Figure:
    """Return one horizontal bar per case (name: bytes by category), in GiB, and a line at `gpu_gib`.

    most_gib: the end of a fixed, logarithmic axis, for figures that are drawn again with other cases. On it, a bar's
    parts have their shares of its length.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 1.4 + 0.35 * len(cases)))
    widest = max(sum(parts.values()) for parts in cases.values()) / GiB
    for row, parts in enumerate(cases.values()):
        end = draw_in_shares(ax, row, parts) if most_gib else stack(ax, row, parts, row == 0, 0.8, across=True)
        ax.text(min(end, most_gib / 8) if most_gib else end, row, f"  {end:,.1f}", va="center")
    ax.axvline(gpu_gib, color=LIMIT, linestyle="--")
    ax.text(gpu_gib, -0.5, f" GPU: {gpu_gib:g} GiB ", color=LIMIT, va="bottom")
    ax.set(yticks=range(len(cases)), yticklabels=list(cases), xlabel="GiB")
    if most_gib:
        ax.set(xscale="log", xlim=(1, most_gib))
        ax.set_xlabel("GiB (each step doubles)")
        ticks = [2**n for n in range(int(math.log2(most_gib)) + 1)]
        ax.set_xticks(ticks, [f"{tick:,}" if n % 2 == 0 else "" for n, tick in enumerate(ticks)])
        ax.minorticks_off()
    else:
        ax.set_xlim(0, 1.12 * max(widest, gpu_gib))
    ax.invert_yaxis()
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper left", ncols=5)
    return figure


def draw_in_shares(ax: Axes, row: float, parts: dict[str, float]) -> float:
    """Draw a bar from 1 GiB to the sum of the parts on a logarithmic axis, each part with its share of the length."""
    total = sum(parts.values())
    length, done = math.log(max(total / GiB, 1)), 0.0
    for name, size in parts.items():
        left, done = math.exp(length * done), done + size / total
        width = math.exp(length * done) - left
        ax.barh(row, width, left=left, color=MEMORY[name], label=name, edgecolor="white", linewidth=0.5)
    return total / GiB
