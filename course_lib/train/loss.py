"""The loss without logits, in any layout: the model's head computes it, for a chunk of rows at a time.

    parallel = parallelize(config, layout, mesh, extra=[apply_chunked_loss])

Notebook 12b's linear_cross_entropy has the idea: a row's gradient is known as soon as its logits are, so one pass over
chunks of rows makes the loss and the gradients of hidden states and weight. Here the vocabulary may be split over tp
ranks, of which each has the columns of its own words. A chunk's rows need three elements from every rank, in one
all-gather: the largest logit m, the sum s of exp(logit - m), and the target's logit. With M the largest m:

    S = sum over the ranks of s exp(m - M)       loss = log S + M - target's logit       softmax = exp(logit - M) / S

The head is called with the targets, inside the model's forward: ZeRO-3 frees its weight afterward. From forward to
backward a micro-batch keeps the two gradients, t·h·e and 4·v/tp·h bytes (t tokens, e bytes per element), in place of
logits, t·v/tp·(4 + e). In a pipeline, a schedule whose last stage has several micro-batches in flight (afab) keeps that
many gradients of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course_lib.collectives.into_tensor import all_gather_into_tensor
from course_lib.recompute.modes import IGNORED
from course_lib.sequence_parallel.model import gather_sequence
from course_lib.single_gpu.model import Transformer, need_transformer
from course_lib.tensor_parallel.linear import ColumnParallelLinear, as_autocast
from course_lib.tensor_parallel.regions import OnceDifferentiable, copy_to_group
from course_lib.tensor_parallel.shards import TensorShard
from course_lib.tensor_parallel.vocabulary import local_rows


def chunk_rows(tokens: int, hidden: int, vocab: int) -> int:
    """Return the rows of a chunk, at most `tokens`: it has as many logits as there are elements of all hidden states,
    or half as many as the weight has, whichever is more. vocab: this rank's. (See kernels.fused_loss.chunk_size.)
    """
    return max(1, min(tokens, max(tokens * hidden // vocab, hidden // 2)))


def loss_and_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard | None, gradient: bool
) -> torch.Tensor:
    """Return the losses of rows [c], 0 for IGNORED targets; with `gradient`, overwrite the logits with the gradient of
    the losses' sum. Collective over the shard's group.

    logits: [c, v/N], float32; targets: [c]; shard: this rank's words, None if it has all.
    """
    counted = targets != IGNORED
    rows, elsewhere = local_rows(targets, shard or TensorShard(None, 0, logits.shape[1], 0, logits.shape[1]))  # type: ignore[arg-type]
    largest = logits.amax(1)
    logits.sub_(largest[:, None])
    of_target = logits.gather(1, rows[:, None])[:, 0]
    total = logits.exp_().sum(1)
    scale = 1 / total
    if shard is not None:
        local = torch.stack([largest, total, (of_target + largest).masked_fill_(elsewhere, 0.0)])
        gathered = local.new_empty(shard.group.size(), *local.shape)  # [N, 3, c]
        all_gather_into_tensor(gathered.flatten(0, 1), local, group=shard.group)
        highest, totals, of_targets = gathered.unbind(1)  # [N, c] each
        top = highest.amax(0)
        total, of_target = (totals * (highest - top).exp()).sum(0), of_targets.sum(0) - top
        scale = (largest - top).exp() / total
    if gradient:  # softmax, and 1 less at the target
        logits.mul_((scale * counted)[:, None])
        logits.scatter_add_(1, rows[:, None], -(counted & ~elsewhere).to(logits.dtype)[:, None])
    return (total.log() - of_target).masked_fill_(~counted, 0.0)


class ChunkedCrossEntropy(OnceDifferentiable):
    """The summed cross-entropy of hidden · weightᵀ, with the vocabulary split over a group or not; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        shard: TensorShard | None,
        needed: tuple[bool, bool],
    ) -> torch.Tensor:
        """Return the sum of the losses, a float32 scalar, the same on all ranks of the shard's group.

        hidden: [t, h], the same on these ranks; weight: [v/N, h], of one dtype; targets: [t]; needed: whether hidden
        and weight need gradients.
        """
        (tokens, width), words = hidden.shape, len(weight)
        largest = words if shard is None else -(-shard.full_size // shard.group.size())  # the same on all ranks
        rows = chunk_rows(tokens, width, largest)
        buffer = hidden.new_empty(min(rows, tokens), words)  # one for all chunks
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if needed[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        for start in range(0, tokens, rows):
            chunk = slice(start, start + rows)
            x = hidden[chunk]
            logits = torch.mm(x, weight.t(), out=buffer[: len(x)]).float()
            loss += loss_and_gradient_(logits, targets[chunk], shard, any(needed)).sum()
            grad_logits = logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_matmul(grad_weight, grad_logits.t(), x)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Scale the gradients in place: a second backward raises an error. hidden's is this rank's summand of it."""
        grad_hidden, grad_weight = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            grad_hidden.mul_(gradient)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_weight.mul_(gradient).to(ctx.dtype)
        wanted = ctx.needs_input_grad
        return grad_hidden if wanted[0] else None, grad_weight if wanted[1] else None, None, None, None


def add_matmul(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to total [m, n], float32, in place. a: [m, k], b: [k, n], of one dtype."""
    if a.dtype != total.dtype and total.is_cuda:  # tensor cores add in float32: so does the sum over chunks
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def has_kernel(device: torch.device) -> bool:
    """Return True for a device on which Triton is not interpreted."""
    return device.type == "cuda"


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shard: TensorShard | None = None
) -> torch.Tensor:
    """Return the sum of the cross-entropies of hidden · weightᵀ, a float32 scalar, without storing all logits.

    hidden: [..., h], the same on all ranks of the shard's group, its gradient a summand (copy_to_group); weight:
    [v/N, h], or [v, h] without a shard; targets: [...], words of the full vocabulary, or IGNORED. An unsplit weight on
    CUDA is multiplied by kernels.fused_loss.linear_cross_entropy. A target outside the vocabulary makes the loss and
    the gradients NaN. A second backward of the loss raises RuntimeError. Collective with a shard.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if shard is None and has_kernel(hidden.device):
        from course_lib.kernels.fused_loss import linear_cross_entropy  # it imports Triton

        return linear_cross_entropy(hidden, weight, targets, IGNORED, reduction="sum")
    hidden, weight = as_autocast(hidden, weight)
    needed = tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in (hidden, weight))
    vocab = shard.full_size if shard else len(weight)
    outside = ((targets != IGNORED) & ((targets < 0) | (targets >= vocab))).any()
    return ChunkedCrossEntropy.apply(hidden, weight, targets, shard, needed) * torch.where(outside, torch.nan, 1.0)


class LossLinear(nn.Linear):
    """A head that returns the summed loss if it gets targets, else the logits."""

    takes_targets = True

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """x: [b, s, h]; targets: [b, s]."""
        return super().forward(x) if targets is None else chunked_cross_entropy(x, self.weight, targets)


class LossColumnParallelLinear(ColumnParallelLinear):
    """A split head that returns the summed loss if it gets targets, else the local logits.

    input_gather(x, group): the boundary before the head, which sums the gradients of x over the group.
    """

    takes_targets = True
    input_gather: Callable[..., torch.Tensor]

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """x: [b, s, h], or [b, s/N, h] with sequence parallelism; targets: [b, s], of all tokens."""
        if targets is None:
            return super().forward(x)
        return chunked_cross_entropy(self.input_gather(x, self.group), self.weight, targets, self.shard)


def keep_targets(hook: Callable) -> Callable:
    """Return a forward pre-hook of a `Transformer` that lets `hook` see, and perhaps change, x and positions alone."""

    def with_targets(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        changed = hook(model, args[:2], kwargs)
        first, kwargs = (args[:2], kwargs) if changed is None else changed
        return (*first, *args[2:]), kwargs

    return with_targets


def apply_chunked_loss(model: nn.Module) -> nn.Module:
    """Let a `Transformer` return the summed loss if it gets targets, model(x, positions, targets), in place; return the
    model.

    It comes after all transforms that split the model, and before split_stages: PipelineRunner passes the targets to
    its last stage. The model may be on the meta device. Weights, their names and placements do not change. Raises
    ValueError, and changes nothing, for a head that is replaced, has a bias, or gathers its logits.
    """
    need_transformer(model, "apply_chunked_loss", "chunked_cross_entropy(hidden, weight, targets) works with any head")
    assert isinstance(model, Transformer)
    head: Any = model.head
    classes = {nn.Linear: LossLinear, ColumnParallelLinear: LossColumnParallelLinear}
    if type(head) not in classes or head.bias is not None or getattr(head, "gather_output", False):
        raise ValueError(f"the head is {type(head).__name__}: it must be linear, without a bias or gathered logits")
    if model.applied.get("tensor_parallel"):
        head.input_gather = gather_sequence if "sequence_parallel" in model.applied else copy_to_group
    head.__class__ = classes[type(head)]
    hooks = model._forward_pre_hooks
    for key in model._forward_pre_hooks_with_kwargs:  # of sequence and context parallelism
        hooks[key] = keep_targets(hooks[key])
    return model
