"""A training program as the planner sees it: its share of the hardware's rates, and its memory on a GPU.

SOFTWARE["course"]                                  this course's program; others are nanotron, Megatron-LM …
cluster.with_software(sharded_overlap=0.5)          the same cluster with one constant changed

Most answers depend on a few constants: matmul_efficiency and layer_traffic (seconds of a layer), network_efficiency and
sharded_overlap (seconds of gradients), kept_hidden and kept_ffn (activations), gradient_bytes and optimizer_bytes
(memory between steps), and unusable_bytes (the memory that is left for them). `calibration` fits the rates and the
activations to your own runs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Real

from course_lib.best_config.program_memory import MEMORY_CONSTANTS
from course_lib.best_config.program_times import TIME_CONSTANTS


@dataclass(frozen=True)
class Software:
    """A program's share of the hardware's rates, and its memory on a GPU.

    The defaults are the course's program. It has no runs on many GPUs, so its rates and its activations are nanotron's,
    fitted to runs on H100s (`calibration`), unless a comment says otherwise: until you fit your own runs, expect the
    speed of a plain PyTorch program. Its communication and its bytes per parameter are notebook 10's.
    The constants of other programs are in `program_times` and `program_memory`.
    """

    program: str = "course"  # the name shown in answers
    order: tuple[str, ...] = ("dp", "pp", "cp", "tp")  # of the ranks, the innermost last
    split: str = "ends"  # of layers over stages: "ends", "layers" or "flops" (`stage_loads`)
    matmul_dtype: str = (
        "bf16"  # of matmuls with a layer's weights: "bf16" or "fp8"; attention and the head: always BF16
    )
    needs_full_pipeline: bool = False  # True if a run with fewer micro-batches than stages - 1 fails

    # Kernels: shares of the data sheet's rates, and bytes moved.
    matmul_efficiency: float = 0.675  # of the peak, with many rows
    fp8_efficiency: float = 0.479  # the same in FP8, with the casts: a linear layer of 8,192 by 8,192 on an H200
    # is 1.43 times as fast as in BF16, notebook 14b's (benchmarks/results/fp8_h200.json)
    half_rows: float = 410.0  # rows (tokens) at which a matmul reaches half of its efficiency
    attention_efficiency: float = 0.35  # of the peak, FlashAttention-2 forward and backward; not fitted
    layer_traffic: float = 643.0  # bytes moved by a layer's other kernels, per element of a hidden state
    head_efficiency: float = 0.358  # of the peak, output layer and loss
    logit_traffic: float = 0.0  # bytes moved by the loss, per logit; 0: its time is in head_efficiency
    selective_again: float = 0.0  # share of a layer's forward that "selective" recomputes, besides attention
    expert_spread: float = 0.32  # standard deviation of experts' loads / mean: the busiest of 8 has 1.46 times the mean

    # Links and host: shares of the data sheet's rates, and latencies in seconds.
    nvlink_efficiency: float = 0.803
    network_efficiency: float = 0.520
    collective_s: float = 77.9e-6  # per collective inside a node, before its first byte
    ring_step_s: float = 88.5e-6  # per step of a ring between nodes
    gradient_step_s: float = 1.378e-3  # per step of data parallelism's rings, all buckets together
    longest_ring: int = 256  # ranks of the largest measured ring; beyond it, trees (`latency_steps`)
    layer_host_s: float = 4.55e-3  # per layer, to launch its kernels, forward and backward
    step_host_s: float = 46.6e-3  # per step
    busy_step_s: float = 0.0  # per step of a tensor-parallel ring while a pipeline waits for another node
    stall_s: float = 0.0  # per exchange with a neighbor when the network stalls (`stall_time`):
    stall_nodes: int = 64  # in jobs of at least as many nodes, and in pipelines with tp beyond two nodes

    # Communication: how much of it is hidden, and how the program communicates.
    overlap: float = 1.0  # share of a backward that hides gradients of ZeRO stage 0; fits give 0.9 to 1
    sharded_overlap: float = 1.0  # the same of stages 1 to 3, and stage 3's gathers behind a full slot; assumed:
    # llm-foundry's FSDP on up to 512 GPUs hides as much, nanotron's ZeRO-1 and DeepSpeed's ZeRO-3 of 2021 nothing
    tp_overlap: float = 0.0  # share of a layer's tensor-parallel communication that is hidden behind its matmuls
    gathers_again: bool = True  # with sequence parallelism, backward gathers a column layer's input again
    gathers_keys: bool = False  # context parallelism all-gathers K and V before attention, without a ring during it
    scatters_transfers: bool = False  # each tensor-parallel rank sends its share to the next stage, without SP too
    overlaps_transfers: bool = False  # interleaved stages compute one chunk while they send another
    hops: int = 1  # of the exchange of tokens; 2: a token crosses once to each node, then to its ranks inside the node
    exchange_overlap: float = 0.0  # share of a layer's kernels that hides the exchange of DualPipe's other micro-batch

    # Memory of weights and optimizer: the recipe, not fitted.
    weight_bytes: int = 2  # per parameter
    gradient_bytes: int = 4  # per parameter: sums in FP32
    optimizer_bytes: int = 12  # per parameter: Adam's two states and the weights, in FP32
    fp8_weight_bytes: float = 0.0  # per parameter of a layer: copies in FP8 that are kept between micro-batches
    gathered_layers: float = 2.0  # layers that ZeRO-3 has gathered at a time: one and the next

    # Memory of activations and logits: kept_hidden, kept_ffn, logit_bytes and held are fitted.
    kept_hidden: float = 12.4  # hidden sizes that a layer keeps for backward, per token
    kept_outside_tp: float = 4.0  # the part of kept_hidden that TP splits only with sequence parallelism; counted
    kept_ffn: float = 3.9  # MLP widths that a layer keeps, per token
    kept_rows: float = 2.0  # hidden sizes that a mixture keeps per token and choice: before its expert, and after it
    score_bytes: float = 0.0  # per head, query and key that attention keeps; with flash attention 0
    fp8_inputs: bool = True  # with matmuls in FP8, inputs of matrices are kept in 8 bits (notebook 14b)
    selective_keeps: float = 1.0  # share of a layer's activations that "selective" recomputation keeps
    logit_bytes: tuple[float, float] = (10.5, 5.7)  # per logit, without a pipeline and with one
    fused_loss: bool = False  # the loss is fused with the head and stores one chunk of logits (notebook 12b)
    held: tuple[float, float] = (0.0, 0.0)  # gathered hidden states per layer: for each micro-batch in flight, and once
    held_nodes: int = 32  # in smaller jobs the host runs ahead of the GPU, and buffers wait for the GPU

    # The limit of a GPU's memory.
    reserved_bytes: float = 0.35 * 2**30  # at the peak, besides all other parts; fitted
    unusable_bytes: float = 5.65 * 2**30  # of a GPU's memory: context, communicators, fragments; fitted
    memory_spread: float = 0.0814  # of the logarithm of the bytes needed, about that limit (`Estimate.risk`); fitted


SOFTWARE = {"course": Software()}
SOFTWARE |= {
    name: Software(program=name, **MEMORY_CONSTANTS.get(name, {}), **TIME_CONSTANTS.get(name, {}))
    for name in MEMORY_CONSTANTS | TIME_CONSTANTS
}
NANOTRON = SOFTWARE["nanotron"]  # of the preset "H100, EFA" and of the playbook's runs

AXES = ("dp", "pp", "cp", "tp")
SPLITS = ("ends", "layers", "flops")
MATMUL_DTYPES = ("bf16", "fp8")


def check_software(software: Software) -> None:
    """Raise ValueError, in one line that begins with the constant's name, for a value that a constant cannot have."""
    if software.split not in SPLITS:
        raise ValueError(f"split {software.split!r}: it is one of {', '.join(SPLITS)}")
    if software.matmul_dtype not in MATMUL_DTYPES:
        raise ValueError(f"matmul_dtype {software.matmul_dtype!r}: it is one of {', '.join(MATMUL_DTYPES)}")
    if len(software.order) != len(AXES) or set(software.order) != set(AXES):
        raise ValueError(f"order {software.order!r}: it has {', '.join(AXES)}, each once, the innermost last")
    for field in dataclasses.fields(software):
        value, like = getattr(software, field.name), field.default
        values, likes = (value, like) if isinstance(like, tuple) else ((value,), (like,))
        if not isinstance(likes[0], Real):
            continue
        if not isinstance(values, tuple) or len(values) != len(likes):
            raise ValueError(f"{field.name} {value!r}: it has {len(likes)} numbers")
        if not all(isinstance(each, Real) and 0 <= float(each) < math.inf for each in values):
            raise ValueError(f"{field.name} {value!r}: a number of 0 or more")
        if value == 0 and (field.name.endswith("_efficiency") or field.name == "memory_spread"):
            raise ValueError(f"{field.name} 0: a number above 0")
    if software.hops not in (1, 2):
        raise ValueError(f"hops {software.hops}: it is 1 or 2")
    for name in ("tp_overlap", "selective_keeps"):  # above 1, a time or a size would be negative
        if getattr(software, name) > 1:
            raise ValueError(f"{name} {getattr(software, name)}: a share, 0 to 1")
    if software.longest_ring < 2:
        raise ValueError(f"longest_ring {software.longest_ring}: a ring has 2 ranks or more")
