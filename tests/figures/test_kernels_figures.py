"""course_kit.figures.kernels: bars and lines are the numbers given, and everything can be read. CPU."""

import numpy as np
import pytest

from course_kit.figures import kernels as figures
from course_kit.labs import kernels as labs
from course_lib.kernels.gpus import GPUS
from course_lib.kernels.roofline import Roofline, roofline_of
from course_lib.kernels.thread_blocks import BlockTraffic
from course_lib.kernels.thread_kernels import LADDER
from figure_faults import faults

H100 = GPUS["H100"]


def words(figure) -> str:
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


def test_trips_go_left_and_right_by_what_they_read_and_write():
    eager = [("add", 2.0, 1.0), ("pow", 1.0, 1.0), ("mean", 1.0, 0.001), ("rsqrt", 0.001, 0.001), ("mul", 1.0, 1.0)]
    figure = figures.kernel_trips({"eager": eager, "fused": [("one kernel", 2, 2)]})
    assert not faults(figure)
    left, right = figure.axes
    widths = [bar.get_width() for bar in left.patches]
    assert widths == [-read for _, read, _ in eager] + [written for _, _, written in eager]
    assert left.get_title() == "eager: 8.0 n" and right.get_title() == "fused: 4.0 n"
    assert [label.get_text() for label in left.get_yticklabels()] == [name for name, _, _ in eager]


def test_the_hierarchy_has_the_sizes_and_bandwidths():
    figure = figures.memory_hierarchy(H100)
    assert not faults(figure)
    assert all(word in words(figure) for word in ("256 KiB", "33.5 TB/s", "50 MiB", "80 GiB", "3.35 TB/s"))
    assert "None" not in words(figures.memory_hierarchy(GPUS["B200"]))  # L2's bandwidth isn't published


def test_occupancy_is_a_staircase_per_block_size():
    figure = figures.occupancy_by_registers(H100, (128, 512, 1024), (0, 48 * 1024))
    assert not faults(figure)
    left, right = figure.axes
    heights = dict(zip(*left.lines[0].get_data(), strict=True))
    assert heights[32] == 100 and heights[33] == 75 and heights[168] == 18.75
    assert min(left.lines[2].get_ydata()) == 0  # 1,024 threads of 65 registers don't start
    assert max(right.lines[0].get_ydata()) == 25  # 4 blocks of 4 warps, by shared memory


def test_kernels_stand_on_the_first_roof():
    here = Roofline(102e9, 32.7e9, "this CPU, float32, measured")
    points = {"elementwise": (1.0, 4.0), "RMSNorm": (4.0, 4.0), "softmax": (5.0, 4.0), "matmul 512": (512.0, 3.0)}
    figure = figures.rooflines([roofline_of(H100), here], points | {"matmul 4096": (4096.0, 3.0)})
    assert not faults(figure)
    (axes,) = figure.axes
    for line, drawn in zip((roofline_of(H100), here), axes.lines, strict=False):
        assert [line.attainable(x) for x in drawn.get_xdata()] == list(drawn.get_ydata())
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines[2:]]
    assert dots[0] == (0.25, 0.25 * H100.bytes_per_s) and dots[-1][1] == H100.peak_flops["bfloat16"]
    renderer = figure.canvas.get_renderer()
    for text in axes.texts:  # no label is struck through by a roof
        box = text.get_window_extent(renderer)
        for line in axes.lines[:2]:
            path = axes.transData.transform(np.column_stack(line.get_data()))
            for share in np.linspace(0, 1, 400):
                x = path[0, 0] + share * (path[-1, 0] - path[0, 0])
                assert not (box.x0 < x < box.x1 and box.y0 < np.interp(x, *path.T) < box.y1), text.get_text()
    for lines, kernels in (([], {}), ([here], {"none": (0.0, 1.0)}), ([here], {"none": (1.0, 0.0)})):
        with pytest.raises(ValueError):
            figures.rooflines(lines, kernels)


def test_sectors_by_stride_beside_the_formula():
    counted = labs.sectors_by_stride(range(1, 17))
    figure = figures.sectors_by_stride(counted)
    assert not faults(figure)
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == list(counted.values()) == list(axes.lines[0].get_ydata())


def test_rates_are_a_line_per_implementation():
    rates = {"eager": [1.0, 2.0, 3.0], "torch.compile": [0.5, 2.5, 6.0], "our C++": [2.0, 2.0, 2.1]}
    figure = figures.rates_by_size([2**12, 2**16, 2**20], rates)
    assert not faults(figure)
    (axes,) = figure.axes
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == rates
    assert len({line.get_color() for line in axes.lines}) == 3 and axes.get_ylim()[0] == 0


@pytest.mark.parametrize("name, titles", [
    ("naive", ["a: 32 sectors", "b: 1 sector"]), ("coalesced", ["a: 1 sector", "b: 4 sectors"])
])  # fmt: skip
def test_loaded_elements_and_the_rest_of_their_sectors(name, titles):
    maps = labs.loaded_maps(*LADDER[name])
    figure = figures.loaded_sectors(maps)
    assert not faults(figure)
    assert [axes.get_title() for axes in figure.axes] == titles
    for axes, loaded in zip(figure.axes, maps.values(), strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), loaded)


def test_traffic_of_the_matmuls():
    traffic = {"naive": 274432, "coalesced": 41472, "tiled": 2560, "coarsened": 2560}
    turns = {"naive": 0, "coalesced": 0, "tiled": 17408, "coarsened": 10240}

    class Counted(BlockTraffic):
        def sectors(self, kind: str = "") -> int:
            return traffic[self.name]

    counted = {}
    for name in traffic:
        counted[name] = Counted()
        counted[name].name, counted[name].shared_ways = name, turns[name]
    figure = figures.matmul_traffic(counted)
    assert not faults(figure)
    left, right = figure.axes
    assert [bar.get_height() for bar in left.patches] == list(traffic.values())
    assert [bar.get_height() for bar in right.patches] == list(turns.values())
    assert [text.get_text() for text in left.texts] == ["274,432", "41,472", "2,560", "2,560"]


def test_fetches_of_a_wave_against_its_matmuls():
    fetch_us, matmul_us = labs.fetch_times(H100, (1, 2, 4, 8, 16, 32, 64))
    figure = figures.fetch_time_by_group(fetch_us, matmul_us)
    assert not faults(figure)
    line, limit = figure.axes[0].lines
    assert list(line.get_ydata()) == list(fetch_us.values()) and set(limit.get_ydata()) == {matmul_us}
    assert fetch_us[1] > matmul_us > 2 * fetch_us[8]  # as the text says
