"""RMSNorm with the residual's addition, in one pass forward and one backward, keeping one number per row.

    s = x + residual        r = 1 / sqrt(mean(s²) + eps)        y_i = s_i r w_i

    with n = s r and g = dy w:      ds_i = r (g_i - n_i mean(g n)) + (the gradient of s itself)        dw = Σ_rows dy n

x and residual enter only as their sum, so ds is the gradient of both. Eager PyTorch computes s in one kernel and y in
another, and adds the two gradients of s in a third. Here a row of s stays in registers from the first load to the last
store. Elements moved, with n = b s h in each tensor; forward_bytes returns bytes, including the small remainder (r, the
weight):

                             forward                                  backward                                 kept
    here, without residual   x -> y                          2 n      dy, s -> dx                     3 n      x, r
    here, with residual      x, residual -> s, y             4 n      dy, s, ds -> dx                 4 n      s, r
    eager, with residual     x, residual -> s; s -> y        5 n      dy, s -> dx; dx, ds -> dx       6 n      s, r

The sum is rounded once to its own dtype, and the norm is computed from the rounded sum: backward reads the same values.
Everything else is float32, rounded at the store.

dw is a sum over rows that different programs hold. Atomic additions would make it differ from run to run, so each of P
programs sums every P-th tile of rows in registers and writes one partial row in float32; a second, tiny kernel adds
these in a fixed order and rounds to the weight's dtype (torch.sum and a cast would be two launches). Written and read,
the partial rows of P programs are 8 P h bytes; with P one to four per multiprocessor they stay in L2. The kernels are
in `norm_kernels`.

Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Hsu et al. 2024, "Liger Kernel", §3.2 (RMSNorm).
"""

from __future__ import annotations

import torch
import triton
from torch import nn

from course_lib.kernels.norm_kernels import (
    add_parts_kernel,
    long_norm_backward_kernel,
    long_norm_forward_kernel,
    norm_backward_kernel,
    norm_forward_kernel,
)
from course_lib.kernels.rows import as_rows, shape_of_work

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED_PROGRAMS = 3  # the interpreter runs one program at a time; a few show that their parts add up
BYTES_IN_FLIGHT = 40 * 1024  # per multiprocessor; 29 KB are 4.8 TB/s for 0.8 us on each of 132 (Little)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of x: y; with a residual, of x + residual: (y, x + residual). x, residual: [..., h]; weight:
    [h].

    As in eager code, x + residual has the dtype that x and residual promote to (autocast gives a bfloat16 x and a
    float32 residual, say), and y has that dtype, whatever the weight's. Both are contiguous. Any strides are allowed; a
    copy is made first only if rows are not contiguous or not one stride apart. Raises ValueError if shapes, dtypes or
    devices do not fit.
    """
    given = {"x": x, "weight": weight} | ({} if residual is None else {"residual": residual})
    if x.dim() == 0 or weight.shape != x.shape[-1:] or weight.numel() == 0:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)}: expected [..., h] and [h], h at least 1")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {list(residual.shape)} has not the shape of x {list(x.shape)}")
    if any(tensor.dtype not in DTYPES for tensor in given.values()):
        dtypes = ", ".join(f"{name} is {tensor.dtype}" for name, tensor in given.items())
        raise ValueError(f"{dtypes}: each must be float32, bfloat16 or float16")
    if any(tensor.device != x.device for tensor in given.values()):
        devices = ", ".join(f"{name} is on {tensor.device}" for name, tensor in given.items())
        raise ValueError(f"{devices}: expected one device")
    if residual is None:
        return normalize(x, weight, eps)[0]
    return add_and_normalize(x, residual, weight, eps)[:2]


def forward_bytes(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> int:
    """Return the bytes that rms_norm(x, weight, eps, residual) moves: each tensor once. With n elements in h columns, e
    bytes each:

    2 n e_x + h e_weight + 4 n / h, or with a residual n (e_x + e_residual + 2 e_sum) + h e_weight + 4 n / h.
    """
    per_element = 2 * x.element_size()
    if residual is not None:
        per_element = x.element_size() + residual.element_size() + 2 * sum_dtype(x, residual).itemsize
    return x.numel() * per_element + weight.nbytes + 4 * x.shape[:-1].numel()


def sum_dtype(x: torch.Tensor, residual: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, residual.dtype)


class FusedRMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the last dimension, computed by `rms_norm`; `forward(x, residual)` returns (y, x + residual).

    Raises ValueError for more than one normalized dimension, or without a weight.
    """

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if len(self.normalized_shape) != 1 or self.weight is None:
            raise ValueError(f"FusedRMSNorm normalizes one dimension and has a weight; got {self.extra_repr()}")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        # The default belongs to the arithmetic's dtype, as in PyTorch.
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps, residual)


def backward_resources(device: torch.device, tiles: int, num_warps: int, tile_bytes: int) -> tuple[int, int]:
    """Return the number of programs of the backward pass, and num_stages.

    16 warps fill a multiprocessor's registers (some 110 per thread), so there is one wave of programs, each with work.
    As many of the next tiles of dy, s and ds, `tile_bytes` each, are loaded ahead as keep memory busy and fit in shared
    memory; the current tile is a stage, too.
    """
    if device.type == "cpu":
        return min(tiles, INTERPRETED_PROGRAMS), 1
    gpu = torch.cuda.get_device_properties(device)
    # AMD GPUs do not report it, and have 64 KiB.
    shared_bytes = getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)
    on_one = max(1, 16 // num_warps)
    fits = (shared_bytes // on_one - 1024) // tile_bytes  # minus memory for the sums over a row
    wanted = triton.cdiv(BYTES_IN_FLIGHT, on_one * tile_bytes)
    return min(tiles, gpu.multi_processor_count * on_one), 1 + min(wanted, fits)


def outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for y: [..., h] like x, contiguous; and for rstd: [rows] float32."""
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


def outputs_with_sum(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return memory for y and the sum: [..., h], contiguous; and for rstd: [rows] float32."""
    summed = x.new_empty(x.shape, dtype=sum_dtype(x, residual))
    y, rstd = outputs(summed)
    return y, summed, rstd


def launch_forward(x, residual, weight, y, summed, rstd, eps: float) -> None:
    """Fill y, rstd, and summed unless it is None, for x: [..., h]."""
    if y.numel() == 0:
        return
    x = as_rows(x)
    residual = None if residual is None else as_rows(residual)
    rows, hidden = x.shape
    tensors = x, residual, weight.contiguous(), y, summed, rstd
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    tile, block, num_warps = shape_of_work(hidden)
    if block < hidden:
        with torch.cuda.device_of(y):
            long_norm_forward_kernel[(rows,)](*tensors, *strides, hidden, eps, BLOCK=block, num_warps=num_warps)
    else:
        grid = (triton.cdiv(rows, tile),)
        with torch.cuda.device_of(y):
            norm_forward_kernel[grid](
                *tensors, *strides, rows, hidden, eps, ROWS=tile, BLOCK=block, num_warps=num_warps
            )


@torch.library.custom_op("course::rms_norm", mutates_args=())
def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and rstd of x."""
    y, rstd = outputs(x)
    launch_forward(x, None, weight, y, None, rstd, eps)
    return y, rstd


@torch.library.custom_op("course::add_rms_norm", mutates_args=())
def add_and_normalize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, x + residual, and rstd."""
    y, summed, rstd = outputs_with_sum(x, residual)
    launch_forward(x, residual, weight, y, summed, rstd, eps)
    return y, summed, rstd


@torch.library.custom_op("course::rms_norm_backward", mutates_args=())
def norm_backward(
    dy: torch.Tensor, dsum: torch.Tensor | None, summed: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx (in the sum's dtype; also the residual's gradient) and dweight."""
    dx, dweight = summed.new_empty(summed.shape), weight.new_empty(weight.shape)
    if dx.numel() == 0:
        return dx, dweight.zero_()
    dy, summed, dsum = as_rows(dy), as_rows(summed), None if dsum is None else as_rows(dsum)
    rows, hidden = summed.shape
    tile, block, num_warps = shape_of_work(hidden)
    tile_bytes = tile * block * sum(tensor.element_size() for tensor in (dy, summed, dsum) if tensor is not None)
    programs, stages = backward_resources(dx.device, triton.cdiv(rows, tile), num_warps, tile_bytes)
    strides = dy.stride(0), 0 if dsum is None else dsum.stride(0), summed.stride(0)
    given = dy, dsum, summed, weight.contiguous(), rstd, dx
    if block < hidden:
        parts = rstd.new_zeros(programs, hidden)
        with torch.cuda.device_of(dx):
            long_norm_backward_kernel[(programs,)](
                *given, parts, *strides, rows, hidden, BLOCK=block, num_warps=num_warps
            )
    else:
        parts = rstd.new_empty(programs, hidden)
        sizes = {"ROWS": tile, "BLOCK": block, "STAGES": stages, "num_warps": num_warps}
        with torch.cuda.device_of(dx):
            norm_backward_kernel[(programs,)](*given, parts, *strides, rows, hidden, **sizes)
    with torch.cuda.device_of(dx):
        add_parts_kernel[(triton.cdiv(hidden, 32),)](parts, dweight, programs, hidden, ROWS=128, BLOCK=32)
    return dx, dweight


@normalize.register_fake
def _(x, weight, eps):
    return outputs(x)


@add_and_normalize.register_fake
def _(x, residual, weight, eps):
    return outputs_with_sum(x, residual)


@norm_backward.register_fake
def _(dy, dsum, summed, weight, rstd):
    return summed.new_empty(summed.shape), weight.new_empty(weight.shape)


def keep(ctx, inputs, output):
    """Save for backward: the normalized rows, the weight, and rstd. A gradient of None stays None."""
    *added, weight, eps = inputs
    rstd = output[-1]
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(added[0] if len(added) == 1 else output[1], weight, rstd)


def x_and_weight_gradients(ctx, dy, drstd):
    dx, dweight = norm_backward(dy, None, *ctx.saved_tensors)
    return dx, dweight, None


def all_gradients(ctx, dy, dsum, drstd):
    if dy is None:  # only the sum was used
        return dsum, dsum, None, None
    dx, dweight = norm_backward(dy, dsum, *ctx.saved_tensors)
    return dx, dx, dweight, None


normalize.register_autograd(x_and_weight_gradients, setup_context=keep)
add_and_normalize.register_autograd(all_gradients, setup_context=keep)
