"""Errors of numbers and sums in 8 bits, and what FP8 can save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from course_kit.figures.style import GRAY, KINDS, LIGHT, WIDTH, styled
from course_kit.labs.fp8 import ScaleErrors, fp8_speedup

FORMATS = {"E4M3": (KINDS[3], "-"), "E5M2": (KINDS[1], "--")}
WAYS = [(KINDS[4], ":"), (KINDS[2], "-"), (KINDS[1], "--"), (KINDS[0], "-.")]  # to quantize


def power_of_two_axis(ax: Axes, label: str) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xlabel(label)


@styled
def errors_by_scale(results: Mapping[str, Mapping[str, ScaleErrors]]) -> Figure:
    """Return the relative error in E4M3 and E5M2 by scale, a panel per kind of numbers; dots: no scale at all."""
    figure, axes = plt.subplots(1, len(results), figsize=(WIDTH, 3.2), sharey=True)
    for ax, (kind, by_format) in zip(axes, results.items(), strict=True):
        ax.axvline(1, color=LIGHT, zorder=0)
        for name, (factors, errors, unscaled) in by_format.items():
            color, style = FORMATS[name]
            ax.plot(factors, errors, color=color, linestyle=style, linewidth=2, label=name)
            ax.plot(*unscaled, "o", color=color, markersize=7, label=f"{name} without a scale")
        power_of_two_axis(ax, "scale (1: the largest number fits just so)")
        ax.set(yscale="log", title=kind)
        ax.yaxis.set_minor_locator(NullLocator())
    axes[0].set(ylabel="relative error")
    axes[0].set_yticks([0.026, 0.052, 0.1, 1], ["2.6%", "5.2%", "10%", "100%"])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


@styled
def outlier_errors(factors: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Figure:
    """Return the error of the other channels by the size of an outlier channel, a line per way to quantize."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    for (name, values), (color, style) in zip(errors.items(), WAYS, strict=True):
        ax.plot(factors, values, color=color, linestyle=style, label=name, linewidth=2)
    power_of_two_axis(ax, "one channel is larger by")
    ax.set(yscale="log", ylabel="error of the others")
    ax.legend()
    return figure


@styled
def sum_errors(
    lengths: Sequence[int], errors: Mapping[str, Mapping[str, Sequence[float]]], quantization: Mapping[str, float]
) -> Figure:
    """Return the relative error of a sum by its length k, a panel per kind of numbers, a line per accumulator.

    quantization: the error of quantization itself, by kind.
    """
    figure, axes = plt.subplots(1, len(errors), figsize=(WIDTH, 3.4), sharey=True)
    looks = [(KINDS[2], "o-"), (KINDS[0], "s-"), (GRAY, "D-")]
    for ax, (kind, by_accumulator) in zip(axes, errors.items(), strict=True):
        for (label, values), (color, style) in zip(by_accumulator.items(), looks, strict=True):
            ax.plot(lengths, values, style, color=color, markersize=4, label=label)
        ax.axhline(quantization[kind], color="black", linestyle=":", label="quantization itself, k = 4096")
        ax.set(xscale="log", yscale="log", xlabel="k", title=kind)
        ax.set_xticks(lengths, [f"{k}" for k in lengths])
        ax.xaxis.set_minor_locator(NullLocator())
    axes[0].set(ylabel="relative error of the sum")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@styled
def speedups(sizes: Sequence[int], cast_bytes: Mapping[str, float]) -> Figure:
    """Return the speed-up of FP8 over BF16 of a linear layer on an H100 by m = n = k, a line per kind of casts."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    for (label, size), color, mark in zip(cast_bytes.items(), (KINDS[0], KINDS[1], KINDS[2]), "osD", strict=True):
        ax.plot(sizes, [fp8_speedup(s, s, s, size) for s in sizes], f"{mark}-", color=color, label=f"{label}: {size:g}")
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set(xscale="log", xlabel="m = n = k", ylabel="speed-up over BF16", ylim=(0, 2))
    ax.set_xticks(sizes, [f"{s:,}" for s in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    figure.legend(*ax.get_legend_handles_labels(), title="bytes per number", loc="outside right upper")
    return figure
