"""Average gradients in the two simplest ways: after backward, and by hooks while backward runs.

Both send one all-reduce per parameter, and check nothing. `replicas.DataParallel` adds buckets, accumulation that sends
once, parameters that some ranks do not use, and clear errors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from course_lib.recompute.modes import IGNORED, accumulate


# exercise 04.2
def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient of `module` by its mean over the ranks of `group` (None: all ranks).

    Sends no more than one all-reduce per gradient, in the same order on all ranks. A parameter without a gradient still
    has none afterwards.
    """
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


# exercise 04.4
def overlap_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """Average gradients over the ranks of `group` (None: all ranks) while backward runs.

    From now on every backward starts one all-reduce per gradient, as soon as that gradient is complete. Return
    `finish()`, to be called after each backward: it waits for all works of that backward, and for no older ones; then
    every gradient is the mean over the group, in its own dtype, and no work or gradient is kept. Leave frozen
    parameters, and those that backward does not reach, alone: their `.grad` must not change.
    """
    works, n = [], dist.get_world_size(group)

    def start(parameter):
        parameter.grad /= n
        works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))

    def finish():
        for work in works:
            work.wait()
        works.clear()

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(start)
    return finish


def averaged_backward(
    module: nn.Module,
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
    finish: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Run forward and backward of this rank's micro-batches, and average the gradients over all ranks.

    finish: the function that `overlap_gradients` has returned, called after each backward; without it,
    `average_gradients` runs once, after the last. Every rank must have the same number of target tokens. Returns the
    mean loss over all ranks, a scalar.
    """
    tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().clamp(min=1)
    total = torch.zeros_like(tokens, dtype=torch.float32)
    for micro_batch in micro_batches:
        total += accumulate(module, [micro_batch], dtype, tokens)
        if finish:
            finish()
    if not finish:
        average_gradients(module)
    dist.all_reduce(total)
    return total / dist.get_world_size()
