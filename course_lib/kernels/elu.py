"""The first kernel of the course: ELU, forward and backward.

    ELU(x) = x                  where x >= 0            (Clevert et al., 2015)
             alpha (e^x - 1)    where x < 0

A GPU runs one program many times at once, and each run, a *program* in Triton's terms, works on a block of elements:

    elements   0 ........ 1023 | 1024 ....... 2047 | 2048 ..... 2499
    program    program_id 0    | program_id 1      | program_id 2, the last 572 lanes masked off

All kernels follow the same steps. `tl.program_id`: the index of the program's block. `tl.arange`: the indices of its
elements, all at once. A mask: the elements that exist, since the last block is seldom full and the memory behind it
belongs to another tensor. `tl.load`: from global memory into registers. Arithmetic, which costs next to nothing here.
`tl.store`: back.

The cost: each element is read once and written once, 8 bytes in float32 for a dozen operations, and an H100 does some
20 float32 operations in the time that one byte takes. So this kernel is as fast as memory, and its arithmetic does not
matter; only fusing it with adjacent operations saves bytes. A block of 1,024 elements in 4 warps is 8 elements per
thread: two loads of 16 bytes in float32, one in bfloat16. (Loads are that wide if the number of elements is a multiple
of 16; otherwise the mask may change at any element, and the compiler loads one by one.)

`e^x - 1` near zero: e^x is close to 1, so the subtraction cancels the leading bits. At x = -1e-6 three digits are left
in float32, at x = -1e-8 none. PyTorch calls the C library's `expm1`, the kernels of torch.compile call NVIDIA's. The
interpreter has neither, so `expm1` below sums the series above -1, where the eleven terms leave out less than 2^-28 of
the result; below -1 the subtraction costs less than one bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.kernels.rounding import cast, widen

BLOCK = 1024
NUM_WARPS = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def expm1(x):
    """Return e^x - 1 for x <= 0, in float32. Near zero, where a subtraction cancels, by its series x + x^2/2! + x^3/3!
    + …
    """
    near = tl.maximum(x, -1.0)  # the range of the series; powers of lower x would overflow
    series = 1 / 3628800 + near * (1 / 39916800)
    series = 1 / 362880 + near * series
    series = 1 / 40320 + near * series
    series = 1 / 5040 + near * series
    series = 1 / 720 + near * series
    series = 1 / 120 + near * series
    series = 1 / 24 + near * series
    series = 1 / 6 + near * series
    series = 1 / 2 + near * series
    return tl.where(x > -1, near + near * near * series, tl.exp(x) - 1)


# exercise 12.4
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    """Write ELU of x to out, one block of BLOCK elements per program. x, out: [numel], contiguous."""
    block = tl.program_id(0).to(tl.int64)  # 64 bits: the number of an element can pass 2^31
    element = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = element < numel
    x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
    below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
    out = tl.where(x < 0, below, x)
    tl.store(out_pointer + element, cast(out, out_pointer.dtype.element_ty), mask=exists)


@triton.jit
def elu_backward_kernel(grad_pointer, x_pointer, grad_x_pointer, alpha, numel, BLOCK: tl.constexpr):
    """Write grad * ELU'(x) to grad_x, with ELU'(x) = 1 where x > 0, else alpha e^x. grad, x, grad_x: [numel],
    contiguous.
    """
    block = tl.program_id(0).to(tl.int64)
    element = block * BLOCK + tl.arange(0, BLOCK)
    exists = element < numel
    grad = widen(tl.load(grad_pointer + element, mask=exists, other=0.0))
    x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
    slope = tl.where(x <= 0, alpha * tl.exp(tl.minimum(x, 0.0)), 1.0)
    tl.store(grad_x_pointer + element, cast(grad * slope, grad_x_pointer.dtype.element_ty), mask=exists)


@torch.library.custom_op("course::elu", mutates_args=())
def elu_forward(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return ELU of x as a new contiguous tensor; the operator that PyTorch sees. x: any shape."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        with torch.cuda.device_of(x):
            elu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, alpha, x.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


@torch.library.custom_op("course::elu_backward", mutates_args=())
def elu_backward(grad: torch.Tensor, x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the gradient of ELU's input. grad, x: of one shape."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        with torch.cuda.device_of(x):
            elu_backward_kernel[grid](grad, x, grad_x, alpha, x.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return grad_x


@elu_forward.register_fake
def _(x, alpha):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@elu_backward.register_fake
def _(grad, x, alpha):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def save_input(ctx, inputs, output) -> None:
    """Save x for backward."""
    x, ctx.alpha = inputs
    ctx.save_for_backward(x)


elu_forward.register_autograd(
    lambda ctx, grad: (elu_backward(grad, *ctx.saved_tensors, ctx.alpha), None), setup_context=save_input
)


def elu(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """Return F.elu(x, alpha), by one kernel, with a gradient by another. x: any shape and strides; float32, bf16 or
    fp16.

    Computed in float32 and rounded once to x's dtype, also under autocast. The result is contiguous. Raises ValueError
    for other dtypes.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"elu takes float32, bfloat16 or float16, not {x.dtype}")
    return elu_forward(x, float(alpha))
