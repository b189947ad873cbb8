"""A linear layer whose three products are made in 8 bits: `Fp8Linear`.

    Fprop   y  = x wᵀ          over in          x: [tokens, in]    w: [out, in]
    Dgrad   dx = dy w          over out         dy: [tokens, out]
    Wgrad   dw = dyᵀ x         over tokens

Each operand has a role: input, weight or gradient. Gradients are small and far apart, so they often get e5m2's range;
the others get e4m3's precision. Each is quantized for a product in which k, the dimension of the sum, is last. Dgrad
and Wgrad take operands the other way round. A scale of the whole matrix, or of a square, serves both ways; a scale of a
row or of a tile is another one there, so the matrix is quantized again (DeepSeek-V3 2024, §3.3.2 and §3.3.3).

Kept for backward: x in 8 bits, with its scales, and the weight itself: half of what a layer in bf16 keeps.

A scale can be that of the matrix (current), which wants all of it read before the first number is rounded; or it comes
from the steps before (delayed): the largest amax of a history (NVIDIA's Transformer Engine, DelayedScaling).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from course_lib.fp8.casts import quantize_delayed, transpose_tiles, watched
from course_lib.fp8.operands import (
    Cast,
    Casts,
    Float32Buffers,
    RowColumnQuantized,
    Split,
    amax_of,
    cast_matrix,
    has_kernels,
    has_transpose_kernel,
    with_transposed,
)
from course_lib.fp8.quantization import FULL, SQUARE, TENSOR, TILE, Quantized, dequantize, scale_of
from course_lib.fp8.scaled_matmul import fp8_matmul
from course_lib.tensor_parallel.linear import as_autocast
from course_lib.tensor_parallel.regions import OnceDifferentiable


class Quantizer(Float32Buffers):
    """Quantizes the operands of one role of one layer, each by its own amax.

    splits: over which groups they are split; a scale that holds for what several ranks have is the same on them all.
    given: the scale of what comes, where somebody has found it before (`Fp8Gather`). A weight may have been stored in 8
    bits (`store`): then that is what it is. both: what is quantized in training will be turned, too. known: the scale
    comes from a history, which has something in it. keeps: what has been quantized is kept (`quantized_once`).
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        super().__init__()
        self.cast, self.splits = cast, splits
        self.both = self.keeps = False
        self.known, self.asked = False, 0  # asked: the steps until `update_scales` looks at the history again
        self.given: torch.Tensor | None = None
        self.kept: tuple[torch.Tensor, int, RowColumnQuantized] | None = (
            None  # of what, in which version, and in 8 bits
        )
        self.found: tuple[torch.Tensor, int, torch.Tensor] | None = None  # the scale of a history, and its version
        self.register_buffer("stored_scale", None)

    def _load_from_state_dict(self, *args):
        """As nn.Module's; of a history that is loaded nothing is known."""
        super()._load_from_state_dict(*args)
        self.known, self.asked = False, 0

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        """The groups over whose ranks a block of the (transposed) matrix lies."""
        return tuple(s.group for s in self.splits if self.cast.block[1 - s.dim if transposed else s.dim] == FULL)

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """The scales of a matrix whose blocks have this amax [blocks of rows, blocks of columns] over all ranks."""
        return scale_of(amax, self.cast.dtype, self.cast.power_of_two)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
        """x [rows, k] in 8 bits. scale: of the same x, from before. Raises ValueError for 8 bits without their scale,
        and for a scale without its 8 bits.
        """
        if (x.itemsize == 1) != (self.stored_scale is not None):
            raise ValueError(
                f"{x.dtype} and {'no' if self.stored_scale is None else 'a'} stored scale: `store` makes both"
            )
        if x.itemsize == 1:
            return Quantized(x.detach(), self.stored_scale, self.cast.block)
        if self.keeps:
            return self.once(x)
        return self.quantize(x, scale, self.both and self.training or scale is not None)

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None, both: bool) -> Quantized:
        """x in 8 bits, by the scale where there is one; both: with its transpose, where that comes with one look."""
        if scale is None and self.given is None and self.known and has_kernels(x, self.cast.block):
            scale = self.scale_of_history(x)
            if self.training:
                straight, turned, amax = quantize_delayed(x, scale, self.cast.dtype, both)
                torch.maximum(self.amax, amax.view(1), out=self.amax)
                return with_transposed(straight, turned) if both else straight
        if scale is None:
            scale = self.given if self.given is not None else self.known_scale(x)
        return cast_matrix(x, self.cast, scale, self.groups(), both=both)

    def scale_of_history(self, x: torch.Tensor) -> torch.Tensor:
        """The scale by the recorded amaxes; x's own is not needed. Worked out once a step, where nobody follows."""
        recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()  # into a CUDA graph
        once = not (recorded or watched(x.detach()) or torch.is_inference_mode_enabled())
        if once and self.found and self.found[0] is self.history and self.found[1] == self.history._version:
            return self.found[2]
        scale = self.next_scale(self.history.new_zeros(1, 1))
        self.found = (self.history, self.history._version, scale) if once else None
        return scale

    def once(self, x: torch.Tensor) -> RowColumnQuantized:
        """x in 8 bits, both ways: as it was kept, or made and kept."""
        if self.kept is None or not self.kept[0].is_set_to(x) or self.kept[1] != x._version:
            made = self.quantize(x, None, True)
            made = made if isinstance(made, RowColumnQuantized) else with_transposed(made, self.transposed(made, x))
            self.kept = x.detach(), x._version, made
        return self.kept[2]

    def known_scale(self, x: torch.Tensor) -> torch.Tensor | None:
        """The scale, where it is not that of x itself."""
        return None

    def transposed(self, quantized: Quantized, x: torch.Tensor | None = None) -> Quantized:
        """The transpose of what has been quantized, for a product over its rows; anew where blocks are not the same
        both ways, from x or from what the 8 bits stand for.
        """
        if isinstance(quantized, RowColumnQuantized):
            return quantized.transposed
        if self.cast.block[0] == self.cast.block[1]:
            return quantized.t()
        if x is None and self.cast.block == TILE and has_transpose_kernel(quantized.values):
            return transpose_tiles(quantized, self.cast.power_of_two)
        x = dequantize(quantized) if x is None or x.itemsize == 1 else x
        return cast_matrix(x, self.cast, None, self.groups(True), transposed=True)

    def store(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [out, in] in 8 bits, to be kept in place of it; the scale is kept here."""
        stored = cast_matrix(weight, self.cast, None, self.groups())
        self.stored_scale = stored.scale
        return stored.values


class DelayedQuantizer(Quantizer):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is there before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation apart; history [steps]: those before it. Where the history
    is empty a matrix has its own scale. Raises ValueError for blocks.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        if cast.block != TENSOR:
            raise ValueError(f"delayed scaling works per tensor, not with blocks of {cast.block}")
        super().__init__(cast, splits)
        self.updated = False  # where not, the history may be empty, and the ranks must agree about the matrix itself
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # later, `update_scales` asks them

    def known_scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.next_scale(amax_of(x, self.groups()))

    # exercise 14.7
    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the scale [1, 1] for a matrix whose largest magnitude is amax [1, 1]: that of the largest amax of the
        history, or of this one while the history is empty.

        In training, `self.amax` becomes the largest since the last `update`. Reads no value on the host; a second call
        with the same amax, as in recomputation, changes nothing.
        """
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
        known = self.history.max()
        return super().next_scale(torch.where(known > 0, known, amax))

    # exercise 14.7
    @torch.no_grad()
    def update(self) -> None:
        """End a step: its amax, by now that of all ranks, joins the history, and the oldest leaves.

        Afterwards `self.amax` is 0, and `self.updated` True. Reads no value on the host.
        """
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()
        self.updated = True


class LayerQuantizers(nn.Module):
    """The quantizers of a layer: of its input, its weight, and the gradient of its output."""

    def __init__(self, casts: Casts, splits: dict[str, tuple[Split, ...]] | None = None):
        super().__init__()
        made = [
            (DelayedQuantizer if cast.history else Quantizer)(cast, (splits or {}).get(role, ()))
            for role, cast in casts._asdict().items()
        ]
        self.input, self.weight, self.gradient = made
        self.gradient.both = True
        self.input.both = casts.input.block in (TENSOR, SQUARE)  # a tile's transpose is made of the 8 bits, in backward


def gradient_dtype(weight: torch.Tensor) -> torch.dtype:
    """The dtype of a weight's gradient: the weight's, or what the parameter's `grad_dtype` says."""
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


class Fp8LinearFunction(OnceDifferentiable):
    """x wᵀ for each weight, and the gradients, each product in 8 bits. x is quantized once for all weights, and kept in
    8 bits for backward.

    With a group, x's gradient is summed over it, beside the weights' products (notebook 06, ColumnMatmul).
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, group, quantizers: list[LayerQuantizers], *weights: torch.Tensor) -> tuple:
        """Return one [..., out] for each weight, in x's dtype. x: [..., in]; weights: [out, in]."""
        rows = quantizers[0].input(x.reshape(-1, x.shape[-1]))
        factors = [each.weight(w) for each, w in zip(quantizers, weights, strict=True)]
        outs = [fp8_matmul(rows, factor, x.dtype) for factor in factors]
        ctx.group, ctx.quantizers, ctx.block, ctx.shape, ctx.dtype = group, quantizers, rows.block, x.shape, x.dtype
        ctx.grad_dtypes = [gradient_dtype(weight) for weight in weights]
        kept = (
            rows.transposed.values.t() if isinstance(rows, RowColumnQuantized) else rows.values
        )  # the same, as it lies for Wgrad
        ctx.save_for_backward(kept, rows.scale, *weights, *(factor.scale for factor in factors))
        return tuple(out.view(*x.shape[:-1], len(weight)) for out, weight in zip(outs, weights, strict=True))

    # exercise 14.8
    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        """Return dx, None, None, and dw of each weight; None where `ctx.needs_input_grad` asks for none.

        gradients: dy of each product, [..., out]. All products are in 8 bits: each dy quantized once for Dgrad, dyᵀ
        quantized from dy itself, x from its 8 bits, turned once for all weights; scales that forward found are not
        found again. dx has x's shape and dtype; with a group it is summed over it, and the sum travels while the dw are
        computed, in `ctx.grad_dtypes`.
        """
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.quantizers)], saved[len(ctx.quantizers) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        parts = list(
            zip(ctx.quantizers, [c.gradient(g) for c, g in zip(ctx.quantizers, grads, strict=True)], strict=True)
        )
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.quantizers, weights, scales, strict=True)
            turned = [c.weight.transposed(c.weight(w, of_w), w) for c, w, of_w in kept]  # [in, out]
            products = [fp8_matmul(dy, w, ctx.dtype) for (_, dy), w in zip(parts, turned, strict=True)]
            grad_x = sum(products[1:], products[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights, needed = [None] * len(weights), ctx.needs_input_grad[3:]
        if any(needed):
            x = ctx.quantizers[0].input.transposed(Quantized(values, scale, ctx.block))  # [in, tokens]
            for i, (c, dy) in enumerate(parts):
                if needed[i]:
                    grad_weights[i] = fp8_matmul(c.gradient.transposed(dy, grads[i]), x, ctx.grad_dtypes[i])
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights


class Fp8Linear(nn.Module):
    """`linear` with its three products in 8 bits: [..., in] to [..., out]. Its parameters are those of `linear`.

    splits: by role, over which groups the matrices of this layer are split.
    """

    def __init__(self, linear: nn.Linear, casts: Casts, splits: dict[str, tuple[Split, ...]] | None = None):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.quantizers = LayerQuantizers(casts, splits).to(linear.weight.device)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x wᵀ in 8 bits, [..., out]."""
        (x,) = as_autocast(x)
        return Fp8LinearFunction.apply(x, None, [self.quantizers], self.weight)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.product(x)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def max_over(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Each element of the tensors becomes the largest of all ranks', by one all-reduce."""
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(joined, dist.ReduceOp.MAX, group)
    for tensor, largest in zip(tensors, joined.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(largest.view_as(tensor))


def update_scales(model: nn.Module) -> None:
    """Tell all delayed scales that a step is over. Collective: one all-reduce over each group that matrices are split
    over, for all of them. In some steps the host waits for a GPU (`check_histories`).
    """
    delayed = [module for module in model.modules() if isinstance(module, DelayedQuantizer)]
    over: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for quantizer in delayed:
        for split in quantizer.splits:
            over.setdefault(split.group, []).append(quantizer.amax)
    for group, amaxes in over.items():
        max_over(amaxes, group)
    check_histories([quantizer for quantizer in delayed if quantizer.amax.is_cuda])
    for quantizer in delayed:
        quantizer.update()
        quantizer.found = None


def check_histories(quantizers: list[DelayedQuantizer]) -> None:
    """Find out, on the host, who can do without an amax of its own: what joins a history stays for `history` steps. So
    the host waits for the device once in as many steps, less one.
    """
    for quantizer in quantizers:
        quantizer.asked -= 1
    due = [quantizer for quantizer in quantizers if quantizer.asked < 0 and quantizer.cast.history > 1]
    for quantizer, newest in zip(due, torch.cat([each.amax for each in due]).tolist() if due else (), strict=True):
        quantizer.known, quantizer.asked = newest > 0, quantizer.cast.history - 2


@contextlib.contextmanager
def quantized_once(model: nn.Module) -> Iterator[None]:
    """Inside, each weight of an FP8 layer is quantized once, both ways, and kept in 2 bytes an element: for the
    micro-batches of one step. After a step of any optimizer, and where a weight changes in place, it is quantized anew.
    Afterwards nothing is kept. Under ZeRO-3 whole weights are kept so, in 8 bits, on each rank.
    """
    quantizers = [module.weight for module in model.modules() if isinstance(module, LayerQuantizers)]

    def forget(*_) -> None:
        for quantizer in quantizers:
            quantizer.kept = None

    for quantizer in quantizers:
        quantizer.keeps = True
    hook = register_optimizer_step_post_hook(forget)
    try:
        yield
    finally:
        hook.remove()
        forget()
        for quantizer in quantizers:
            quantizer.keeps = False
