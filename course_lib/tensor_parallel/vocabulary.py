"""Embedding and cross-entropy of a vocabulary of which each rank of a group has a part.

The logits [tokens, v] of a step are its largest tensor, and they are never gathered: the loss of a token is

    log sum_j exp(z_j - max z) - (z_target - max z)

and needs three numbers a token from the other ranks: the maximum, the sum, and the target's logit, which one rank has.
Backward needs none: a rank's part of softmax(z) - onehot(target) is made of its own logits and the sum. (Shoeybi et
al. 2019, Megatron-LM, §3.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.recompute.modes import IGNORED
from course_lib.tensor_parallel.regions import OnceDifferentiable, sum_over_group
from course_lib.tensor_parallel.shards import TensorShard, leaves_empty_shard, shard_parameter


def vocabulary_shard(vocab: int, group: dist.ProcessGroup, dim: int = 0) -> TensorShard:
    """This rank's tokens of a vocabulary. Raises ValueError, on all ranks, where one of them would have none."""
    if leaves_empty_shard(vocab, group.size()):
        raise ValueError(f"a vocabulary of {vocab} leaves one of {group.size()} ranks without a token")
    return TensorShard.of(vocab, group, dim)


class VocabParallelEmbedding(nn.Module):
    """`embedding` with its rows split over `group`: tokens [...] to all of the hidden states [..., h].

    Of `embedding` it takes the weight alone, no padding_idx or max_norm. A token outside of the vocabulary gives zeros.
    Raises ValueError where the vocabulary leaves a rank without a token.
    """

    def __init__(self, embedding: nn.Embedding, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.group, self.output_reduce = group or dist.group.WORLD, sum_over_group
        self.shard = vocabulary_shard(embedding.num_embeddings, self.group)
        self.weight = shard_parameter(embedding.weight, self.shard)  # [v/N, h]

    # exercise 06.7
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up tokens [...], of any number of dimensions; return the whole hidden states [..., h].

        They have the rows' dtype; a token outside of the vocabulary gives zeros. One sum over the ranks: `self.output_reduce`.
        """
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.output_reduce(found.masked_fill(elsewhere[..., None], 0.0), self.group)


def local_rows(targets: torch.Tensor, shard: TensorShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the targets [n] among this rank's tokens (0 for others), and which targets are elsewhere."""
    rows = targets - shard.start
    elsewhere = (rows < 0) | (rows >= shard.size)
    return rows.masked_fill_(elsewhere, 0), elsewhere


# exercise 06.8
class VocabParallelCrossEntropy(OnceDifferentiable):
    """Cross-entropy of logits that are split over a group by tokens of the vocabulary.

    No more than one float32 tensor of the logits' size is kept, and no second one is made. If backward changes what it
    kept, it is kept by `save_for_backward`, so that a second backward raises an error.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        """Return the loss of each token, [n], in float32, the same on all ranks. Sends three numbers a token, in two
        all-reduces.

        logits: [n, v/N], this rank's, left as they are; targets: [n], numbers of the whole vocabulary. An IGNORED
        target is on no rank: its loss is a number without a meaning, which the caller masks.
        """
        ctx.dtype = logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        grad = logits - largest[:, None]  # [n, v/N], in float32, as largest is: the one large tensor
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
        """Return the gradient of this rank's logits, in their dtype, and None for targets and shard; sends nothing.

        gradient: [n], that of the losses.
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
    """F.cross_entropy of logits that are split over `group`, in float32: a scalar, the same on all ranks.

    logits: [..., v/N], this rank's; targets: [...], numbers of the whole vocabulary, or IGNORED; vocab: its size, None
    only where the ranks divide it. reduction: "mean" over the targets that are not ignored, or "sum". Collective.

    Raises ValueError for another reduction, where `vocab` leaves a rank without a token, and where the logits are not
    this rank's part of it. A target outside of the vocabulary makes the loss and its gradients NaN.
    """
    group = group or dist.group.WORLD
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
