"""AdamW in one pass over memory: each element of weights, gradient and moments is read once and written once.

Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, as torch.optim.AdamW has it. At step t
(1, 2, …), with gradient g, learning rate eta and decay lambda, for each element of the master weights w:

    m <- beta1 m + (1 - beta1) g                 v <- beta2 v + (1 - beta2) g^2
    w <- (1 - eta lambda) w - eta / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

Bytes per parameter, with a gradient of `grad` bytes per element, and a bfloat16 copy of w that the model computes with:

    this module     reads w, g, m, v: 4 + grad + 4 + 4; writes w, m, v: 12, and the copy: 2      30 at most, 28 with a
                    bfloat16 gradient
    one operation   w *= 8; m lerp g 12; v *= 8; v += g g 12; sqrt 8; / 8; + eps 8;              80, and 6 for the copy
    after another   w += m / … 16

This is the limit: with 28 bytes and 3.35 TB/s an H100 updates 120 billion parameters per second.

Two traps. (1) Triton passes a Python float as float32, and 1 - 0.999 from a rounded 0.999 is wrong in the fifth digit.
So betas are constants of the kernel, with all their digits, and 1 - beta^t is computed in float64. (2) t changes with
each step. As a Python number it would be frozen into a captured CUDA graph; so the kernel reads it from memory.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from course_lib.kernels.rounding import cast, widen

GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
# Elements per program: 4 in each of 256 threads, 16 bytes of float32. With 8, a load would use half of its sectors.
BLOCK = 1024


@triton.constexpr_function
def logarithm(beta):
    """Return the natural logarithm of a constant; -inf for 0."""
    return math.log(beta) if beta > 0 else -math.inf


# exercise 12.10
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take one step of AdamW for BLOCK elements per program, in place, and store the new w in `weights` unless None.

    step: one number in memory, from 1 on; the others: [numel]. 1 - beta^t is computed in float64, the rest in float32.
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


@torch.library.custom_op("course::adamw_step", mutates_args=("master", "exp_avg", "exp_avg_sq", "weights"))
def update(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    weights: torch.Tensor | None,
    step: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Take a step of AdamW; see adamw_step."""
    numel = master.numel()
    if numel == 0:
        return
    settings = (lr, 1 - lr * weight_decay, eps)
    with torch.cuda.device_of(master):
        adamw_kernel[(triton.cdiv(numel, BLOCK),)](
            master, grad, exp_avg, exp_avg_sq, weights, step, numel, *settings, beta1, beta2, BLOCK=BLOCK, num_warps=8
        )


@update.register_fake
def _(master, grad, exp_avg, exp_avg_sq, weights, step, lr, beta1, beta2, eps, weight_decay):
    return None


def check_settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for a number that AdamW does not support."""
    if not all(isinstance(number, (int, float, torch.SymFloat)) for number in (lr, *betas, eps, weight_decay)):
        raise ValueError(f"lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}: they are Python numbers")
    if not (lr >= 0 and eps >= 0 and weight_decay >= 0):
        raise ValueError(f"lr {lr}, eps {eps}, weight_decay {weight_decay}: they are 0 or more")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas {betas}: two numbers, each at least 0 and below 1")


def check_buffers(buffers: dict[str, torch.Tensor], step: torch.Tensor) -> None:
    """Raise ValueError unless the buffers match and have dtypes that the kernel supports. The first is the master."""
    master = buffers["master"]
    for name, buffer in buffers.items():
        allowed = {"grad": GRADIENTS, "weights": GRADIENTS[:2]}.get(name, (torch.float32,))
        if buffer.dim() != 1 or buffer.shape != master.shape or not buffer.is_contiguous():
            raise ValueError(
                f"{name} {list(buffer.shape)}: it is flat and contiguous, [{master.numel()}] as the master"
            )
        if buffer.dtype not in allowed:
            raise ValueError(f"{name} is {buffer.dtype}; it may be {', '.join(map(str, allowed))}")
        if buffer.device != master.device:
            raise ValueError(f"{name} is on {buffer.device}, the master on {master.device}")
    if not torch.is_tensor(step) or step.numel() != 1 or step.dtype != torch.float32 or step.device != master.device:
        raise ValueError(f"step {step}: it is a float32 tensor of one element on {master.device}, the kernel reads it")


def adamw_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    weights: torch.Tensor | None = None,
) -> None:
    """Take one step of AdamW, in place, over flat buffers [n]: master, exp_avg, exp_avg_sq of float32, any float
    `grad`.

    step: its number, from 1 on: a float32 tensor of one element on the same device, as torch.optim keeps it; the caller
    adds 1 first. weights: a bfloat16 or float16 copy of master [n], written in the same pass. lr is a Python number,
    which a captured CUDA graph keeps. Raises ValueError, and changes nothing, for other shapes, dtypes and devices, and
    for numbers out of range.
    """
    check_settings(lr, betas, eps, weight_decay)
    buffers = {"master": master, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check_buffers(buffers if weights is None else buffers | {"weights": weights}, step)
    update(master, grad, exp_avg, exp_avg_sq, weights, step, lr, *betas, eps, weight_decay)
