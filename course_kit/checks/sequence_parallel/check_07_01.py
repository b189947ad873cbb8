"""Check of exercise 07.1: results, gradients and traffic of g and g*, and gradcheck of an MLP between them."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_kit.checks.sequence_parallel.cases import Case, results_of, retained_tensors
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.ranks import shared
from course_lib.collectives.traffic import count_traffic
from course_lib.sequence_parallel import model as sequence
from course_lib.tensor_parallel.by_hand import cut
from course_lib.tensor_parallel.regions import copy_to_group, gather_from_group
from course_lib.tensor_parallel.shards import TensorShard


def gates_trial(group: dist.ProcessGroup, dtype: torch.dtype = torch.float32) -> str | None:
    """Return what is wrong with g and g*, or None."""
    most = 1e-6 if dtype == torch.float32 else 0.02
    n, rank, generator = group.size(), group.rank(), torch.Generator().manual_seed(1)
    full = torch.randn(n, 2, 8, 3, generator=generator).to(dtype)  # a summand for each rank
    given = torch.randn(n, 2, 8, 3, generator=generator).to(dtype)  # and the gradient that each rank finds
    local, local_given = cut(full[0], group, 1), cut(given[0], group, 1)
    gather = "g", sequence.gather_sequence, local, full[0], given[rank], cut(given.sum(0), group, 1)
    total = cut(full.sum(0), group, 1)
    scatter = "g*", sequence.reduce_scatter_sequence, full[rank], total, local_given, given[0]
    for name, function, value, expected, gradient, expected_gradient in (gather, scatter):
        x, copies = value.clone().requires_grad_(), (value.clone(), gradient.clone())
        with count_traffic() as forward:
            out = function(x, group)
        if out.shape != expected.shape:
            return f"{name}, forward: {list(out.shape)} instead of {list(expected.shape)}; over this group?"
        if retained := retained_tensors(out):
            return f"{name} keeps {retained} tensor{'s' * (retained > 1)} for backward: the group is enough"
        with count_traffic() as backward:
            (result,) = torch.autograd.grad(out, x, gradient)
        if out.dtype != dtype:
            return f"{name}, forward: {out.dtype} instead of {dtype}"
        if relative_error(out.float(), expected.float()) > most:
            advice = "all tokens of the group, in order" if name == "g" else "the group's sum, of the local tokens"
            return f"{name}, forward: the values are wrong: {advice}"
        if not torch.equal(x, copies[0]) or not torch.equal(gradient, copies[1]):
            return f"{name} changes a tensor that was given to it"
        if relative_error(result.float(), expected_gradient.float()) > most:
            advice = (
                "the sum over the ranks, of the local tokens" if name == "g" else "the gradients of all ranks, in order"
            )
            return f"{name}, backward: x's gradient is wrong: {advice}"
        wanted = ["all_gather", "reduce_scatter"] if name == "g" else ["reduce_scatter", "all_gather"]
        for traffic, collective, word in zip((forward, backward), wanted, ("forward", "backward"), strict=True):
            enough = 2 * 8 * 3 * dtype.itemsize * (n - 1) // n
            if {r.collective for r in traffic.records} != {collective} or traffic.bytes != enough:
                bytes_sent = ", ".join(f"{r.collective} of {r.bytes} bytes" for r in traffic.records) or "nothing"
                return f"{name}, {word}, {dtype}: sends {bytes_sent}; one {collective} of {enough} bytes is wanted"
    return None


def gates_gradcheck(group: dist.ProcessGroup) -> str | None:
    """Return the error message of gradcheck on an MLP between g and g*, or None."""
    generator = torch.Generator().manual_seed(2)
    x, a, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((1, 4, 3), (4, 3), (3, 4)))
    local_a, local_b, shard = cut(a, group, 0), cut(b, group, 1), TensorShard.of(4, group, 1)

    def mlp(x):  # x and the result are full on every rank; between f and gather_from_group each has its own tokens
        hidden = sequence.gather_sequence(shard.cut(copy_to_group(x, group)), group)
        out = sequence.reduce_scatter_sequence(F.linear(F.silu(F.linear(hidden, local_a)), local_b), group)
        return gather_from_group(out, shard)

    try:
        torch.autograd.gradcheck(mlp, (x.requires_grad_(),))
    except Exception as error:
        return f"gradcheck of an MLP between g and g*: {str(error).splitlines()[0]}"
    return None


def check() -> None:
    """Judge GatherSequence and ReduceScatterSequence on 2 and 4 ranks."""
    calls: tuple[list[Case], list[Case]] = (
        [(2, gates_trial)],
        [(4, gates_trial), (2, gates_gradcheck), (2, gates_trial, torch.bfloat16)],
    )
    with shared(4).within(20):
        for (n, *_), report in zip(itertools.chain(*calls), results_of(*calls), strict=True):
            for rank, wrong in enumerate(report):
                assert wrong is None, f"{n} ranks, rank {rank}: {wrong}"
