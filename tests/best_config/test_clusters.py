"""course_lib.best_config.clusters: links and shared network cards worked by hand; the data sheets' numbers. Plain
numpy.
"""

import csv
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from course_lib.best_config.clusters import CLUSTERS, NANOTRON, Cluster, Software, ring, stride_of
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout, groups_along

HARDWARE = list(csv.DictReader((Path(__file__).parents[2] / "data" / "hardware.csv").open()))
PERFECT = Software(nvlink_efficiency=1.0, network_efficiency=1.0)
EIGHT = Cluster("eight a node", 1e15, 80e9, 3e12, nvlink=400e9, network=50e9, software=PERFECT)


@pytest.mark.parametrize(
    "size, stride, gigabytes, leaves",
    [
        (8, 1, 400, False),  # a whole node
        (2, 4, 400, False),  # ranks 0 and 4
        (16, 1, 400, True),  # two nodes, all eight cards: as fast as NVLink
        (4, 4, 100, True),  # ranks 0, 4 | 8, 12: two of a node, so two cards
        (32, 2, 200, True),  # four of a node
        (2, 8, 50, True),  # one of each node
        (4, 64, 50, True),  # nodes far apart
        (2, 6, 50, True),  # 0 and 6 are in a node, 2 | 8 are not: the slowest counts
    ],
)
def test_a_ring_has_as_many_cards_as_gpus_in_a_node(size, stride, gigabytes, leaves):
    bandwidth, beyond = ring(EIGHT, size, stride)
    assert bandwidth == gigabytes * 1e9 and beyond == leaves


def test_smaller_nodes_and_faster_cards():
    four = dataclasses.replace(EIGHT, gpus_per_node=4)
    assert ring(four, 8, 1) == (200e9, True), "four cards"
    assert ring(four, 4, 1) == (400e9, False)
    fast = dataclasses.replace(EIGHT, network=200e9)
    assert ring(fast, 16, 1) == (400e9, True), "no faster than the links inside the node"
    assert ring(fast, 2, 8) == (200e9, True)


def test_software_reaches_a_part_of_each_link():
    half = EIGHT.with_software(nvlink_efficiency=0.5, network_efficiency=0.25)
    assert ring(half, 8, 1)[0] == 200e9
    assert ring(half, 4, 8)[0] == 12.5e9
    assert EIGHT.software == PERFECT, "with_software makes another cluster"
    with pytest.raises(TypeError, match="no_such_constant"):
        EIGHT.with_software(no_such_constant=1)


def test_a_ring_of_arrays_is_that_of_each():
    sizes, strides = (each.ravel() for each in np.meshgrid([1, 2, 3, 4, 8, 16], [1, 2, 4, 8, 24]))
    bandwidth, beyond = ring(EIGHT, sizes, strides)
    for i, (size, stride) in enumerate(zip(sizes.tolist(), strides.tolist(), strict=True)):
        assert (bandwidth[i], beyond[i]) == ring(EIGHT, size, stride)


@pytest.mark.parametrize("layout", [Layout(2, 3, 5, 7), Layout(2, 2, 2, 2), Layout(dp=4, tp=2), Layout(1, 3, 2, 4)])
def test_a_stride_is_the_distance_of_neighbours(layout):
    """Notebook 10 counts ranks the same way: dp outermost, tp innermost."""
    for axis in ("dp", "pp", "cp", "tp"):
        if getattr(layout, axis) > 1:
            first = groups_along(layout, axis)[0]
            assert stride_of(layout, axis, Software().order) == first[1] - first[0]


def test_nanotron_has_its_pipelines_outermost():
    layout = Layout(dp=2, pp=3, cp=5, tp=7)
    assert [stride_of(layout, axis, NANOTRON.order) for axis in ("pp", "dp", "cp", "tp")] == [70, 35, 7, 1]
    table = LayoutTable.of([layout, Layout(dp=8, tp=2)])
    assert stride_of(table, "pp", NANOTRON.order).tolist() == [70, 16]


@pytest.mark.parametrize(
    "name, gpu, bandwidth, system",
    [
        ("H100", "H100-SXM-80GB", "3.35", "DGX H100 (system)"),
        ("H100, EFA", "H100-SXM-80GB", "3.35", "AWS P5/P5e EFA v2 (H100/H200 system)"),
        ("H200", "H200-SXM-141GB", "4.8", "AWS P5/P5e EFA v2 (H100/H200 system)"),
        ("A100", "A100-SXM-80GB", "2.039", "Selene (A100-80GB system)"),
        ("B200", "B200-SXM", "8.0", "AWS P6-B200 EFA v4"),
    ],
)
def test_the_presets_are_those_of_the_data_sheets(name, gpu, bandwidth, system):
    """Data sheets print GB for what is GiB of memory; links' GB are 1e9 bytes."""
    cluster = CLUSTERS[name]
    sheet = next(row for row in HARDWARE if row["gpu"] == gpu and row["hbm_tb_s"] == bandwidth)
    assert cluster.peak_flops == float(sheet["bf16_dense_tflops"]) * 1e12
    assert cluster.memory_bytes == float(sheet["hbm_gb"]) * 2**30
    assert cluster.memory_bandwidth == pytest.approx(float(sheet["hbm_tb_s"]) * 1e12)
    assert cluster.nvlink == float(sheet["nvlink_gb_s_per_direction"]) * 1e9
    node = next(row["inter_node"] for row in HARDWARE if row["gpu"] == system)
    assert cluster.network * cluster.gpus_per_node == float(re.search(r"= (\d+) GB/s per node", node)[1]) * 1e9


def test_every_preset_is_held_against_its_data_sheet():
    assert set(CLUSTERS) == {"H100", "H100, EFA", "H200", "A100", "B200"}
    assert CLUSTERS["H100, EFA"].software == NANOTRON
    assert all(CLUSTERS[name].software == Software() for name in CLUSTERS if name != "H100, EFA")
