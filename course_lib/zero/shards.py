"""Shards: tensors laid end to end in a flat buffer, of which each of N ranks owns an equal shard.

    full buffer    | weight 0           | bias | weight 1                     | pad |
    owned by       | rank 0       | rank 1       | rank 2       | rank 3            |

Reduce-scatter and all-gather need equal shards, so the buffer is padded to a multiple of N, and the padding belongs to
the last ranks. A shard takes no notice of where a tensor begins or ends: a rank owns parts of several, or none of one.
(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC, §5.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor
from course_lib.single_gpu.clipping import clip_factor
from course_lib.single_gpu.placement import placement_of

ALIGNED = 8  # elements of BF16 that links and kernels move at a time, 16 bytes


class FlatLayout:
    """The layout of `tensors` end to end in a flat buffer, of which this rank of `group` owns a shard.

    numel: elements of all tensors; shard_numel: elements of each rank's shard, a multiple of `align`; padded: elements
    of the full buffer. starts: the offset of each tensor in the buffer. strides: a tensor keeps its order of elements
    in memory, which need not be row by row (channels_last).
    """

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, align: int = 1):
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [torch.empty_like(tensor, device="meta").stride() for tensor in tensors]  # dense
        *self.starts, self.numel = itertools.accumulate((tensor.numel() for tensor in tensors), initial=0)
        self.shard_numel = -(-self.numel // (self.world_size * align)) * align
        self.padded = self.shard_numel * self.world_size

    # exercise 05.2
    def span(self, i: int) -> tuple[int, int]:
        """Return the first and the last (exclusive) element of tensor i that this rank owns; twice the same number if
        it owns none.
        """
        first, numel = self.rank * self.shard_numel - self.starts[i], self.shapes[i].numel()
        return min(max(first, 0), numel), min(max(first + self.shard_numel, 0), numel)

    def local_shard(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard [shard_numel] of a full buffer [padded], as a view."""
        return buffer.narrow(0, self.rank * self.shard_numel, self.shard_numel)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return all tensors, in their shapes, as views of a full buffer [padded]."""
        layouts = zip(self.starts, self.shapes, self.strides, strict=True)
        return [buffer[start:].as_strided(shape, strides) for start, shape, strides in layouts]

    def local_views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return, per tensor, the elements [elements] that this rank owns, as views of its shard [shard_numel]."""
        views = []
        for i, start in enumerate(self.starts):
            first, last = self.span(i)
            offset = start + first - self.rank * self.shard_numel if first < last else 0
            views.append(shard.narrow(0, offset, last - first))
        return views

    def shard_of(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return this rank's shard [shard_numel] of full tensors, with zeros in the place of None."""
        shard = next(tensor for tensor in tensors if tensor is not None).new_zeros(self.shard_numel)
        for i, (local, tensor) in enumerate(zip(self.local_views(shard), tensors, strict=True)):
            if tensor is not None:
                local.copy_(self.local_elements(i, tensor))
        return shard

    def local_elements(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements [elements] of tensor i that this rank owns, with the values of `tensor`."""
        laid_out = torch.empty_strided(self.shapes[i], self.strides[i], dtype=tensor.dtype, device=tensor.device)
        first, last = self.span(i)
        return laid_out.copy_(tensor).as_strided((self.shapes[i].numel(),), (1,))[first:last]

    def gather(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return all tensors, unsharded, given the shard [shard_numel] of each rank. Collective."""
        buffer = shard.new_empty(self.padded)
        all_gather_into_tensor(buffer, shard, group=self.group)
        return self.views(buffer)


# exercise 05.4
def global_norm(gradients: list[tuple[torch.Tensor, dist.ProcessGroup | None]]) -> torch.Tensor:
    """Return the norm of one long vector whose shards are on many ranks, a float32 scalar.

    gradients: this rank's shards, each with the group whose ranks' squares are added up (see norm_group); None: this
    rank has the full gradient. Two ranks get the same norm if their groups are the same. Sends one float32 number per
    group, in the order of their first shards; reads no value on the host, and makes no tensor as large as all of them.
    """
    shards: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    for gradient, group in gradients:
        shards.setdefault(group, []).append(gradient)
    squares = []
    for group, local in shards.items():
        norms = torch._foreach_norm(local, dtype=torch.float32)  # few kernel launches for all
        squares.append(torch.stack(norms).square().sum())
        if group is not None:
            dist.all_reduce(squares[-1], group=group)
    return sum(squares[1:], squares[0]).sqrt()


def divide_factors(dtype: torch.dtype, gradient_divide_factor: float) -> tuple[float, float]:
    """Return the factors of gradients before and after their sum over N ranks; together they make
    `gradient_divide_factor`, 1 / N.

    dtype: the sum's dtype. The division costs least after a reduce-scatter, when a rank has only 1 / N of the elements.
    float16 is divided before: it ends at 65,504, a loss scale brings gradients close to that, and a sum of quotients
    overflows only where the mean does. (FSDP2 divides float16 before and after, by about the root of N each.)
    """
    return (gradient_divide_factor, 1.0) if dtype == torch.float16 else (1.0, gradient_divide_factor)


class GradientBuffer:
    """Full gradients of `parameters` in a flat buffer, before the reduce-scatter to the ranks that own them.

    views: by parameter, its gradient in the buffer; stored: the parameters whose gradient is in the buffer.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: FlatLayout):
        self.parameters, self.layout = parameters, layout
        self.attach(None)

    def attach(self, buffer: torch.Tensor | None) -> None:
        """Store gradients in `buffer` [padded or more] from now on; None: without a buffer, and without its memory."""
        self.buffer = buffer
        views = [] if buffer is None else self.layout.views(buffer)
        self.views = dict(zip(self.parameters, views, strict=False))
        self.stored: set[nn.Parameter] = set()

    # exercise 05.6
    def store(self, parameter: nn.Parameter) -> None:
        """Move `parameter.grad` to its view, or add it to the gradient stored there; `.grad` is None afterwards."""
        assert parameter.grad is not None
        if parameter in self.stored:
            self.views[parameter].add_(parameter.grad)
        else:
            self.views[parameter].copy_(parameter.grad)
        self.stored.add(parameter)
        parameter.grad = None

    def fill_missing(self) -> None:
        """Store -0.0 for each parameter without a gradient, for `is_unused`. -0.0 plus -0.0 is -0.0, and -0.0 plus any
        other number, +0.0 included, is that number. A factor above 0 keeps the sign. So a sum over the ranks is -0.0 in
        all elements if no rank has a gradient, and no other message has to say so.
        """
        for parameter, view in self.views.items():
            if parameter not in self.stored:
                view.fill_(-0.0)
                self.stored.add(parameter)

    # exercise 05.6
    def send(self, shard: torch.Tensor) -> dist.Work:
        """Start the reduce-scatter, and return its work: `shard` [shard_numel] gets the sum over the ranks of this
        rank's shard. Zeros take the place of gradients that are not stored, and fill the padding.
        """
        assert self.buffer is not None, "attach() a buffer first"
        if len(self.stored) < len(self.parameters):
            for parameter, view in self.views.items():
                if parameter not in self.stored:
                    view.zero_()
        full = self.buffer[: self.layout.padded]
        full[self.layout.numel :].zero_()
        return reduce_scatter_tensor(shard, full, group=self.layout.group, async_op=True)


def is_unused(gradient: torch.Tensor) -> torch.Tensor:
    """Return a bool scalar: True if no rank had a gradient to add to this sum over the ranks (see `fill_missing`).

    A gradient that is exactly -0.0 in all elements counts as none. Backward's sums over tokens start at +0.0, so a
    parameter that has been used without effect has a gradient of +0.0.
    """
    return ((gradient == 0) & gradient.signbit()).all()


def norm_group(
    group: dist.ProcessGroup, over: dist.ProcessGroup, outer: tuple[dist.ProcessGroup, ...] = ()
) -> dist.ProcessGroup:
    """Return the group over which squares are summed for the norm of a tensor sharded over `over`, in data parallelism
    over `group`.

    It is `group` if that contains `over`: its other ranks have a different tensor, which counts too. It is `over` if
    the tensor has `outer` groups, over which the rest is summed.
    """
    members = set(dist.get_process_group_ranks(group))
    return group if not outer and members >= set(dist.get_process_group_ranks(over)) else over


def nested_norm(gradients: list[tuple[torch.Tensor, tuple[dist.ProcessGroup, ...]]]) -> torch.Tensor:
    """Return `global_norm` of gradients that may be split more than once (by tensor parallelism, then by ZeRO): each
    with the groups of its splits, the last split first.
    """
    by_outer: dict[tuple[dist.ProcessGroup, ...], list[tuple[torch.Tensor, dist.ProcessGroup | None]]] = {}
    for gradient, groups in gradients:
        by_outer.setdefault(groups[1:], []).append((gradient, groups[0] if groups else None))
    norms = [(global_norm(each), outer) for outer, each in by_outer.items()]  # the norm of norms is the norm of all
    return nested_norm(norms) if any(outer for _, outer in norms) else norms[0][0]


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip as torch.nn.utils.clip_grad_norm_ does, by the norm over the shards of all ranks. Return that norm.

    The `norm_groups` of a parameter's placement are the groups over which squares are summed; a parameter without any
    counts once.
    """
    parameters = list(parameters)
    gradients = [p.new_zeros(0) if p.grad is None else p.grad for p in parameters]  # a rank may own no element
    norm = nested_norm([(g, placement_of(p).norm_groups) for g, p in zip(gradients, parameters, strict=True)])
    factor = clip_factor(norm, max_norm)
    torch._foreach_mul_(gradients, factor)  # one kernel launch, not one per gradient
    return norm
