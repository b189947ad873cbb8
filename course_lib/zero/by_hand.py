"""Stage 1 by hand: one step over flat tensors, without buckets, hooks or overlap.

    gradient   [padded]    reduce-scatter, mean     [shard_numel]   this rank's shard
    values     [padded]    update, all-gather       [padded]        new on all ranks

It sends 2 (N-1)/N x padded elements, as an all-reduce of the gradient does. `ZeroOptimizer` does the same in buckets,
overlapped with backward and the next forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor
from course_lib.zero.shards import FlatLayout


# exercise 05.3
def zero_1_step(
    layout: FlatLayout,
    values: torch.Tensor,
    gradient: torch.Tensor,
    update: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Make `values` [padded] the new parameters, on all ranks of layout.group.

    gradient: [padded], this rank's. update(shard, gradient_of_shard): the optimizer, called once; it updates this
    rank's shard [shard_numel] in place with the mean gradient of the shard. Sends one reduce-scatter and one
    all-gather, in the dtypes of the buffers, and makes no other tensor of [padded].
    """
    shard = gradient.new_empty(layout.shard_numel)
    reduce_scatter_tensor(shard, gradient, group=layout.group)
    update(layout.local_shard(values), shard / layout.world_size)
    all_gather_into_tensor(values, layout.local_shard(values), group=layout.group)
