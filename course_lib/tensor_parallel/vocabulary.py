"""Embedding and cross-entropy over a vocabulary that is split over a group.

The logits [tokens, v] are the largest tensor of a step, and they are never gathered: the loss of a token is

    log sum_j exp(z_j - max z) - (z_target - max z)

and needs three elements per token from the other ranks: the maximum, the sum, and the target's logit, which one rank
has. Backward needs none: a rank computes its columns of softmax(z) - onehot(target) from its local logits and the sum.
(Shoeybi et al. 2019, Megatron-LM, §3.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.collectives.groups import group_or_world
from course_lib.recompute.modes import IGNORED
from course_lib.single_gpu.model import Layer
from course_lib.tensor_parallel.linear import OutputReduce
from course_lib.tensor_parallel.regions import OnceDifferentiable, sum_over_group
from course_lib.tensor_parallel.shards import TensorShard, leaves_empty_shard, shard_parameter


def vocabulary_shard(vocab: int, group: dist.ProcessGroup, dim: int = 0) -> TensorShard:
    """Return this rank's shard of a vocabulary. Raises ValueError, on all ranks, if a shard would be empty."""
    if leaves_empty_shard(vocab, group.size()):
        raise ValueError(f"a vocabulary of {vocab} leaves one of {group.size()} ranks without a token")
    return TensorShard.of(vocab, group, dim)


class VocabParallelEmbedding(nn.Module):
    """`embedding` with its rows split over `group`: tokens [...] to full hidden states [..., h].

    It takes only the weight of `embedding`, not padding_idx or max_norm. A token outside the vocabulary gives zeros.
    output_reduce(out, group) sums over the ranks, as in RowParallelLinear. Raises ValueError if the vocabulary leaves a
    rank without a token.
    """

    def __init__(self, embedding: Layer, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.group = group_or_world(group)
        self.output_reduce: OutputReduce = sum_over_group
        self.shard = vocabulary_shard(len(embedding.weight), self.group)
        self.weight: torch.Tensor = shard_parameter(embedding.weight, self.shard)  # [v/N, h]

    # exercise 06.7
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up tokens [...], of any number of dimensions; return full hidden states [..., h].

        They have the rows' dtype; a token outside the vocabulary gives zeros. One sum over the ranks:
        `self.output_reduce`.
        """
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        hidden = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.output_reduce(hidden.masked_fill(elsewhere[..., None], 0.0), self.group)


def local_rows(targets: torch.Tensor, shard: TensorShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's row in this rank's shard [n] (0 if it is on another rank), and a mask of those elsewhere."""
    rows = targets - shard.start
    elsewhere = (rows < 0) | (rows >= shard.size)
    return rows.masked_fill_(elsewhere, 0), elsewhere


# exercise 06.8
class VocabParallelCrossEntropy(OnceDifferentiable):
    """Cross-entropy of logits that are split over a group along the vocabulary.

    It keeps one float32 tensor of the logits' size, and creates no second one. If backward changes that tensor, it is
    saved by `save_for_backward`, so that a second backward raises an error.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        """Return the loss of each token, [n], in float32, the same on all ranks. Sends three elements per token, in two
        all-reduces.

        logits: [n, v/N], local, not changed; targets: [n], token ids of the full vocabulary. An IGNORED target is on no
        rank: its loss is meaningless, and the caller masks it.
        """
        ctx.dtype = logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        grad = logits - largest[:, None]  # [n, v/N] in float32, as `largest` is: the only large tensor
        rows, elsewhere = local_rows(targets, shard)
        of_target = grad.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        grad.exp_()
        sums = torch.stack([grad.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        total, of_target = sums
        if ctx.needs_input_grad[0]:  # softmax, and 1 less at the target
            grad.div_(total[:, None]).scatter_add_(1, rows[:, None], (elsewhere.to(grad.dtype) - 1)[:, None])
            ctx.save_for_backward(grad)
        return total.log() - of_target

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        """Return the gradient of the local logits, in their dtype, and None for targets and shard; sends nothing.

        gradient: [n], of the losses.
        """
        (grad,) = ctx.saved_tensors
        return grad.mul_(gradient[:, None]).to(ctx.dtype), None, None  # in place: a second backward raises an error


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    vocab: int | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return F.cross_entropy of logits that are split over `group`, in float32: a scalar, the same on all ranks.

    logits: [..., v/N], local; targets: [...], token ids of the full vocabulary, or IGNORED; vocab: its size, may be
    None only if the ranks divide it. reduction: "mean" over the targets that are not ignored, or "sum". Collective.

    Raises ValueError for another reduction, if `vocab` leaves a rank without a token, and if the logits are not this
    rank's shard of it. A target outside the vocabulary makes the loss and its gradients NaN.
    """
    group = group_or_world(group)
    shard = vocabulary_shard(vocab or logits.shape[-1] * group.size(), group, -1)
    if logits.shape[-1] != shard.size:
        raise ValueError(
            f"{logits.shape[-1]} logits, but this rank's shard of {shard.full_size} tokens has {shard.size}"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction {reduction!r}: it is mean or sum")
    targets = targets.flatten()
    trained = targets != IGNORED
    losses = VocabParallelCrossEntropy.apply(logits.flatten(0, -2), targets, shard)
    outside = (trained & ((targets < 0) | (targets >= shard.full_size))).any()
    summed = losses.masked_fill(~trained, 0.0).sum() * torch.where(outside, torch.nan, 1.0)
    return summed if reduction == "sum" else summed / trained.sum()
