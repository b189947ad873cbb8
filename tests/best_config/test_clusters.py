"""course_lib.best_config.clusters: links and shared network cards worked by hand; the data sheets' numbers. Plain
numpy.
"""

import csv
import dataclasses
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

from course_lib.best_config.clusters import CLUSTERS, Cluster, ring, stride_of
from course_lib.best_config.software import NANOTRON, SOFTWARE, Software
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout, groups_along
from course_lib.single_gpu.devices import read_table

DATA = Path(__file__).parents[2] / "data"
HARDWARE = read_table("hardware.csv")
REPORTED = {row["cluster"]: int(row["total_mib"]) for row in csv.DictReader((DATA / "gpu_memory.csv").open())}
PERFECT = Software(nvlink_efficiency=1.0, network_efficiency=1.0)
EIGHT = Cluster("eight a node", 1e15, 80e9, 3e12, node_link=400e9, network=50e9, software=PERFECT)


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


PRESETS = {  # name: the GPU's row and its TB/s, which tells two rows of one GPU apart; the system's row; the link's
    "H100": ("H100-SXM-80GB", "3.35", "DGX H100 (system)", None),
    "H100, EFA": ("H100-SXM-80GB", "3.35", "AWS P5/P5e EFA v2 (H100/H200 system)", None),
    "H200": ("H200-SXM-141GB", "4.8", "AWS P5/P5e EFA v2 (H100/H200 system)", None),
    "A100": ("A100-SXM-80GB", "2.039", "Selene (A100-80GB system)", None),
    "A100-40GB": ("A100-SXM-40GB", "1.555", "Azure ND A100 v4 (A100-40GB system)", None),
    "B200": ("B200-SXM", "8.0", "AWS P6-B200 EFA v4", None),
    "GB200 NVL72": ("GB200", "8.0", "Azure ND GB200 v6 (GB200 NVL72 system)", None),
    "MI300X": ("MI300X", "5.3", "Azure ND MI300X v5 (MI300X system)", None),
    "H100 PCIe": ("H100-PCIe-80GB", "2.0", "PCIe 2-8-5 reference node (H100 PCIe system)", "PCIe 5.0 x16 (link)"),
    "L40S": ("L40S", "0.864", "AWS G6e (L40S system)", "PCIe 4.0 x16 (link)"),
    "RTX 4090": ("RTX 4090", "1.008", None, "PCIe 4.0 x16 (link)"),
}


def row_of(gpu: str, bandwidth: str = "") -> dict[str, str]:
    return next(row for row in HARDWARE if row["gpu"] == gpu and row["hbm_tb_s"] == bandwidth)


def test_every_preset_is_held_against_its_data_sheet():
    assert set(CLUSTERS) == set(PRESETS)
    assert CLUSTERS["H100, EFA"].software == NANOTRON
    assert all(CLUSTERS[name].software == Software() for name in CLUSTERS if name != "H100, EFA")


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_are_those_of_the_data_sheets(name):
    """Memory: GiB where the sheet prints GB, or what the notes say that the driver reports. Links: GB are 1e9 bytes."""
    gpu, bandwidth, system, link = PRESETS[name]
    cluster, sheet = CLUSTERS[name], row_of(gpu, bandwidth)
    assert cluster.peak_flops == float(sheet["bf16_dense_tflops"]) * 1e12
    fp8 = sheet["fp8_dense_tflops"]
    assert cluster.fp8_flops == (float(fp8) * 1e12 if fp8 else None)
    reported = re.search(r"nvidia-smi.*: (\d+) MiB", sheet["notes"])
    assert cluster.memory_bytes == (int(reported[1]) * 2**20 if reported else float(sheet["hbm_gb"]) * 2**30)
    assert cluster.memory_bandwidth == pytest.approx(float(sheet["hbm_tb_s"]) * 1e12)
    in_node = re.match(r"(\d+) GB/s per direction", row_of(link)["notes"])[1] if link else None
    assert cluster.node_link == float(in_node or sheet["nvlink_gb_s_per_direction"]) * 1e9
    node = re.search(r"= (\d+) GB/s per node", row_of(system)["inter_node"] if system else "= 0 GB/s per node")
    assert cluster.network * cluster.gpus_per_node == float(node[1]) * 1e9
    assert cluster.gpus_per_node == (72 if "NVL72" in name else 8)


@pytest.mark.parametrize("name", REPORTED)
def test_memory_is_what_drivers_report(name):
    assert CLUSTERS[name].memory_bytes == pytest.approx(REPORTED[name] * 2**20, rel=0.01)


# What a cluster cannot be.


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, None, "989e12"])
@pytest.mark.parametrize(
    "name", ["peak_flops", "memory_bytes", "memory_bandwidth", "node_link", "network", "fp8_flops"]
)
def test_a_rate_that_is_none_is_one_line(name, value):
    if (name, value) in (("network", 0), ("fp8_flops", None)):
        assert getattr(dataclasses.replace(EIGHT, **{name: value}), name) is value, "no network; no FP8"
        return
    with pytest.raises(ValueError, match=f"^eight a node: {name} .*: a number above 0$"):
        dataclasses.replace(EIGHT, **{name: value})


@pytest.mark.parametrize("value", [0, -8, 2.5, None])
def test_a_node_has_a_gpu(value):
    with pytest.raises(ValueError, match="^eight a node: gpus_per_node .*: a whole number, 1 or more$"):
        dataclasses.replace(EIGHT, gpus_per_node=value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"split": "x"}, "split 'x': it is one of ends, layers, flops"),
        ({"order": ("dp", "pp", "tp", "tp")}, "order .*: it has dp, pp, cp, tp, each once"),
        ({"order": ("dp", "tp")}, "order "),
        ({"step_host_s": -1e-3}, "step_host_s -0.001: a number of 0 or more"),
        ({"collective_s": math.nan}, "collective_s nan"),
        ({"unusable_bytes": math.inf}, "unusable_bytes inf"),
        ({"nvlink_efficiency": 0.0}, "nvlink_efficiency 0: a number above 0"),
        ({"memory_spread": 0}, "memory_spread 0: a number above 0"),
        ({"longest_ring": 1}, "longest_ring 1: a ring has 2 ranks or more"),
        ({"overlap": "all"}, "overlap 'all': a number of 0 or more"),
        ({"logit_bytes": (10.5,)}, "logit_bytes .*: it has 2 numbers"),
        ({"held": (0.5, -1.0)}, "held .*: a number of 0 or more"),
    ],
)
def test_software_that_cannot_be_is_one_line(changes, message):
    with pytest.raises(ValueError, match=f"^eight a node: software.{message}") as error:
        EIGHT.with_software(**changes)
    assert "\n" not in str(error.value)


def test_numpys_numbers_are_numbers():
    fitted = EIGHT.with_software(matmul_efficiency=np.float64(0.5), stall_nodes=np.int64(8))
    assert dataclasses.replace(fitted, peak_flops=np.float32(1e12)).peak_flops > 0


def test_a_rack_is_a_node():
    rack = CLUSTERS["GB200 NVL72"].with_software(nvlink_efficiency=1.0, network_efficiency=1.0)
    assert ring(rack, 72, 1) == (900e9, False)
    assert ring(rack, 2, 72) == (50e9, True)
    assert ring(rack, 144, 1) == (900e9, True), "72 cards"


def test_no_gpu_computes_faster_than_the_fastest_published_kernels():
    """A factor over an H100's share raises no program's share above 90% in matmuls and 75% in attention."""
    in_bf16 = [software for software in SOFTWARE.values() if software.matmul_dtype == "bf16"]
    for cluster, software in itertools.product(CLUSTERS.values(), in_bf16):
        cluster = dataclasses.replace(cluster, software=software)
        assert cluster.matmul_rate <= 0.9 * cluster.peak_flops and cluster.head_rate <= 0.9 * cluster.peak_flops
        assert cluster.attention_rate <= 0.75 * cluster.peak_flops
    a100 = CLUSTERS["A100"]
    reached = 1.23 * a100.software.matmul_efficiency
    assert a100.matmul_rate == pytest.approx(reached * a100.peak_flops), "the course's program is below the limit"
    odd = dataclasses.replace(a100.with_software(matmul_efficiency=1.5), matmul_factor=1.0)
    assert odd.matmul_rate == 1.5 * odd.peak_flops, "a fit of a peak that is too low"
