"""A cluster as the planner sees it: peaks and links from its data sheet, and the share of them that software reaches.

    CLUSTERS["H100"]                                           a preset; others are of A100, B200, MI300X, RTX 4090 …
    dataclasses.replace(CLUSTERS["H100"], network=25e9)        the same GPUs behind cards of 200 Gb/s
    Cluster("ours", peak_flops=989e12, memory_bytes=80 * 2**30, memory_bandwidth=3.35e12, node_link=450e9, network=50e9)

A ring of n GPUs that moves `size` bytes past each GPU takes size / bandwidth + steps x latency (Thakur et al. 2005;
notebook 03). Inside a node its bandwidth is the links' bandwidth. Beyond a node, the ring has as many network cards as
it has GPUs in a node: ranks of one tensor-parallel group are neighbors, so the rings of data parallelism share the
node's cards.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from course_lib.best_config.software import NANOTRON, Software, check_software
from course_lib.single_gpu.devices import hardware

FACTORS = ("matmul_factor", "attention_factor")  # of a GPU, over an H100's
# The largest shares of the peak to which a factor raises a program's share. Attention: the fastest published kernels,
# FlashAttention-2 on an A100 (73%; Dao 2023) and FlashAttention-3 on an H100 (75%; Shah et al. 2024). Matmuls, assumed:
# the limit of the fit of A100 runs (course_kit/planning/program_fits.py).
MOST = {"matmul_factor": 0.9, "attention_factor": 0.75}


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs of one kind. Rates are per GPU: FLOP/s without sparsity, bytes/s; of links, in one direction.

    memory_bytes: the total that the driver reports (nvidia-smi, rocm-smi), `software.unusable_bytes` included. Data
    sheets print GB for GiB, which is within 1% of it (data/gpu_memory.csv); the L40S uses a sixteenth for error codes.
    node_link: NVLink, Infinity Fabric or PCIe: the link between any two GPUs of a node. Bridges that join pairs of
    cards (H100 PCIe, A100 PCIe) do not count, since a ring of more than two is as fast as PCIe.
    network: a GPU's own card, or its share of the node's; 0 for no network: a job is then limited to one node.
    Raises ValueError, in one line, for a rate that is not above 0, an empty node, and as `check_software` does.
    """

    name: str
    peak_flops: float  # BF16
    memory_bytes: float
    memory_bandwidth: float
    node_link: float
    network: float
    gpus_per_node: int = 8  # all GPUs that node_link joins: 72 in a GB200 NVL72, which is a rack
    fp8_flops: float | None = None  # None: no FP8
    matmul_factor: float = 1.0  # share of its peak that this GPU reaches in matmuls, over an H100's share
    attention_factor: float = 1.0  # the same in attention; 1 for GPUs without runs to fit it to
    software: Software = Software()

    def __post_init__(self):
        for name in ("peak_flops", "memory_bytes", "memory_bandwidth", "node_link", "network", "fp8_flops", *FACTORS):
            value = getattr(self, name)
            if (name, value) in (("network", 0), ("fp8_flops", None)):
                continue
            if not isinstance(value, Real) or not 0 < float(value) < math.inf:
                raise ValueError(f"{self.name}: {name} {value!r}: a number above 0")
        if not isinstance(self.gpus_per_node, Integral) or self.gpus_per_node < 1:
            raise ValueError(f"{self.name}: gpus_per_node {self.gpus_per_node!r}: a whole number, 1 or more")
        if self.fp8_flops is None and self.software.matmul_dtype == "fp8":
            raise ValueError(f"{self.name}: software.matmul_dtype 'fp8': these GPUs have no FP8")
        try:
            check_software(self.software)
        except ValueError as error:
            raise ValueError(f"{self.name}: software.{error}") from None

    @property
    def matmul_rate(self) -> float:
        """FLOP/s of matmuls with a layer's weights and many rows, in the dtype that the software uses."""
        software = self.software
        if software.matmul_dtype == "fp8" and self.fp8_flops is not None:
            return self.fp8_flops * self.scaled(software.fp8_efficiency, "matmul_factor")
        return self.peak_flops * self.scaled(software.matmul_efficiency, "matmul_factor")

    @property
    def head_rate(self) -> float:
        """FLOP/s of the output layer and the loss."""
        return self.peak_flops * self.scaled(self.software.head_efficiency, "matmul_factor")

    @property
    def attention_rate(self) -> float:
        """FLOP/s of attention's scores and sums, forward and backward."""
        return self.peak_flops * self.scaled(self.software.attention_efficiency, "attention_factor")

    def scaled(self, share: float, factor: str) -> float:
        """Return the share of the peak that this GPU reaches if an H100 reaches `share`: the factor raises it to MOST,
        but no further.
        """
        return min(share * getattr(self, factor), max(share, MOST[factor]))

    def with_software(self, **changes) -> Cluster:
        """Return the same cluster with some constants of its software changed."""
        return dataclasses.replace(self, software=dataclasses.replace(self.software, **changes))


GIB = 2**30


def preset(name: str, gpu: str, network: float, gpus_per_node: int = 8, **others: Any) -> Cluster:
    """Return a cluster with the figures of a GPU's row in course_lib/data/hardware.csv; `others` replace them."""
    columns = {
        "peak_flops": ("bf16_dense_tflops", 10**12),
        "memory_bytes": ("hbm_gb", GIB),
        "memory_bandwidth": ("hbm_tb_s", 10**12),
        "node_link": ("nvlink_gb_s_per_direction", 10**9),
        "fp8_flops": ("fp8_dense_tflops", 10**12),
    }
    sheet = hardware()[gpu]
    figures: dict[str, Any] = {
        field: round(float(sheet[key]) * unit) for field, (key, unit) in columns.items() if sheet[key]
    }
    return Cluster(name, network=network, gpus_per_node=gpus_per_node, **figures | others)


# A preset's network is a typical system's in hardware.csv: a cloud may have a quarter of it. All but "H100, EFA"
# have the software of the course's program (`Software`), whose rates are fitted to H100s.
# An H100 at its power limit reaches a smaller share of its peak than an A100: the factors are fitted to llm-foundry's
# runs on both (course_kit/planning/program_fits.py; 90%: 1.21 to 1.25, 1.74 to 1.83). Other GPUs have no runs: 1.
A100: dict[str, Any] = {"matmul_factor": 1.23, "attention_factor": 1.79}
CLUSTERS = {
    "H100": preset("H100, 400 Gb/s per GPU", "H100-SXM-80GB", 50e9),  # DGX H100
    "H100, EFA": preset("H100, EFA 400 Gb/s per GPU, nanotron", "H100-SXM-80GB", 50e9, software=NANOTRON),  # AWS P5
    "H200": preset("H200, 400 Gb/s per GPU", "H200-SXM-141GB", 50e9),  # AWS P5e
    "A100": preset("A100 80 GB, 200 Gb/s per GPU", "A100-SXM-80GB", 25e9, **A100),  # Selene
    "A100-40GB": preset("A100 40 GB, 200 Gb/s per GPU", "A100-SXM-40GB", 25e9, **A100),  # Azure ND A100 v4
    "B200": preset("B200, 400 Gb/s per GPU", "B200-SXM", 50e9),  # AWS P6
    # A rack is a node. 72 is no multiple of 16, and the planner does not see a group of 16 that is in two racks: for
    # jobs of several racks, dataclasses.replace(..., gpus_per_node=64) leaves 8 GPUs of each idle.
    "GB200 NVL72": preset("GB200 NVL72, 400 Gb/s per GPU", "GB200", 50e9, 72),
    "MI300X": preset("MI300X, 400 Gb/s per GPU", "MI300X", 50e9),  # Azure
    # Cards: their link is PCIe, and the share that a ring reaches depends on the board more than with NVLink.
    "H100 PCIe": preset("H100 PCIe, 200 Gb/s per GPU", "H100-PCIe-80GB", 25e9, node_link=64e9),
    "L40S": preset("L40S, 50 Gb/s per GPU", "L40S", 6.25e9, node_link=32e9, memory_bytes=46068 * 2**20),  # AWS G6e
    "RTX 4090": preset("RTX 4090, 8 per node, no network", "RTX 4090", 0, node_link=32e9, memory_bytes=24564 * 2**20),
}


# exercise 11.1
def stride_of(layout, axis: str, order: tuple[str, ...]) -> np.ndarray:
    """Return how many ranks apart two neighbors along an axis are: the product of the degrees of all axes inside it.

    order: the axes, the innermost last. The stride of the innermost axis is 1. The degrees of `layout` are numbers, or
    arrays of several layouts; then the strides are an array, too.
    """
    stride = np.asarray(1)
    for inner in order[order.index(axis) + 1 :]:
        stride = stride * getattr(layout, inner)
    return stride


# exercise 11.1
def in_node(cluster: Cluster, size, stride) -> np.ndarray:
    """Return how many ranks of a group are in one node: 1 or more, and at most `size`.

    The group has `size` ranks that are `stride` apart. Count `cluster.gpus_per_node // stride`, within these limits; an
    estimate where `stride` does not divide the node. Both may be arrays.
    """
    return np.clip(cluster.gpus_per_node // np.minimum(stride, cluster.gpus_per_node), 1, size)


def link(cluster: Cluster, inside, size) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes/s that pass each rank of a ring of `size` ranks, `inside` of them in a node, and whether the
    ring leaves the node.
    """
    software, beyond = cluster.software, inside < size
    within = cluster.node_link * software.nvlink_efficiency
    network = cluster.network * software.network_efficiency * inside
    return np.where(beyond, np.minimum(within, network), within), beyond


def ring(cluster: Cluster, size, stride) -> tuple[np.ndarray, np.ndarray]:
    """Return `link` of a group of `size` ranks that are `stride` apart."""
    return link(cluster, in_node(cluster, size, stride), size)


def all_to_all_time(cluster: Cluster, size, stride, bytes_each) -> np.ndarray:
    """Return the seconds in which each of `size` ranks, `stride` apart, sends `bytes_each` bytes to each of the others:
    over the links of the node and, at the same time, over its own network card to ranks of other nodes.
    """
    software, inside = cluster.software, in_node(cluster, size, stride)
    card = cluster.network * software.network_efficiency or math.inf  # without a network no group leaves the node
    near = (inside - 1) * bytes_each / (cluster.node_link * software.nvlink_efficiency)
    return np.maximum(near, (size - inside) * bytes_each / card)


def latency_steps(cluster: Cluster, ranks) -> np.ndarray:
    """Return the sequential steps of a collective of `ranks`: n - 1 in a ring; in groups larger than the measured
    rings, more in proportion to the levels of a tree (NCCL's double trees; Hu et al. 2025, "Demystifying NCCL").
    """
    most = cluster.software.longest_ring
    levels = np.log2(np.maximum(ranks, most)) / np.log2(most)
    return (np.minimum(ranks, most) - 1) * levels


def replica_ring(cluster: Cluster, layout) -> tuple[np.ndarray, np.ndarray]:
    """Return `link` of the ranks that have the same parameters: dp and cp together. If only every `replicas_apart`-th
    replica of dp has them, as with experts, the layout has this field too.
    """
    order, dp, cp = cluster.software.order, np.asarray(layout.dp), np.asarray(layout.cp)
    apart = stride_of(layout, "dp", order) * getattr(layout, "replicas_apart", 1)
    inside = in_node(cluster, dp, apart) * in_node(cluster, cp, stride_of(layout, "cp", order))
    return link(cluster, inside, dp * cp)
