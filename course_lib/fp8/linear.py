"""A linear layer whose three matmuls run in 8 bits: `Fp8Linear`.

    Fprop   y  = x wᵀ          over in          x: [tokens, in]    w: [out, in]
    Dgrad   dx = dy w          over out         dy: [tokens, out]
    Wgrad   dw = dyᵀ x         over tokens

Each operand has a role: input, weight or gradient. Gradients are small and spread over many magnitudes, so they often
get e5m2's range; the others get e4m3's precision. Each is quantized for a matmul in which k, the dimension of the sum,
is last: row-wise. Dgrad and Wgrad also read transposed operands: column-wise. The scale of the full matrix or of a
square serves both; a row or a tile has another scale in the transpose, so the matrix is quantized again (DeepSeek-V3
2024, §3.3.2 and §3.3.3).

Kept for backward: x in 8 bits, with its scales, and the weight itself: half of what a layer in bf16 keeps.

A scale is the matrix's own (`quantizers`), or it comes from the previous steps (`delayed_scaling`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from course_lib.fp8.delayed_scaling import DelayedQuantizer
from course_lib.fp8.operands import Cast, Casts, RowColumnQuantized, Split
from course_lib.fp8.quantization import SQUARE, TENSOR, Quantized
from course_lib.fp8.quantizers import CurrentQuantizer, Quantizer, StoredQuantizer
from course_lib.fp8.scaled_matmul import fp8_matmul
from course_lib.tensor_parallel.linear import RowParallelLinear, as_autocast
from course_lib.tensor_parallel.regions import OnceDifferentiable


class LayerQuantizers(nn.Module):
    """The quantizers of a layer: of its input, its weight, and the gradient of its output."""

    def __init__(self, casts: Casts, splits: dict[str, tuple[Split, ...]] | None = None):
        super().__init__()
        splits = splits or {}

        def make(role: str, columnwise: bool) -> Quantizer:
            cast: Cast = getattr(casts, role)
            return (DelayedQuantizer if cast.history else CurrentQuantizer)(cast, splits.get(role, ()), columnwise)

        # The transpose of an input in tiles is made in backward, from the 8 bits.
        self.input = make("input", columnwise=casts.input.block in (TENSOR, SQUARE))
        self.weight = make("weight", columnwise=False)
        self.gradient = make("gradient", columnwise=True)

    def store_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weight [out, in] in 8 bits, to be kept in its place; from now on `self.weight` holds its scale."""
        if not isinstance(self.weight, StoredQuantizer):
            self.weight = StoredQuantizer(self.weight.cast, self.weight.splits).train(self.weight.training)
        return self.weight.store(weight)


def gradient_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of a weight's gradient: the parameter's `grad_dtype`, or else the weight's dtype."""
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


class Fp8LinearFunction(OnceDifferentiable):
    """x wᵀ for each weight, and the gradients, each matmul in 8 bits. x is quantized once for all weights, and kept in
    8 bits for backward.

    With a group, x's gradient is summed over it while Wgrad runs (notebook 06, ColumnMatmul).
    """

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, group: dist.ProcessGroup | None, quantizers: list[LayerQuantizers], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return one [..., out] for each weight, in x's dtype. x: [..., in]; weights: [out, in]."""
        rows = quantizers[0].input(x.reshape(-1, x.shape[-1]))
        factors = [each.weight(w) for each, w in zip(quantizers, weights, strict=True)]
        outs = [fp8_matmul(rows, factor, x.dtype) for factor in factors]
        ctx.group, ctx.quantizers, ctx.block, ctx.shape, ctx.dtype = group, quantizers, rows.block, x.shape, x.dtype
        ctx.grad_dtypes = [gradient_dtype(weight) for weight in weights]
        # The transpose of the column-wise values: the same matrix, laid out as Wgrad reads it.
        values = rows.transposed.values.t() if isinstance(rows, RowColumnQuantized) else rows.values
        ctx.save_for_backward(values, rows.scale, *weights, *(factor.scale for factor in factors))
        return tuple(out.view(*x.shape[:-1], len(weight)) for out, weight in zip(outs, weights, strict=True))

    # exercise 14.8
    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        """Return dx, None, None, and dw of each weight; None where `ctx.needs_input_grad` asks for none.

        gradients: dy of each matmul, [..., out]. All matmuls are in 8 bits: each dy is quantized once for Dgrad, dyᵀ
        from dy itself, x from its 8 bits, transposed once for all weights; scales that forward has computed are
        reused. dx has x's shape and dtype; with a group it is summed over it, and the all-reduce runs while the dw are
        computed, in `ctx.grad_dtypes`.
        """
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.quantizers)], saved[len(ctx.quantizers) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        dys = [q.gradient(grad) for q, grad in zip(ctx.quantizers, grads, strict=True)]
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            saved_weights = zip(ctx.quantizers, weights, scales, strict=True)
            transposed = [q.weight.transposed(q.weight(w, of_w), w) for q, w, of_w in saved_weights]  # [in, out]
            terms = [fp8_matmul(dy, w, ctx.dtype) for dy, w in zip(dys, transposed, strict=True)]
            grad_x = sum(terms[1:], terms[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights: list[torch.Tensor | None] = [None] * len(weights)
        needed = ctx.needs_input_grad[3:]
        if any(needed):
            x = ctx.quantizers[0].input.transposed(Quantized(values, scale, ctx.block))  # [in, tokens]
            for i, (q, dy) in enumerate(zip(ctx.quantizers, dys, strict=True)):
                if needed[i]:
                    grad_weights[i] = fp8_matmul(q.gradient.transposed(dy, grads[i]), x, ctx.grad_dtypes[i])
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights


class Fp8Linear(nn.Module):
    """`linear` with its three matmuls in 8 bits: [..., in] to [..., out]. Its parameters are `linear`'s.

    splits: by role, the groups over which the matrices of this layer are split.
    """

    def __init__(
        self, linear: nn.Linear | RowParallelLinear, casts: Casts, splits: dict[str, tuple[Split, ...]] | None = None
    ):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.quantizers = LayerQuantizers(casts, splits).to(linear.weight.device)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Return x wᵀ in 8 bits, [..., out]."""
        (x,) = as_autocast(x)
        return Fp8LinearFunction.apply(x, None, [self.quantizers], self.weight)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.matmul(x)
        return out if self.bias is None else out + self.bias.to(out.dtype)


@contextlib.contextmanager
def quantized_once(model: nn.Module) -> Iterator[None]:
    """Quantize each weight of an FP8 layer once inside the block, row-wise and column-wise, and keep it in 2 bytes per
    element: for the micro-batches of one step. After a step of any optimizer, and where a weight changes in place, it
    is quantized again. Afterwards nothing is kept. Under ZeRO-3, each rank keeps full weights, in 8 bits.
    """
    quantizers = [module.weight for module in model.modules() if isinstance(module, LayerQuantizers)]

    def clear(*_) -> None:
        for quantizer in quantizers:
            quantizer.cached = None

    for quantizer in quantizers:
        quantizer.caching = True
    hook = register_optimizer_step_post_hook(clear)
    try:
        yield
    finally:
        hook.remove()
        clear()
        for quantizer in quantizers:
            quantizer.caching = False
