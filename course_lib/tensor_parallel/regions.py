"""The border between what every rank of a group does alike and what each does its own part of.

                       forward       backward
    f   copy_to_group  nothing       all-reduce       a whole tensor enters split work
    f*  sum_over_group all-reduce    nothing          summands leave it
    gather_from_group  all-gather    own part         parts leave it, side by side

f stands wherever a tensor that all ranks have goes into work that each does in its own way, weights included: the
gradient that a rank finds is then only a part of the whole. (Shoeybi et al. 2019, Megatron-LM, §3.)

Random numbers know the border too: outside, all ranks must draw the same ones, inside, each its own (`local_rng`).
"""

from __future__ import annotations

import contextlib
import functools
import zlib

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


class OnceDifferentiable(torch.autograd.Function):
    """A Function whose backward is not differentiable, because it calls what autograd does not record, such as a
    collective. With create_graph=True, a second derivative raises RuntimeError instead of being wrong.
    """

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if "backward" in vars(cls):
            cls.backward = staticmethod(raising_later(cls.backward))


def raising_later(backward):
    """`backward` as `once_differentiable` makes it, and for gradients that are constants too (those of a sum are): what
    it returns depends on the inputs of forward all the same.
    """

    @functools.wraps(backward)
    def marked(ctx, *gradients):
        if torch.is_grad_enabled():
            gradients = [gradient if gradient is None else gradient.detach().requires_grad_() for gradient in gradients]
            return once_differentiable(backward)(ctx, *gradients)  # made here: ranks get no wrapper of torch's by value
        return backward(ctx, *gradients)

    return marked


# exercise 06.2
class CopyToGroup(OnceDifferentiable):
    """f: return x, unchanged, in forward; in backward sum the gradients of all ranks of the group.

    The sum has the gradient's dtype. What is given may be of any shape and need not be contiguous, and stays as it is.
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

    The sum is a new tensor of x's dtype. x may be of any shape and need not be contiguous, and stays as it is.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient, None


def copy_to_group(x: torch.Tensor, group) -> torch.Tensor:
    """x, whole on all ranks, on its way into split work: its gradient is summed over the group."""
    return x if group.size() == 1 else CopyToGroup.apply(x, group)


def sum_over_group(x: torch.Tensor, group) -> torch.Tensor:
    """The sum of the ranks' x, as a new tensor (x itself in a group of one); each rank's x gets the sum's gradient."""
    return x if group.size() == 1 else SumOverGroup.apply(x, group)


class GatherFromGroup(OnceDifferentiable):
    """The whole tensor of all ranks' parts in forward; in backward each part gets its part of the gradient."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, shard) -> torch.Tensor:
        ctx.shard = shard
        return shard.gather(part)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return ctx.shard.cut(gradient), None


def gather_from_group(part: torch.Tensor, shard) -> torch.Tensor:
    """The whole tensor of which `part` is this rank's `shard` (a TensorShard), for work that all ranks do alike."""
    return GatherFromGroup.apply(part, shard)


def generators() -> list[torch.Generator]:
    """The generators that this process draws from by default: the CPU's, and the current GPU's where it is in use."""
    own = [torch.default_generator]
    if torch.cuda.is_initialized():
        own.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return own


# exercise 06.13
@contextlib.contextmanager
def local_rng(group: dist.ProcessGroup | None = None):
    """Inside, let each rank of the group (None: all ranks) draw random numbers of its own; afterwards all go on as one.

    All ranks come with generators in the same state (the same seed, and the same draws since), which decides what is
    drawn inside. Also a decorator: `attention.core = local_rng(group)(core_with_dropout)`.
    """
    group = group or dist.group.WORLD
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
