"""Full recomputation with checkpoints partitioned over a tensor-parallel group (ZeRO-R's P_a).

Without it every rank of the group keeps the same input of each layer: 2 sbh bytes in 16 bits. With it a rank keeps
2 sbh / N, and an all-gather precedes the recomputation of each layer. It sends (N-1)/N sbh elements, and each of the
layer's all-reduces sends 2 (N-1)/N sbh: two in forward, two in backward, and one in the recomputation (the second is
skipped, because nothing after it is needed; row layers in chunks do it all the same). That is a tenth more traffic.
(Rajbhandari et al. 2020, ZeRO, §6.1, §8.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from course_lib.collectives.groups import group_or_world
from course_lib.recompute.modes import Recomputed, apply_recompute
from course_lib.single_gpu.model import Transformer, need_transformer
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(Recomputed):
    """A function that is recomputed in backward, from arguments that are partitioned over `group`."""

    def __init__(self, function: Callable, group: dist.ProcessGroup):
        super().__init__(function)
        self.group = group

    def __call__(self, *arguments):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return super().__call__(*arguments)

    # exercise 06.14
    def pack(self, tensor: torch.Tensor):
        """Return the data to save for an argument; sends nothing.

        For a tensor that requires a gradient: a detached copy of this rank's shard of the flattened tensor, and what
        `unpack` needs. Any other tensor is returned as it is.
        """
        if not tensor.requires_grad or not tensor.numel():  # PyTorch 2.11 keeps an empty one, too
            return tensor
        shard = TensorShard.of(tensor.numel(), self.group)
        return shard, shard.cut(tensor.detach().flatten()).clone(), tensor.shape

    # exercise 06.14
    def unpack(self, packed) -> torch.Tensor:
        """Return the argument, in its shape and dtype, from what `pack` returned. Collective: one all-gather."""
        if torch.is_tensor(packed):
            return packed
        shard, local, shape = packed
        return shard.gather(local).view(shape)


def apply_partitioned_recompute(model: Transformer, group: dist.ProcessGroup | None = None) -> Transformer:
    """Recompute each of `model.blocks` from an input that is partitioned over `group`, on whose ranks it is the same.

    It replaces an earlier mode of recompute.apply_recompute, which also undoes it. Returns the model. Raises
    ValueError for a sequence-parallel model (notebook 07), whose hidden states differ between the ranks.
    """
    need_transformer(model, "apply_partitioned_recompute", "apply_recompute takes an nn.ModuleList of any model")
    if "sequence_parallel" in model.applied:
        raise ValueError("the model is sequence parallel: its hidden states are split over the ranks already")
    apply_recompute(model, "none")
    for block in model.blocks:
        block.forward = PartitionedCheckpoint(block.forward, group_or_world(group))  # type: ignore[method-assign]
    return model
