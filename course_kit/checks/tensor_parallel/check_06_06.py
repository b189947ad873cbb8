"""Check of exercise 06.6: project_together against one process, with copies of K/V heads, with biases, in autocast."""

from __future__ import annotations

import contextlib
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_kit.checks.tensor_parallel.cases import all_cases, counted
from course_kit.checks.tensor_parallel.diary import Diary
from course_kit.checks.tensor_parallel.memory import saved_for_backward
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of, override
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.tensor_parallel import linear
from course_lib.tensor_parallel.by_hand import cut

COPIES = {2: [(1, False), (2, True)], 4: [(1, True), (2, False)]}  # number of copies, whether there are biases

OTHERS = "three layers, of which the second has no bias and copies on all ranks, or one layer alone"
ADVICE = "Each layer has its own `replicas` and its own bias or none, and there may be any number of layers"


class RankResult(NamedTuple):
    """A rank's report on a Q and a K layer that are projected together."""

    errors: dict[str, float]
    grad_k: torch.Tensor  # of the K layer's weight
    forward: Traffic
    backward: Traffic
    members: tuple[int, ...]  # the group of copies
    kind: type  # of what is returned
    order: str  # what backward does, as text
    held: int  # bytes for backward, beside x and the parameters


class AutocastResult(NamedTuple):
    """A rank's report on two layers in autocast, one of them without a bias."""

    dtypes: set[torch.dtype]  # of the outputs
    errors: list[float]  # of the gradients
    left: float  # how far the outputs are from the bias where the layers' `matmul` makes zeros
    of_three: list[float]  # errors of three layers, one of them with copies; of one layer


def projection_trial(group: dist.ProcessGroup, copies: int, bias: bool) -> RankResult:
    """Project x by a Q layer with a head for each rank, and by a K layer whose heads have `copies`."""
    torch.manual_seed(6)
    n, rank = group.size(), group.rank()
    q, k, x = nn.Linear(8, 4 * n, bias), nn.Linear(8, 4 * n // copies, bias), torch.randn(2, 3, 8)
    grad_q, grad_k = torch.randn(2, 3, 4 * n), torch.randn(n, 2, 3, 4)  # each rank uses its K head in its own way
    replicas = linear.replicas_of(group, copies) if copies > 1 else None
    layers = [linear.ColumnParallelLinear(q, group), linear.ColumnParallelLinear(k, group, replicas)]
    local, complete = x.clone().requires_grad_(), x.clone().requires_grad_()
    with count_traffic() as forward:
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        outs, held = saved_for_backward(lambda: linear.project_together(local, layers), local, *parameters)
    with count_traffic() as backward, Diary() as diary:
        torch.autograd.backward(outs, (cut(grad_q, group, -1), grad_k[rank]))
    expected = q(complete), k(complete)
    of_heads = [grad_k[head * copies : (head + 1) * copies].sum(0) for head in range(n // copies)]
    torch.autograd.backward(expected, (grad_q, torch.cat(of_heads, dim=-1)))
    head = rank // copies
    pairs = {"q": (outs[0], cut(expected[0], group, -1)), "k": (outs[1], expected[1][..., 4 * head : 4 * head + 4])}
    pairs |= {"the gradient of x": (grad_of(local), grad_of(complete))}
    for name, layer, full, of, number in (("q", layers[0], q, n, rank), ("k", layers[1], k, n // copies, head)):
        for kind in ("weight", "bias")[: 1 + bias]:
            one_process = getattr(full, kind).grad.chunk(of)[number]
            pairs[f"the gradient of {name}'s {kind}"] = (getattr(layer, kind).grad, one_process)
    members = tuple(dist.get_process_group_ranks(replicas.copies)) if replicas else ()
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    return RankResult(
        errors, grad_of(layers[1].weight), forward, backward, members, type(outs), " ".join(diary.words()), held
    )


class Zeros:
    """A way to multiply that makes zeros."""

    @staticmethod
    def apply(x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(0 * F.linear(x, weight) for weight in weights)


def other_numbers(group: dist.ProcessGroup) -> list[float]:
    """Return errors of the outputs and of a weight's gradient: of three layers, the second with copies on all ranks; of
    one layer.
    """
    torch.manual_seed(6)
    n, rank, x = group.size(), group.rank(), torch.randn(2, 3, 8)
    fulls = [nn.Linear(8, size, bias) for size, bias in ((4 * n, True), (4, False), (2 * n, True))]
    replicas = linear.replicas_of(group, n)
    layers = [
        linear.ColumnParallelLinear(full, group, held) for full, held in zip(fulls, (None, replicas, None), strict=True)
    ]
    try:
        outs = linear.project_together(x, layers)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise AssertionError(f"{OTHERS}: {type(error).__name__}, {error}. {ADVICE}") from error
    (grad_copy,) = torch.autograd.grad(outs[1].sum() * (rank + 1), [layers[1].weight])
    (expected,) = torch.autograd.grad(fulls[1](x).sum() * (n * (n + 1) / 2), [fulls[1].weight])
    wanted = [cut(fulls[0](x), group, -1), fulls[1](x), cut(fulls[2](x), group, -1)]
    alone = linear.project_together(x, layers[2:])
    pairs = [*zip(outs, wanted, strict=True), (grad_copy, expected), *zip(alone, wanted[2:], strict=True)]
    return [relative_error(*pair) for pair in pairs]


def autocast_trial(group: dist.ProcessGroup) -> AutocastResult:
    """Project x by two layers in autocast, one of them without a bias; then with another `matmul`."""
    torch.manual_seed(6)
    wholes, local, given = (nn.Linear(8, 16, False), nn.Linear(8, 16)), torch.randn(2, 3, 8), torch.randn(2, 2, 3, 16)
    layers = [linear.ColumnParallelLinear(each, group) for each in wholes]
    complete = local.clone().requires_grad_()
    local.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        outs = linear.project_together(local, layers)
    with contextlib.suppress(RuntimeError):  # dtypes that do not fit: no gradients
        torch.autograd.backward(outs, [cut(g, group, -1).to(out.dtype) for g, out in zip(given, outs, strict=True)])
    torch.autograd.backward([full(complete) for full in wholes], list(given))
    pairs = [
        (grad_of(layer.weight), cut(grad_of(each.weight), group, 0)) for layer, each in zip(layers, wholes, strict=True)
    ]
    pairs += [
        (grad_of(local), grad_of(complete)),
        (grad_of(cast(torch.Tensor, layers[1].bias)), cut(grad_of(wholes[1].bias), group, 0)),
    ]
    for layer in layers:
        override(layer, matmul=Zeros)
    first, second = linear.project_together(local, layers)
    left = max(first.abs().max().item(), (second - cast(torch.Tensor, layers[1].bias)).abs().max().item())
    errors = [relative_error(*pair) for pair in pairs]
    return AutocastResult({out.dtype for out in outs}, errors, left, other_numbers(group))


def projections(group: dist.ProcessGroup) -> tuple[list[RankResult], AutocastResult]:
    """Return the trials of this group's numbers of copies, and that in autocast."""
    return all_cases(group, projection_trial, COPIES[group.size()]), autocast_trial(group)


def check() -> None:
    """Judge project_together on 2 and 4 ranks, with 1 and 2 copies of each K head."""
    ranks = shared(4)
    with ranks.within(20):
        for n, cases in COPIES.items():
            of_all, of_all_in_autocast = zip(*ranks(in_groups, n, projections), strict=True)
            for number, (copies, bias) in enumerate(cases):
                judge(n, copies, bias, [trials[number] for trials in of_all])
            for rank, result in enumerate(of_all_in_autocast):
                judge_in_autocast(f"{n} ranks, rank {rank}, in autocast, one layer with a bias", result)


def judge(n: int, copies: int, bias: bool, of_all: list[RankResult]) -> None:
    """Judge one case on all ranks."""
    for rank, result in enumerate(of_all):
        where = f"{n} ranks, {counted(copies, 'copy')} of a K head, rank {rank}"
        assert result.kind is tuple, f"{where}: what is returned is a {result.kind.__name__}: return a tuple"
        for name, error in result.errors.items():
            assert error < 1e-5, f"{where}: {name} is not one process's"
        first = of_all[rank // copies * copies]
        assert torch.equal(result.grad_k, first.grad_k), f"{where}: the copies' gradients differ"
        assert result.forward.calls == 0, (
            f"{where}: {counted(result.forward.calls, 'collective')} in forward: send nothing"
        )
        records = result.backward.records
        of_x = [r for r in records if len(r.group) == n and r.bytes == 2 * 48 * 4 * (n - 1) // n]
        others = [r for r in records if r not in of_x]
        assert len(of_x) >= 1, f"{where}: one all-reduce of x's gradient"
        wanted = (1 + bias) if copies > 1 else 0
        assert len(records) <= 1 + wanted, (
            f"{where}: {counted(len(records), 'collective')} in backward; {1 + wanted} would do"
        )
        assert "start matmul" in result.order, (
            f"{where}: backward does {result.order}: no matmul beside x's all-reduce; use the layers' `matmul`"
        )
        assert result.held == 0, f"{where}: {result.held} bytes are held beside x and the parameters: no copies"
        assert all(set(r.group) == set(result.members) for r in others), (
            f"{where}: K's gradient is summed over its copies alone"
        )


def judge_in_autocast(where: str, result: AutocastResult) -> None:
    """Judge the two layers in autocast on one rank."""
    assert result.dtypes == {torch.bfloat16}, (
        f"{where}: outputs are {result.dtypes}: as_autocast casts x and the weights; cast the bias to the output's"
    )
    assert max(result.errors) < 0.03, f"{where}: wrong gradients, or none: x and weights through as_autocast"
    assert max(result.of_three) < 1e-5, (
        f"{where}: {OTHERS}: wrong outputs, or a copied weight's gradient that is not summed. {ADVICE}"
    )
    assert result.left == 0, f"{where}: multiply by the layers' attribute `matmul`, whatever it is, not by a name"
