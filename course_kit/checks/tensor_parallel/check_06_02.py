"""Check of exercise 06.2: values, gradients and traffic of f and f*, and gradcheck of an MLP between the two."""

from __future__ import annotations

import functools
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from course_kit.checks.tensor_parallel.cases import counted, in_case
from course_kit.checks.tensor_parallel.diary import Diary
from course_kit.checks.tensor_parallel.memory import saved_for_backward
from course_kit.labs.tensor_parallel.models import in_groups
from course_kit.ranks import shared
from course_lib.collectives.traffic import count_traffic
from course_lib.tensor_parallel import regions
from course_lib.tensor_parallel.by_hand import cut


def split_mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """silu(x · aᵀ) · bᵀ, from full a and b, of which each rank uses its local shard."""
    local_a = cut(regions.copy_to_group(a, group), group, 0)
    local_b = cut(regions.copy_to_group(b, group), group, 1)
    hidden = F.silu(F.linear(regions.copy_to_group(x, group), local_a))
    return regions.sum_over_group(F.linear(hidden, local_b), group)


def pair_trial(group: dist.ProcessGroup) -> str | None:
    """Return what is wrong with f and f*, or None."""
    rank, n, numbers = group.rank(), group.size(), torch.arange(12.0).view(3, 4)
    both = ("f", regions.copy_to_group, 0, 1), ("f*", regions.sum_over_group, 1, 0)
    for (region, function, forwards, backwards), dtype in itertools.product(both, (torch.float32, torch.bfloat16)):
        name = region
        x, given = (numbers + rank).to(dtype), torch.full((3, 4), rank + 1.0, dtype=dtype)
        if dtype == torch.bfloat16:
            x, given = (tensor.t().contiguous().t() for tensor in (x, given))
            name += ", tensors of BF16 that are not contiguous"
        copies = x.clone(), given.clone()
        x.requires_grad_()
        with in_case(name), count_traffic() as traffic:
            with Diary() as diary:
                out, held = saved_for_backward(functools.partial(function, x, group))
            bytes_sent = traffic.calls
            with Diary():
                (gradient,) = torch.autograd.grad(out, x, given)
        if held:
            return f"{name}: ctx keeps {held} bytes of tensors for backward, which needs none of them"
        if (made := sum(diary.sizes())) > forwards * x.nbytes:
            return f"{name}: forward makes tensors of {made} bytes, {forwards * x.nbytes} are enough"
        calls = bytes_sent, traffic.calls - bytes_sent
        if calls != (forwards, backwards):
            wrong = f"{name}: {counted(calls[0], 'collective')} in forward and {calls[1]} in backward"
            return f"{wrong}: it takes {forwards} and {backwards}"
        if not torch.equal(x.detach(), copies[0]) or not torch.equal(given, copies[1]):
            return f"{name}: changes a tensor that was given to it, in place"
        expected = copies[0] if forwards == 0 else (n * numbers + sum(range(n))).to(dtype)
        if out.dtype != dtype or not torch.equal(out.detach(), expected):
            return f"{name}, forward: {out.detach()[0].tolist()} in {out.dtype}, not {expected[0].tolist()} in {dtype}"
        expected = torch.full((3, 4), n * (n + 1) / 2, dtype=dtype) if forwards == 0 else copies[1]
        if not torch.equal(gradient, expected):
            return f"{name}, backward: a gradient of {gradient[0, 0]}, not {expected[0, 0]}"
        if {record.group for record in traffic.records} != {tuple(dist.get_process_group_ranks(group))}:
            return f"{name}: must reduce over `group`"
        enough = 2 * x.nbytes * (n - 1) // n
        if traffic.bytes != enough:
            return f"{name}: sends {traffic.bytes} bytes, {enough} are enough: sum in the dtype that it is given"
    return None if n > 2 else wrong_in_mlp(group)


def wrong_in_mlp(group: dist.ProcessGroup) -> str | None:
    """Return the error message of gradcheck on an MLP between f and f*, or None."""
    shapes = (2, 3), (4, 3), (3, 4)
    generator = torch.Generator().manual_seed(2)
    x, a, b = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    with in_case("gradcheck of the pair in an MLP"):
        try:
            torch.autograd.gradcheck(lambda x, a, b: split_mlp(x, a, b, group), (x, a, b))
        except GradcheckError as error:
            return f"gradcheck of the pair in an MLP: {str(error).splitlines()[0]}"
    return None


def check() -> None:
    """Judge CopyToGroup and SumOverGroup on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for n in (2, 4):
            for rank, wrong in enumerate(ranks(in_groups, n, pair_trial)):
                assert wrong is None, f"{n} ranks, rank {rank}: {wrong}"
