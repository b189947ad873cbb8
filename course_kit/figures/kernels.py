"""Figures of notebook 12: trips to memory, the machine, and the loads of a matmul. Notebooks 12b and 13 use some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from course_kit.figures.style import GRAY, KINDS, LIGHT, LIMIT, WIDTH, ink_on, styled
from course_lib.kernels.gpus import GPU, format_size, occupancy
from course_lib.kernels.roofline import Roofline
from course_lib.kernels.thread_blocks import BlockTraffic

OURS, EAGER, OTHERS, COMPILED = KINDS[:4]  # whose kernel a bar or a line shows
READ, WRITTEN = KINDS[3], KINDS[1]

Trip = tuple[str, float, float]  # name of a kernel, what it reads and what it writes, in sizes of one input
Rates = Mapping[str, Mapping[str, float]]  # by row, by whose kernel it is


@styled
def kernel_trips(panels: Mapping[str, Sequence[Trip]]) -> Figure:
    """Show what each kernel reads (left) and writes (right), in n, the size of one input: a row per kernel."""
    rows = max(map(len, panels.values()))
    figure, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 0.8 + 0.3 * rows))
    for ax, (title, trips) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        positions = -np.arange(len(trips))
        ax.barh(positions, [-read for _, read, _ in trips], 0.6, color=READ)
        ax.barh(positions, [written for _, _, written in trips], 0.6, color=WRITTEN)
        ax.set_yticks(positions, [name for name, _, _ in trips])
        total = sum(read + written for _, read, written in trips)
        ax.set(xlim=(-2.3, 2.3), ylim=(0.6 - rows, 0.6), title=f"{title}: {total:.1f} n")
        ax.set_xticks(range(-2, 3), ["2", "1", "0", "1", "2"])
        ax.set_xlabel("read  ←  n  →  written")
        ax.axvline(0, color="black", linewidth=0.8)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    return figure


@styled
def memory_hierarchy(gpu: GPU) -> Figure:
    """Show registers, shared memory and L1, L2 and HBM as a pyramid: sizes, bandwidth of all, and who shares them.

    Shared memory's bandwidth is the bandwidth of its banks at the highest clock; L2's is omitted if it is not
    published.
    """
    registers, tb = 4 * gpu.registers_per_sm, 1e12
    l2 = f"{gpu.l2_bytes_per_clock * gpu.clock_hz / tb:,.1f} TB/s, " if gpu.l2_bytes_per_clock else ""
    shared = gpu.shared_bytes_per_clock * gpu.sms * gpu.clock_hz / tb
    levels = [
        ("registers", registers, "each thread its own"),
        ("shared memory\nand L1", gpu.l1_bytes_per_sm, f"{shared:,.1f} TB/s, shared by a block, L1 by an SM"),
        ("L2 cache", gpu.l2_bytes, f"{l2}shared by all SMs"),
        ("HBM", gpu.memory_bytes, f"{gpu.bytes_per_s / tb:,.2f} TB/s, all SMs, and the host"),
    ]
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    for row, ((name, size, scope), color) in enumerate(zip(levels, KINDS, strict=False)):
        low, top, bottom = len(levels) - row - 1, 2.7 + 0.6 * row, 3.2 + 0.6 * row
        corners = [(-bottom / 2, low), (bottom / 2, low), (top / 2, low + 0.94), (-top / 2, low + 0.94)]
        ax.fill(*zip(*corners, strict=True), color=color)
        ax.text(0, low + 0.47, name, ha="center", va="center", color=ink_on(color))
        sizes = format_size(size)
        if row < 2:
            sizes = f"{sizes} per SM, {format_size(size * gpu.sms)} on {gpu.sms} SMs"
        ax.text(2.8, low + 0.47, f"{sizes}\n{scope}", va="center", linespacing=1.4)
    ax.set(xlim=(-2.6, 7.2), ylim=(-0.1, len(levels)), title=gpu.name)
    ax.axis("off")
    return figure


@styled
def occupancy_by_registers(gpu: GPU, threads_per_block: Sequence[int], shared_bytes: Sequence[int] = (0,)) -> Figure:
    """Show occupancy against registers per thread: a line per block size, a panel per size of shared memory."""
    figure, axes = plt.subplots(1, len(shared_bytes), figsize=(WIDTH, 2.6), sharey=True, squeeze=False)
    registers = range(16, gpu.max_registers_per_thread + 1)
    for ax, shared in zip(axes[0], shared_bytes, strict=True):
        for threads, style in zip(threads_per_block, ("-", "--", ":"), strict=False):
            percent = [100 * occupancy(gpu, threads, each, shared).fraction for each in registers]
            ax.plot(registers, percent, style, drawstyle="steps-mid", linewidth=2, label=f"{threads:,} threads")
        ax.set(ylim=(0, 105), xlim=(registers[0], registers[-1]), xlabel="registers per thread")
        ax.set_xticks([32, 64, 96, 128, 168, 208, 255])
        ax.set_title(f"{gpu.name}, {format_size(shared) if shared else 'no'} shared memory per block")
    axes[0, 0].set_ylabel("occupancy, % of an SM's warps")
    axes[0, -1].legend(title="a block of")
    return figure


def label_points(ax: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Label points (name, x, y) on a roof, left to right: in turn above it to the left, and below it to the right."""
    for number, (name, x, y) in enumerate(sorted(points, key=lambda point: point[1])):
        above = number % 2 == 0
        ax.annotate(
            name,
            (x, y),
            textcoords="offset points",
            xytext=(-5, 5) if above else (6, -4),
            ha="right" if above else "left",
            va="bottom" if above else "top",
        )


@styled
def rooflines(lines: Sequence[Roofline], points: Mapping[str, tuple[float, float]]) -> Figure:
    """Show the FLOP/s that machines attain by FLOPs per byte, both logarithmic, and kernels on the first line.

    points: FLOPs and bytes moved by name; each is drawn at its upper bound. Raises ValueError if there is no line, or
    a point is not positive.
    """
    if not lines:
        raise ValueError("no roofline to draw")
    for name, (flops, size) in points.items():
        if not (flops > 0 and size > 0):
            raise ValueError(f"{name}: {flops} FLOPs, {size} bytes: each must be above 0")
    figure, ax = plt.subplots(figsize=(WIDTH, 3.6))
    intensities = [flops / size for flops, size in points.values()] + [line.ridge for line in lines]
    low, high = min(intensities) / 8, max(intensities) * 8
    for line, color in zip(lines, ("black", *KINDS), strict=False):
        corners = [low, line.ridge, high]
        ax.plot(corners, [line.attainable(each) for each in corners], color=color, label=line.name)
    placed = [(name, flops / size, lines[0].attainable(flops / size)) for name, (flops, size) in points.items()]
    for _, x, y in placed:
        ax.plot(x, y, "o", color=KINDS[2], markersize=6)
    label_points(ax, placed)
    lowest = min(line.attainable(low) for line in lines)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(lowest, 6 * max(line.peak_flops for line in lines)))
    ax.set(xlabel="FLOPs per byte moved", ylabel="FLOP/s")
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right")
    return figure


@styled
def sectors_by_stride(sectors: Mapping[int, int]) -> Figure:
    """Show the sectors that one request of a warp loads, by stride in elements of float32, beside the formula."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.5))
    ax.bar(list(sectors), list(sectors.values()), color=OURS, label="counted")
    ax.plot(list(sectors), [min(32, 4 * s) for s in sectors], "o", color="black", markersize=4, label="min(32, 4 s)")
    ax.set(xlabel="stride s, elements of float32", ylabel="sectors per request", xticks=list(sectors))
    ax.legend(loc="upper left")
    return figure


@styled
def rates_by_size(sizes: Sequence[int], rates: Mapping[str, Sequence[float]]) -> Figure:
    """Show GB/s by number of elements: a line per implementation, in the order eager, compiled, ours."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.6))
    for (name, values), color, marker in zip(rates.items(), (EAGER, COMPILED, OURS), "s^o", strict=False):
        ax.plot(sizes, values, f"{marker}-", color=color, label=name)
    ax.set(xscale="log", xlabel="elements", ylabel="GB/s", title="ELU on this CPU, one thread", ylim=0)
    ax.legend()
    return figure


@styled
def loaded_sectors(maps: Mapping[str, np.ndarray]) -> Figure:
    """Show what a warp loads of each matrix: 2 for the loaded elements, 1 for the rest of their sectors (of 8), else 0.

    maps: by the matrix's name, [n, n].
    """
    figure, axes = plt.subplots(1, len(maps), figsize=(5.4, 2.8))
    for ax, (name, loaded) in zip(np.atleast_1d(axes), maps.items(), strict=True):
        ax.imshow(loaded, cmap=ListedColormap(["white", KINDS[1], KINDS[2]]), vmin=0, vmax=2)
        sectors = int((loaded > 0).sum()) // 8
        ax.set(title=f"{name}: {sectors} sector{'' if sectors == 1 else 's'}", xticks=[], yticks=[])
        ax.spines[:].set_visible(True)
    return figure


@styled
def matmul_traffic(traffic: Mapping[str, BlockTraffic]) -> Figure:
    """Show, for each matmul, its sectors of global memory (logarithmic) and its turns at shared memory's banks."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.7))
    names = list(traffic)
    sectors, turns = ([each.sectors() for each in traffic.values()], [each.shared_ways for each in traffic.values()])
    left.bar_label(left.bar(names, sectors, color=KINDS[0]), fmt="{:,.0f}")
    right.bar_label(right.bar(names, turns, color=KINDS[0]), fmt="{:,.0f}")
    left.set(yscale="log", title="sectors of global memory", ylim=(1e3, 5 * max(sectors)))
    right.yaxis.set_major_formatter("{x:,.0f}")
    right.set(title="turns at shared memory's banks", ylim=(0, 1.2 * max(1, *turns)))
    return figure


@styled
def fetch_time_by_group(fetch_us: Mapping[int, float], matmul_us: float) -> Figure:
    """Show the microseconds to fetch the strips of a wave, by rows in a group, against those of the wave's matmuls."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.6))
    ax.plot(list(fetch_us), list(fetch_us.values()), "o-", color=OURS)
    ax.axhline(matmul_us, color=GRAY, linestyle="--")
    ax.annotate(
        "the wave's matmuls, at the data sheet's peak",
        (max(fetch_us) ** 0.5, matmul_us),
        textcoords="offset points",
        xytext=(0, 3),
        ha="center",
        color=GRAY,
    )
    ax.set(xscale="log", xlabel="rows in a group", ylabel="µs to fetch a wave's strips")
    ax.set_ylim(0, 1.15 * max(matmul_us, *fetch_us.values()))
    ax.set_xticks(list(fetch_us), list(map(str, fetch_us)))
    ax.minorticks_off()
    return figure


def recorded_rates(panels: Mapping[str, Rates], unit: str, highest: float, limit: tuple[str, float] | None) -> Figure:
    """Draw recorded rates of several implementations as dots, a row per kernel: a panel per pass.

    highest: the end of the axis; limit: the name and rate of a line. Implementations: eager or flash, compile or flex,
    Liger or cuDNN, ours.
    """
    looks = {
        ("eager", "flash"): (EAGER, "s", 50),
        ("compile", "flex"): (COMPILED, "D", 40),
        ("Liger", "cuDNN"): (OTHERS, "^", 60),
        ("ours",): (OURS, "o", 45),
    }
    names = list(dict.fromkeys(name for rates in panels.values() for name in rates))
    figure, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 1.2 + 0.26 * len(names)), sharey=True)
    for ax, (title, rates) in zip(axes, panels.items(), strict=True):
        for position in range(len(names)):
            ax.axhline(position, color=LIGHT, linewidth=0.8, zorder=0)
        for aliases, (color, marker, size) in looks.items():
            rated = [(rate, names.index(row), who) for row, each in rates.items() for who, rate in each.items()]
            dots = [(rate, position, who) for rate, position, who in rated if who in aliases]
            if dots:
                xs, ys, whose = zip(*dots, strict=True)
                ax.scatter(xs, ys, size, color, marker, label=whose[0], edgecolor="black", linewidth=0.5)
        if limit:
            ax.axvline(limit[1], color=LIMIT, linestyle=":", label=limit[0])
        ax.set(xlim=(0, highest), xlabel=unit, title=title, ylim=(len(names) - 0.5, -0.5))
        ax.set_yticks(range(len(names)), names)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure
