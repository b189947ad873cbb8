"""Full recomputation whose checkpoints are shared out over a tensor-parallel group (ZeRO-R's P_a).

Without it every rank of the group keeps the same input of each layer: 2 sbh bytes in 16 bits. With it 2 sbh / N, and an
all-gather of them before each layer is run again: it sends (N-1)/N sbh numbers, where the layer's all-reduces send
2 (N-1)/N sbh each: two in forward, two in backward, and one when the layer is run again (the second is not needed:
nothing after it is kept; with row layers in chunks it is made all the same). A tenth more traffic. (Rajbhandari et al.
2020, ZeRO, §6.1, §8.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_lib.recompute.modes import Recomputed, apply_recompute
from course_lib.single_gpu.model import need_transformer
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(Recomputed):
    """A function that is run again in backward, from arguments of which each rank of `group` keeps a part."""

    def __init__(self, function, group: dist.ProcessGroup):
        super().__init__(function)
        self.group = group

    def __call__(self, *arguments):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return super().__call__(*arguments)

    # exercise 06.14
    def pack(self, tensor: torch.Tensor):
        """Return what is kept of an argument; sends nothing.

        Of a tensor that requires a gradient: a detached copy of this rank's part of it, laid flat, and what `unpack`
        needs. Any other tensor is returned as it is.
        """
        if not tensor.requires_grad or not tensor.numel():  # PyTorch 2.11 keeps an empty one, too
            return tensor
        shard = TensorShard.of(tensor.numel(), self.group)
        return shard, shard.cut(tensor.detach().flatten()).clone(), tensor.shape

    # exercise 06.14
    def unpack(self, kept) -> torch.Tensor:
        """Return the argument, in its shape and dtype, from what `pack` returned. Collective: one all-gather."""
        if torch.is_tensor(kept):
            return kept
        shard, part, shape = kept
        return shard.gather(part).view(shape)


def apply_partitioned_recompute(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Recompute each of `model.blocks` from an input that is shared out over `group`, whose ranks all have the same.

    Replaces an earlier mode of recompute.apply_recompute, which undoes it. Returns the model. Raises ValueError for a
    model that is sequence parallel (notebook 07): there each rank has other hidden states, a part of all, already.
    """
    need_transformer(model, "apply_partitioned_recompute", "apply_recompute takes an nn.ModuleList of any model")
    leaving = {module.output_reduce.__name__ for module in model.modules() if hasattr(module, "output_reduce")}
    if leaving - {"sum_over_group"}:
        raise ValueError("the model is sequence parallel: its hidden states are split over the ranks already")
    apply_recompute(model, "none")
    for block in model.blocks:
        block.forward = PartitionedCheckpoint(block.forward, group or dist.group.WORLD)
    return model
