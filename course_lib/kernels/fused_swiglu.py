"""SwiGLU in one pass: silu(gate) * up reads its inputs once, writes its result once, and keeps only its inputs.

    y = silu(g) u = g s u                          s = sigmoid(g) = 1 / (1 + exp(-g))
    dL/du = (dL/dy) g s                            dL/dg = (dL/dy) u s (1 + g (1 - s))

This arithmetic takes a GPU almost no time; it waits for memory: an H100 could do 80 operations while it moves one
float32 (67 TFLOP/s, 3.35 TB/s). So only elements moved count. With n = b s f, in elements:

                     forward                                     backward                                   kept
    this module      g, u -> y                        3 n        dy, g, u -> dg, du              5 n        g, u: 2 n
    F.silu(g) * u    g -> silu; silu, u -> y          5 n        dy, u -> dsilu; dy, silu -> du;            g, silu, u:
                                                                 dsilu, g -> dg                  9 n        3 n

silu(g) is cheaper to recompute than to read. Sums and products are float32 and rounded once, at the store;
eager code rounds silu(g) too.

gate and up may be the two halves of one matmul x [W_gate, W_up]: their rows are then 2 f apart, and the kernel takes a
stride for each. Shazeer 2020, "GLU Variants Improve Transformer"; Hsu et al. 2024, "Liger Kernel".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.kernels.rounding import cast, widen
from course_lib.kernels.rows import as_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 1024  # elements per program: 8 in each of 128 threads, which are 16 bytes of bfloat16, the widest load


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, contiguous, in their dtype; each [..., f] with any strides.

    A copy is made first only if the last axis is not contiguous, or the others are not one stride apart, as in
    x.transpose(0, 1). Raises ValueError unless gate and up have the same shape, dtype (bfloat16, float16, float32;
    under autocast both come from a linear layer, in one dtype) and device.
    """
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)}: both are [..., f], of one shape")
    if gate.dtype != up.dtype or gate.dtype not in DTYPES:
        raise ValueError(f"gate is {gate.dtype}, up {up.dtype}: both are bfloat16, or float16, or float32")
    if gate.device != up.device:
        raise ValueError(f"gate is on {gate.device}, up on {up.device}")
    return swiglu_forward(gate, up)


@triton.jit
def swiglu_forward_kernel(gate, up, out, gate_stride, up_stride, columns, blocks, BLOCK: tl.constexpr):
    """Compute one block of one row. gate, up: rows of `columns` elements, a stride apart; out: contiguous rows."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)  # times a stride it may exceed 2^31
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = widen(tl.load(gate + row * gate_stride + column, mask=inside))
    u = widen(tl.load(up + row * up_stride + column, mask=inside))
    y = g * tl.sigmoid(g) * u
    tl.store(out + row * columns + column, cast(y, out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    grad, gate, up, grad_gate, grad_up, grad_stride, gate_stride, up_stride, columns, blocks, BLOCK: tl.constexpr
):
    """Compute both gradients of one block of one row. grad_gate, grad_up: contiguous rows; others: a stride."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dy = widen(tl.load(grad + row * grad_stride + column, mask=inside))
    g = widen(tl.load(gate + row * gate_stride + column, mask=inside))
    u = widen(tl.load(up + row * up_stride + column, mask=inside))
    s = tl.sigmoid(g)
    dg = dy * u * s * (1 + g * (1 - s))
    du = dy * g * s
    tl.store(grad_gate + row * columns + column, cast(dg, grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + row * columns + column, cast(du, grad_up.dtype.element_ty), mask=inside)


@torch.library.custom_op("course::swiglu", mutates_args=())
def swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute swiglu."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if out.numel():
        gate, up = as_rows(gate), as_rows(up)
        rows, columns = gate.shape
        blocks = triton.cdiv(columns, BLOCK)
        with torch.cuda.device_of(out):
            swiglu_forward_kernel[(rows * blocks,)](
                gate, up, out, gate.stride(0), up.stride(0), columns, blocks, BLOCK=BLOCK, num_warps=4
            )
    return out


@torch.library.custom_op("course::swiglu_backward", mutates_args=())
def swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and of up: [..., f], contiguous, from the gradient of swiglu(gate, up)."""
    grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad_up = torch.empty_like(grad_gate)
    if grad.numel():
        grad, gate, up = as_rows(grad), as_rows(gate), as_rows(up)
        rows, columns = gate.shape
        blocks = triton.cdiv(columns, BLOCK)
        strides = grad.stride(0), gate.stride(0), up.stride(0)
        with torch.cuda.device_of(grad_gate):
            swiglu_backward_kernel[(rows * blocks,)](
                grad, gate, up, grad_gate, grad_up, *strides, columns, blocks, BLOCK=BLOCK, num_warps=4
            )
    return grad_gate, grad_up


@swiglu_forward.register_fake
def _(gate, up):
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@swiglu_backward.register_fake
def _(grad, gate, up):
    empty = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return empty, torch.empty_like(empty)


def keep(ctx, inputs, output):
    """Save for backward: gate and up as they were passed, not silu(gate)."""
    ctx.save_for_backward(*inputs)


swiglu_forward.register_autograd(lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors), setup_context=keep)
