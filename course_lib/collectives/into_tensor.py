"""All-gather and reduce-scatter of one tensor, by their established names: newer versions of PyTorch call them
`all_gather_single` and `reduce_scatter_single`, older ones have only these.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group=None, async_op: bool = False):
    """Write the ranks' `input`s [k, ...], one after another, to `output` [N·k, ...]. Return a work if async_op."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input, group=group, async_op=async_op)


def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group=None, async_op: bool = False):
    """Sum `input` [N·k, ...] over the ranks, and write this rank's shard of the sum to `output` [k, ...].

    Return a work if async_op.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, input, group=group, async_op=async_op)
