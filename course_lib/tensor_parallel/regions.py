"""The boundary between replicated work, which every rank of a group repeats, and split work.

                       forward       backward
    f   copy_to_group  nothing       all-reduce       a full tensor enters split work
    f*  sum_over_group all-reduce    nothing          summands leave it
    gather_from_group  all-gather    local shard      shards leave it, side by side

f is needed wherever a tensor that all ranks hold enters work that differs between them, weights included: the gradient
that a rank computes there is only one summand of the full gradient. (Shoeybi et al. 2019, Megatron-LM, §3.)

Random numbers follow the same boundary: outside, all ranks must draw the same numbers; inside, each its own
(`local_rng`).
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from course_lib.collectives.groups import group_or_world
from course_lib.single_gpu.placement import ShardSpec


class OnceDifferentiable(torch.autograd.Function):
    """A Function whose backward is not differentiable, because it calls what autograd does not record, such as a
    collective. With create_graph=True, a second derivative raises RuntimeError instead of being wrong.
    """

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if "backward" in vars(cls):
            cls.backward = staticmethod(raise_in_double_backward(cls.backward))


def raise_in_double_backward(backward: Callable) -> Callable:
    """Return `backward` with the effect of `once_differentiable`, also for incoming gradients that are constants (the
    gradient of a sum is one): what `backward` returns depends on the inputs of forward even then.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *gradients):
        if torch.is_grad_enabled():
            gradients = [gradient if gradient is None else gradient.detach().requires_grad_() for gradient in gradients]
            return once_differentiable(backward)(
                ctx, *gradients
            )  # wrapped here: ranks receive no torch wrapper by value
        return backward(ctx, *gradients)

    return wrapper


# exercise 06.2
class CopyToGroup(OnceDifferentiable):
    """f: return x, unchanged, in forward; in backward sum the gradients of all ranks of the group.

    The sum has the gradient's dtype. x and gradient may have any shape, need not be contiguous, and are not changed.
    Forward copies nothing, and keeps no tensor for backward.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        total = gradient.clone(memory_format=torch.contiguous_format)  # others may hold the same gradient
        dist.all_reduce(total, group=ctx.group)
        return total, None


# exercise 06.2
class SumOverGroup(OnceDifferentiable):
    """f*: sum the x of all ranks of the group in forward; in backward return the gradient, unchanged.

    The sum is a new tensor of x's dtype, the only one that forward makes, and none is kept for backward. x may have any
    shape, need not be contiguous, and is not changed.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient, None


def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return x, which is full on all ranks, for use in split work: its gradient is summed over the group."""
    return x if group.size() == 1 else CopyToGroup.apply(x, group)


def sum_over_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of all ranks' x, a new tensor (x itself in a group of one); x gets the sum's gradient."""
    return x if group.size() == 1 else SumOverGroup.apply(x, group)


class GatherFromGroup(OnceDifferentiable):
    """Gather the full tensor from all ranks' shards in forward; in backward return the local slice of the gradient."""

    @staticmethod
    def forward(ctx, local: torch.Tensor, shard: ShardSpec) -> torch.Tensor:
        ctx.shard = shard
        return shard.gather(local)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return ctx.shard.cut(gradient), None


def gather_from_group(local: torch.Tensor, shard: ShardSpec) -> torch.Tensor:
    """Return the full tensor of which `local` is this rank's `shard` (a TensorShard), for use in replicated work."""
    return GatherFromGroup.apply(local, shard)


def generators() -> list[torch.Generator]:
    """Return the generators that this process draws from by default: the CPU's, and the current GPU's if in use."""
    default = [torch.default_generator]
    if torch.cuda.is_initialized():
        default.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return default


# exercise 06.13
@contextlib.contextmanager
def local_rng(group: dist.ProcessGroup | None = None):
    """Let each rank of the group (None: all ranks) draw different random numbers in the context, and the same after it.

    All ranks enter with generators in the same state (the same seed, and the same draws since), which decides what is
    drawn inside. It is a decorator too: `attention.core = local_rng(group)(core_with_dropout)`.
    """
    group = group_or_world(group)
    states = []
    for generator in generators():
        seed = zlib.crc32(generator.get_state().numpy().tobytes(), group.rank())
        torch.empty((), device=generator.device).uniform_(generator=generator)  # the next region gets another seed
        states.append((generator, generator.get_state()))
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
