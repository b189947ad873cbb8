"""RoPE in one pass: each program rotates all heads of one token, so that the token's angles are read once.

Each pair (x_i, x_{i + d/2}) of a head is rotated by the angle p theta^(-2i/d) of its position p:

    y_i       = x_i cos - x_{i+d/2} sin            y = R x, and R is orthogonal: R^-1 = R^T rotates by minus the
    y_{i+d/2} = x_{i+d/2} cos + x_i sin            angle. So dL/dx = R^T dL/dy is the same kernel with -sin.

In elements moved, with n = b s a d (cos and sin are d for each token, 1/a of x, and shared by all heads of it):

                  forward                                            backward                          kept
    this module   x -> y                                   2 n       dy -> dx                2 n       cos, sin
    apply_rope    four products of halves 4 n, sum and               the same in reverse,              cos, sin
                  difference 3 n, cat 2 n                  9 n       and a negation          10 n

Neither x nor y is kept, since the rotation is linear; cos and sin serve all layers. The arithmetic is float32, rounded
once. x may be a strided view: q, or k, of one fused matmul [b, s, (a + 2 kv) d]. Su et al. 2021, "RoFormer", §3.4;
pairs half a head apart as in Llama's Hugging Face code. Hsu et al. 2024, "Liger Kernel".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.kernels.rounding import cast, widen

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_PAIRS = 4096  # rotated at a time: in 8 warps, 16 pairs per thread; a token with more pairs takes a loop
WARP_PAIRS = 256  # 8 pairs per thread: in bfloat16 two loads and two stores of 16 bytes


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + d/2) of x: [b, s, a, d] by its angle; cos, sin: [s, d/2] or [b, s, d/2].

    Any strides are allowed; a copy is made first only if the last axis is not contiguous. Returns [b, s, a, d],
    contiguous, in the dtype of x * cos: x's dtype if all are alike, float32 for bfloat16 x (a linear layer's, under
    autocast) with float32 angles. Raises ValueError for other shapes, dtypes other than bfloat16, float16 and float32,
    several devices, and for angles that require a gradient, which is not computed.
    """
    if x.dim() != 4 or x.shape[3] % 2:
        raise ValueError(f"x {list(x.shape)}: it is [b, s, a, d], d even")
    batch, positions, _, head_dim = x.shape
    if cos.shape != sin.shape or cos.shape not in ((positions, head_dim // 2), (batch, positions, head_dim // 2)):
        raise ValueError(
            f"cos {list(cos.shape)}, sin {list(sin.shape)}: for x {list(x.shape)} both are "
            f"[{positions}, {head_dim // 2}] or [{batch}, {positions}, {head_dim // 2}]"
        )
    if cos.dtype != sin.dtype or not {x.dtype, cos.dtype} <= set(DTYPES):
        raise ValueError(
            f"x is {x.dtype}, cos {cos.dtype}, sin {sin.dtype}: bfloat16, float16, float32; both angles alike"
        )
    if not x.device == cos.device == sin.device:
        raise ValueError(f"x is on {x.device}, cos on {cos.device}, sin on {sin.device}")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos or sin requires a gradient; positions have none")
    return rotate(x, cos, sin, False, x.dtype if x.dtype == cos.dtype else torch.float32)


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    out,
    positions,  # s
    heads,  # a
    x_batch,  # strides of x
    x_position,
    x_head,
    angle_batch,  # strides of cos and of sin; 0 if all sequences of a batch share positions
    angle_position,
    HALF: tl.constexpr,  # d / 2
    PAIRS: tl.constexpr,  # HALF rounded up to a power of 2
    HEADS: tl.constexpr,  # heads at a time
    BACKWARDS: tl.constexpr,  # rotate by minus the angle
):
    """Rotate all heads of one token. out: [b, s, a, d], contiguous."""
    token = tl.program_id(0).to(tl.int64)  # times a stride it may exceed 2^31
    batch, position = token // positions, token % positions
    pair = tl.arange(0, PAIRS)
    inside = pair < HALF
    angle = batch * angle_batch + position * angle_position + pair
    c = widen(tl.load(cos + angle, mask=inside))[None, :]
    s = widen(tl.load(sin + angle, mask=inside))[None, :]
    if BACKWARDS:
        s = -s
    x += batch * x_batch + position * x_position
    out += token * heads * (2 * HALF)
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        in_bounds = (head < heads) & inside[None, :]  # [HEADS, PAIRS]
        source = x + head * x_head + pair[None, :]
        first = widen(tl.load(source, mask=in_bounds))
        second = widen(tl.load(source + HALF, mask=in_bounds))
        target = out + head * (2 * HALF) + pair[None, :]
        tl.store(target, cast(first * c - second * s, out.dtype.element_ty), mask=in_bounds)
        tl.store(target + HALF, cast(second * c + first * s, out.dtype.element_ty), mask=in_bounds)


@torch.library.custom_op("course::rope", mutates_args=())
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backwards: bool, dtype: torch.dtype) -> torch.Tensor:
    """Compute rope. backwards: rotate by minus the angle; dtype: the result's."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel():
        x, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, cos, sin))
        if cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        batch, positions, heads, head_dim = x.shape
        angle_batch = cos.stride(0) if cos.dim() == 3 else 0
        pairs = triton.next_power_of_2(head_dim // 2)
        heads_per_program = min(triton.next_power_of_2(heads), max(MOST_PAIRS // pairs, 1))
        strides = (*x.stride()[:3], angle_batch, cos.stride(-2))
        sizes = {"HALF": head_dim // 2, "PAIRS": pairs, "HEADS": heads_per_program}
        warps = min(max(heads_per_program * pairs // WARP_PAIRS, 1), 8)
        with torch.cuda.device_of(x):
            rope_kernel[(batch * positions,)](
                x, cos, sin, out, positions, heads, *strides, **sizes, BACKWARDS=backwards, num_warps=warps
            )
    return out


@rotate.register_fake
def _(x, cos, sin, backwards, dtype):
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def keep(ctx, inputs, output):
    """Save for backward: the angles, but not x, since the rotation is linear."""
    x, cos, sin, ctx.backwards, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin)


def rotation_gradient(ctx, grad):
    """Return the gradient of x, in its dtype; angles have none."""
    cos, sin = ctx.saved_tensors
    return rotate(grad, cos, sin, not ctx.backwards, ctx.dtype), None, None, None, None


rotate.register_autograd(rotation_gradient, setup_context=keep)
