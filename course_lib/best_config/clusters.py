"""A cluster as the planner sees it: peaks and links from its data sheet, and what of them software reaches.

    CLUSTERS["H100"]                                           a preset; others are of A100, B200, MI300X, RTX 4090 …
    dataclasses.replace(CLUSTERS["H100"], network=25e9)        the same GPUs behind cards of 200 Gb/s
    Cluster("ours", peak_flops=989e12, memory_bytes=80 * 2**30, memory_bandwidth=3.35e12, node_link=450e9, network=50e9)

A ring of n GPUs that moves `size` bytes past each of them takes size / bandwidth + steps x latency (Thakur et al. 2005;
notebook 03). Its bandwidth is that of the links inside a node. Beyond it, the ring has as many network cards as it has
GPUs in a node: ranks of one tensor-parallel group are neighbors, so the rings of data parallelism share the node's
cards.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from course_lib.single_gpu.devices import hardware


@dataclass(frozen=True)
class Software:
    """What a training program reaches of the hardware, and what it keeps on a GPU. Rates are fitted to nanotron's runs
    on H100s (`calibration`), but for those that say otherwise; what is kept, and when, is this course's (notebook 10).
    """

    matmul_efficiency: float = 0.670  # of the peak, with many rows
    half_rows: float = 419.0  # rows, that is tokens, with which it is half as much
    attention_efficiency: float = 0.35  # of the peak, FlashAttention-2 forward and backward; not fitted
    layer_traffic: float = 622.0  # bytes that a layer's other kernels move for each element of a hidden state
    head_efficiency: float = 0.345  # of the peak, output layer and loss
    nvlink_efficiency: float = 0.810
    network_efficiency: float = 0.522
    collective_s: float = 78.5e-6  # a collective inside a node, before its first byte
    ring_step_s: float = 88.4e-6  # a step of a ring beyond the node
    gradient_step_s: float = 1.354e-3  # a step of data parallelism's rings, all buckets together
    longest_ring: int = 256  # ranks of the largest one that was measured; beyond it, trees (`latency_steps`)
    layer_host_s: float = 4.54e-3  # to launch a layer's kernels, forward and backward
    step_host_s: float = 49.1e-3
    overlap: float = 1.0  # of a backward, behind which gradients of ZeRO stage 0 are sent; fits give 0.9 to 1
    sharded_overlap: float = 1.0  # the same of stages 1 to 3, and stage 3's gathers behind a whole slot; assumed
    busy_step_s: float = 0.0  # a step of a tensor-parallel ring while a pipeline waits for another node
    stall_s: float = 0.0  # an exchange with a neighbor when the network stalls (`stall_time`):
    stall_nodes: int = 64  # in jobs of as many nodes, and in pipelines with tp beyond two nodes
    weight_bytes: int = 2  # a parameter; this and the next two are the recipe, not fitted
    gradient_bytes: int = 4  # FP32 sums
    optimizer_bytes: int = 12  # FP32: Adam's two, and the weights
    kept_hidden: float = 12.4  # elements of hidden size that a layer keeps for backward, a token
    kept_whole: float = 4.0  # of these, what TP splits only with sequence parallelism; counted
    kept_ffn: float = 3.9  # elements of the MLP's width
    logit_bytes: tuple[float, float] = (10.5, 5.7)  # a logit, without a pipeline and with one
    held: tuple[float, float] = (0.0, 0.0)  # gathered hidden states a layer: of a micro-batch in flight, and of one
    held_nodes: int = 32  # in smaller jobs the host runs ahead of the GPU, and buffers wait for it
    reserved_bytes: float = 0.35 * 2**30
    unusable_bytes: float = 5.65 * 2**30  # of a GPU's memory: context, communicators, fragments; fitted
    memory_spread: float = 0.0814  # of the logarithm of the bytes needed, about that limit (`Estimate.risk`); fitted
    selective_keeps: float = 1.0  # of what a layer keeps, with "selective" recomputation
    selective_again: float = 0.0  # of a layer's forward that it computes again, besides attention
    gathers_again: bool = True  # with sequence parallelism: in backward, a column layer's input
    needs_full_pipeline: bool = False  # whether fewer micro-batches than stages - 1 make a run fail
    order: tuple[str, ...] = ("dp", "pp", "cp", "tp")  # of the ranks, the innermost last
    products: str = "bf16"  # of a layer with its weights: "bf16" or "fp8"; attention and the head stay in BF16
    split: str = "ends"  # of layers over stages: "ends", "layers" or "flops" (`stage_loads`)


# nanotron on the runs' cluster: gradients are sent after the backward with ZeRO stage 1, gradients in BF16 stay beside
# their sums, gathered hidden states wait for the GPU, and its network (EFA) suffers when pipelines and rings meet. The
# two last are fitted; their thresholds are what was seen.
NANOTRON = Software(
    order=("pp", "dp", "cp", "tp"), split="flops", gradient_bytes=6, held=(0.954, 0.717), gathers_again=False,
    needs_full_pipeline=True, sharded_overlap=0.0, busy_step_s=348e-6, stall_s=0.566,
)  # fmt: skip
# Megatron-LM: 18 bytes a parameter, 6 + 12 / dp with the distributed optimizer (its docs, dist_optimizer.md).
MEGATRON = Software(order=("pp", "dp", "cp", "tp"), split="layers")
# torchtitan: FSDP2 shards FP32 weights, FP32 gradients and Adam's two states. Its selective recomputation keeps the
# results of attention and of every other matrix product (torchtitan/distributed/activation_checkpoint.py): by count, of
# a Llama layer's 26 h elements 7.75 h; the rest is computed again, half of the products among it.
TORCHTITAN = Software(
    order=("pp", "dp", "cp", "tp"), split="layers", weight_bytes=4, gradient_bytes=4, optimizer_bytes=8,
    selective_keeps=0.30, selective_again=0.5,
)  # fmt: skip
SOFTWARE = {"course": Software(), "nanotron": NANOTRON, "Megatron-LM": MEGATRON, "torchtitan": TORCHTITAN}

AXES = ("dp", "pp", "cp", "tp")
SPLITS = ("ends", "layers", "flops")
PRODUCTS = ("bf16", "fp8")


def check_software(software: Software) -> None:
    """Raise ValueError, in one line that begins with the constant's name, where a constant can't have its value."""
    if software.split not in SPLITS:
        raise ValueError(f"split {software.split!r}: it is one of {', '.join(SPLITS)}")
    if software.products not in PRODUCTS:
        raise ValueError(f"products {software.products!r}: it is one of {', '.join(PRODUCTS)}")
    if len(software.order) != len(AXES) or set(software.order) != set(AXES):
        raise ValueError(f"order {software.order!r}: it has {', '.join(AXES)}, each once, the innermost last")
    for field in dataclasses.fields(software):
        value, like = getattr(software, field.name), field.default
        values, likes = (value, like) if isinstance(like, tuple) else ((value,), (like,))
        if not isinstance(likes[0], Real):
            continue
        if not isinstance(values, tuple) or len(values) != len(likes):
            raise ValueError(f"{field.name} {value!r}: it has {len(likes)} numbers")
        if not all(isinstance(each, Real) and 0 <= each < math.inf for each in values):
            raise ValueError(f"{field.name} {value!r}: a number of 0 or more")
        if value == 0 and (field.name.endswith("_efficiency") or field.name == "memory_spread"):
            raise ValueError(f"{field.name} 0: a number above 0")
    if software.longest_ring < 2:
        raise ValueError(f"longest_ring {software.longest_ring}: a ring has 2 ranks or more")


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs of one kind. Rates are of one GPU: FLOP/s without sparsity, bytes/s; of links, in one direction.

    memory_bytes: what the driver reports in all (nvidia-smi, rocm-smi), before `software.unusable_bytes` are off. Data
    sheets print GB for GiB, which is within 1% of it (data/gpu_memory.csv); the L40S keeps a sixteenth for error codes.
    node_link: NVLink, Infinity Fabric or PCIe: whatever any two GPUs of a node have. Bridges that join pairs of cards
    (H100 PCIe, A100 PCIe) do not count, since a ring of more than two is as fast as PCIe.
    network: a GPU's own card, or its share of the node's; 0 where there is none, and a job is one node at most.
    Raises ValueError, in one line, where a rate is not above 0, a node is empty, or `check_software` refuses.
    """

    name: str
    peak_flops: float  # BF16
    memory_bytes: float
    memory_bandwidth: float
    node_link: float
    network: float
    gpus_per_node: int = 8  # all that node_link joins: 72 in a GB200 NVL72, which is a rack
    fp8_flops: float | None = None  # None: no FP8
    software: Software = Software()

    def __post_init__(self):
        for name in ("peak_flops", "memory_bytes", "memory_bandwidth", "node_link", "network", "fp8_flops"):
            value = getattr(self, name)
            if (name, value) in (("network", 0), ("fp8_flops", None)):
                continue
            if not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"{self.name}: {name} {value!r}: a number above 0")
        if not isinstance(self.gpus_per_node, Integral) or self.gpus_per_node < 1:
            raise ValueError(f"{self.name}: gpus_per_node {self.gpus_per_node!r}: a whole number, 1 or more")
        if self.fp8_flops is None and self.software.products == "fp8":
            raise ValueError(f"{self.name}: software.products 'fp8': these GPUs have no FP8")
        try:
            check_software(self.software)
        except ValueError as error:
            raise ValueError(f"{self.name}: software.{error}") from None

    @property
    def product_flops(self) -> float:
        """The peak of products with a layer's weights, in the dtype that software makes them in."""
        return self.fp8_flops if self.software.products == "fp8" else self.peak_flops

    def with_software(self, **changes) -> "Cluster":
        """The same cluster, other software."""
        return dataclasses.replace(self, software=dataclasses.replace(self.software, **changes))


GIB = 2**30


def preset(name: str, gpu: str, network: float, gpus_per_node: int = 8, **others) -> Cluster:
    """Return a cluster with the figures of a GPU's row in course_lib/data/hardware.csv; `others` replace them."""
    columns = {
        "peak_flops": ("bf16_dense_tflops", 10**12),
        "memory_bytes": ("hbm_gb", GIB),
        "memory_bandwidth": ("hbm_tb_s", 10**12),
        "node_link": ("nvlink_gb_s_per_direction", 10**9),
        "fp8_flops": ("fp8_dense_tflops", 10**12),
    }
    sheet = hardware()[gpu]
    figures = {field: round(float(sheet[key]) * unit) for field, (key, unit) in columns.items() if sheet[key]}
    return Cluster(name, network=network, gpus_per_node=gpus_per_node, **figures | others)


# A preset's network is that of one system in hardware.csv, a typical one: a cloud may have a quarter of it. Software is
# fitted to H100s for all of them, until runs of your own are fitted.
CLUSTERS = {
    "H100": preset("H100, 400 Gb/s a GPU", "H100-SXM-80GB", 50e9),  # DGX H100
    "H100, EFA": preset("H100, EFA 400 Gb/s a GPU, nanotron", "H100-SXM-80GB", 50e9, software=NANOTRON),  # AWS P5
    "H200": preset("H200, 400 Gb/s a GPU", "H200-SXM-141GB", 50e9),  # AWS P5e
    "A100": preset("A100 80 GB, 200 Gb/s a GPU", "A100-SXM-80GB", 25e9),  # Selene
    "A100-40GB": preset("A100 40 GB, 200 Gb/s a GPU", "A100-SXM-40GB", 25e9),  # Azure ND A100 v4
    "B200": preset("B200, 400 Gb/s a GPU", "B200-SXM", 50e9),  # AWS P6
    # A rack is a node. 72 is no multiple of 16, and the planner does not see a group of 16 that is in two racks: for
    # jobs of several racks, dataclasses.replace(..., gpus_per_node=64) leaves 8 GPUs of each idle.
    "GB200 NVL72": preset("GB200 NVL72, 400 Gb/s a GPU", "GB200", 50e9, 72),
    "MI300X": preset("MI300X, 400 Gb/s a GPU", "MI300X", 50e9),  # Azure
    # Cards: their link is PCIe's, and what a ring reaches of it depends on the board more than with NVLink.
    "H100 PCIe": preset("H100 PCIe, 200 Gb/s a GPU", "H100-PCIe-80GB", 25e9, node_link=64e9),
    "L40S": preset("L40S, 50 Gb/s a GPU", "L40S", 6.25e9, node_link=32e9, memory_bytes=46068 * 2**20),  # AWS G6e
    "RTX 4090": preset("RTX 4090, a box of 8", "RTX 4090", 0, node_link=32e9, memory_bytes=24564 * 2**20),
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
    """Of a ring of `size` ranks, `inside` of them in a node: bytes/s that pass each, and whether it leaves the node."""
    software, beyond = cluster.software, inside < size
    within = cluster.node_link * software.nvlink_efficiency
    network = cluster.network * software.network_efficiency * inside
    return np.where(beyond, np.minimum(within, network), within), beyond


def ring(cluster: Cluster, size, stride) -> tuple[np.ndarray, np.ndarray]:
    """`link` of a group of `size` ranks that are `stride` apart."""
    return link(cluster, in_node(cluster, size, stride), size)


def latency_steps(cluster: Cluster, ranks) -> np.ndarray:
    """Steps that a collective of `ranks` waits for, one after another: a ring's n - 1; in larger groups than rings were
    measured for, as many more as a tree has more levels (NCCL's double trees; Hu et al. 2025, "Demystifying NCCL").
    """
    most = cluster.software.longest_ring
    levels = np.log2(np.maximum(ranks, most)) / np.log2(most)
    return (np.minimum(ranks, most) - 1) * levels


def replica_ring(cluster: Cluster, layout) -> tuple[np.ndarray, np.ndarray]:
    """`link` of the ranks that have the same parameters: dp and cp together."""
    order, dp, cp = cluster.software.order, np.asarray(layout.dp), np.asarray(layout.cp)
    inside = in_node(cluster, dp, stride_of(layout, "dp", order)) * in_node(cluster, cp, stride_of(layout, "cp", order))
    return link(cluster, inside, dp * cp)
