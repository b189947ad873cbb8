"""All-gather and reduce-scatter of one tensor, by the names that everybody knows: newer versions of PyTorch call them
`all_gather_single` and `reduce_scatter_single`, older ones know these alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group=None, async_op: bool = False):
    """The ranks' `input`s [k, ...], one after another, in `output` [N·k, ...]; with async_op a work to wait for."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input, group=group, async_op=async_op)


def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group=None, async_op: bool = False):
    """The sum over the ranks of this rank's piece of `input` [N·k, ...], in `output` [k, ...]; as above."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, input, group=group, async_op=async_op)
