"""Measurements, formulas and the lab of notebook 12b: bytes and memory of operations and of fused kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils._pytree import tree_leaves

from course_kit.gpu.launches import Launch, record_launches
from course_kit.gpu.operation_bytes import BytesMoved
from course_kit.gpu.transactions import count_transactions
from course_kit.labs.kernels import device
from course_kit.labs.peak import peak_of
from course_kit.labs.recorded import recorded_on
from course_kit.typed import grad_of
from course_lib.kernels.fused_loss import chunk_size
from course_lib.kernels.fused_norm import rms_norm
from course_lib.kernels.fused_rope import rope
from course_lib.kernels.fused_softmax import softmax
from course_lib.kernels.fused_swiglu import swiglu
from course_lib.kernels.sectors import SECTOR_BYTES, Transactions
from course_lib.single_gpu.model import ModelConfig, apply_rope

EPS = 1e-5
LossFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of hidden, weight, targets


def plain_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of x + residual, and x + residual, one operation after another."""
    x = x + residual
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * scale * weight, x


def plain_softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension, one operation after another."""
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Operator:
    """An operation of a transformer in both forms. inputs: those with a gradient; n is the size of the first input."""

    inputs: tuple[torch.Tensor, ...]
    least_n: int  # forward: reads of inputs and writes of results, in n
    eager: Callable[[], object]
    fused: Callable[[], object]


def operators(rows: int = 32, hidden: int = 1024) -> dict[str, Operator]:
    """Return softmax, RMSNorm with the residual sum, SwiGLU and RoPE with inputs of rows x hidden elements."""
    on, head_dim = device(), 128
    x, y = (torch.randn(rows, hidden, device=on, requires_grad=True) for _ in range(2))
    q = torch.randn(1, rows, hidden // head_dim, head_dim, device=on, requires_grad=True)
    angle = torch.randn(rows, head_dim // 2, device=on)
    cos, sin, w = angle.cos(), angle.sin(), torch.ones(hidden, device=on, requires_grad=True)
    return {
        "softmax": Operator((x,), 2, lambda: plain_softmax(x), lambda: softmax(x)),
        "RMSNorm + residual": Operator((x, y, w), 4, lambda: plain_norm(x, y, w), lambda: rms_norm(x, w, EPS, y)),
        "SwiGLU": Operator((x, y), 3, lambda: F.silu(x) * y, lambda: swiglu(x, y)),
        "RoPE": Operator((q,), 2, lambda: apply_rope(q, cos, sin), lambda: rope(q, cos, sin)),
    }


def operation_sizes(operator: Operator) -> list[float]:
    """Return the elements that each of PyTorch's operations reads and writes in the eager forward, in n."""
    with BytesMoved() as moved, torch.no_grad():
        operator.eager()
    return [(read + written) / operator.inputs[0].nbytes for _, read, written in moved.rows]


def traffic_of(launch: Launch) -> Transactions:
    """Count the traffic of a launch by running it again on copies of its tensors."""
    args = [x.clone() if torch.is_tensor(x) else x for x in launch.args]
    return count_transactions(launch.kernel, launch.grid, *args, **launch.meta)


def bytes_moved(operator: Operator) -> tuple[float, float]:
    """Return the bytes that a forward and a backward move, in n: PyTorch's operations, and the kernels' sectors."""

    def forward_and_backward(run: Callable[[], object]) -> None:
        results = [result for result in tree_leaves(run()) if result.requires_grad]
        torch.autograd.grad(results, operator.inputs, [upstream[result.shape] for result in results])

    on = operator.inputs[0].device
    upstream = {x.shape: torch.randn(x.shape, device=on) for x in operator.inputs}
    with BytesMoved() as moved:
        forward_and_backward(operator.eager)
    with record_launches() as launches:
        forward_and_backward(operator.fused)
    sectors = sum(traffic_of(launch).sectors() for launch in launches)
    return moved.total / operator.inputs[0].nbytes, SECTOR_BYTES * sectors / operator.inputs[0].nbytes


def saved_elements(operator: Operator) -> tuple[float, float]:
    """Return the elements that autograd saves for backward, in n, each storage once, without weights: eager, fused."""
    weights = {x.data_ptr() for x in operator.inputs if x.dim() == 1}

    def saved_by(run: Callable[[], object]) -> float:
        storages: dict[int, torch.Tensor] = {}

        def save(x: torch.Tensor) -> torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            run()
        elements = sum(x.numel() for x in storages.values() if x.data_ptr() not in weights)
        return elements / operator.inputs[0].numel()

    return saved_by(operator.eager), saved_by(operator.fused)


def peak_of_loss(
    way: LossFunction, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[float, float, float]:
    """Return the MiB at the peak above the start, the loss, and the norm of hidden's gradient, of one forward and
    backward. Memory that an operation uses internally counts as well.
    """
    rows, weight, losses = hidden.clone().requires_grad_(), weight.clone().requires_grad_(), []

    def forward_and_backward() -> None:
        losses.append(way(rows, weight, targets))
        losses[0].backward()

    if hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward_and_backward()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    else:
        gc.collect()  # otherwise, the profiler warns when older blocks are freed while it runs
        peak = peak_of(forward_and_backward)
    return peak, losses[0].item(), grad_of(rows).norm().item()


def loss_memory_table(
    ways: Mapping[str, LossFunction], hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> str:
    """Return a line per way to compute the loss: peak memory, the loss, and the norm of hidden's gradient."""
    lines = []
    for name, way in ways.items():
        peak, value, norm = peak_of_loss(way, hidden, weight, targets)
        lines.append(f"{name:30s} peak {peak:6.1f} MiB   loss {value:.6f}   gradient norm {norm:.6f}")
    return "\n".join(lines)


def recorded_steps(record: Mapping[str, Any]) -> str:
    """Return a recorded step of a model as a table: eager, compiled, and with the kernels."""
    lines = [recorded_on(record), f"a step of {record['rows'][0]['preset']}, 4 x 4,096 tokens, autocast to BF16:"]
    for row in record["rows"]:
        if row["way"] in ("eager", "compile", "kernels"):
            speed = f"{1e3 * row['step_s']:5.0f} ms {row['tokens_per_s']:8,.0f} tokens/s   MFU {row['mfu']:.0%}"
            lines.append(f"  {row['way']:8s}{speed}   peak {row['peak_memory'] / 2**30:.0f} GiB")
    return "\n".join(lines)


def largest_difference(theirs: Iterable[torch.Tensor], ours: Iterable[torch.Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to each tensor's largest element."""
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(theirs, ours, strict=True))


def pointwise_bytes(config: ModelConfig, norm: float, gate: float, turn: float) -> float:
    """Return the bytes per token of the elementwise operations of all layers in BF16, forward and backward.

    norm, gate, turn: the bytes that RMSNorm, SwiGLU and RoPE move, in n of each input.
    """
    heads = (config.heads + config.kv_heads) * config.head_dim
    return 2 * config.layers * (2 * norm * config.hidden + gate * config.ffn_hidden + turn * heads)


def eager_loss_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the peak bytes of the eager loss: logits in BF16, log-softmax and both gradients in float32."""
    return 14 * tokens * config.vocab


def chunked_loss_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the peak bytes of the loss in chunks: logits of one chunk, the gradients of hidden and of the weight."""
    chunk = 2 * chunk_size(tokens, config.hidden, config.vocab) * config.vocab
    return chunk + 2 * tokens * config.hidden + 4 * config.vocab * config.hidden


@triton.jit
def planted_kernel(x, weight, y, rows, hidden, eps, BLOCK: tl.constexpr, MEAN_OF: tl.constexpr, MASKED: tl.constexpr):
    """Write the RMSNorm of a row; faulty with MEAN_OF, and without MASKED."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    s = tl.load(x + row * hidden + column, mask=column < hidden, other=0.0)
    r = tl.rsqrt(tl.sum(s * s) / (MEAN_OF or hidden) + eps)
    y_block = s * r * tl.load(weight + column, mask=column < hidden, other=0.0)
    if MASKED:
        tl.store(y + row * hidden + column, y_block, mask=column < hidden)
    else:
        tl.store(y + row * hidden + column, y_block)


def planted(x: torch.Tensor, weight: torch.Tensor, mean_of: int, masked: bool) -> torch.Tensor:
    """Return the RMSNorm of x [rows, hidden] by `planted_kernel`."""
    y, (rows, hidden) = torch.empty_like(x), x.shape
    block = triton.next_power_of_2(hidden)
    planted_kernel[(rows,)](x, weight, y, rows, hidden, EPS, BLOCK=block, MEAN_OF=mean_of, MASKED=masked)
    return y


def candidates() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Return three ways to compute the RMSNorm of x [rows, hidden] with a weight [hidden], each with one fault."""
    return {
        "A": lambda x, weight: planted(x, weight, 0, False),
        "B": lambda x, weight: F.rms_norm(x, x.shape[1:], weight, EPS),
        "C": lambda x, weight: planted(x, weight, triton.next_power_of_2(x.shape[1]), True),
    }
