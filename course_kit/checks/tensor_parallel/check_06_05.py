"""Check of exercise 06.5: a row layer against one process, its traffic and saved bytes, and the place of its bias."""

from __future__ import annotations

import copy
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.tensor_parallel.cases import all_cases, counted
from course_kit.checks.tensor_parallel.memory import retained_by, saved_as_attributes, saved_for_backward
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of, override
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.tensor_parallel import linear
from course_lib.tensor_parallel.by_hand import cut


class RankResult(NamedTuple):
    """A rank's report on a row layer."""

    errors: dict[str, float]
    forward: Traffic
    backward: Traffic
    retained: int  # bytes
    dtypes: set[torch.dtype]  # under autocast, of the output and of what f* gets
    left: float  # how far the output is from the bias where f* makes zeros
    is_inside: bool  # f* gets the bias
    held: int  # bytes for backward, or on the layer, beside x and the parameters


def row_trial(group: dist.ProcessGroup, bias: bool) -> RankResult:
    """Run a row layer of 24 inputs and 10 outputs, and one process's."""
    torch.manual_seed(5)
    full_layer, x, given = nn.Linear(24, 10, bias), torch.randn(2, 3, 24), torch.randn(2, 3, 10)
    layer, retained = retained_by(lambda: linear.RowParallelLinear(copy.deepcopy(full_layer), group))
    full, local = x.clone().requires_grad_(), cut(x, group, -1).clone().requires_grad_()
    with count_traffic() as forward:
        out, held = saved_for_backward(lambda: layer(local), local, *layer.parameters())
    held += saved_as_attributes(layer)
    with count_traffic() as backward:
        out.backward(given)
    expected = full_layer(full)
    expected.backward(given)
    pairs = {"the output": (out, expected), "the gradient of x": (grad_of(local), cut(grad_of(full), group, -1))}
    pairs["the gradient of the weight"] = (grad_of(layer.weight), cut(grad_of(full_layer.weight), group, 1))
    if bias:
        pairs["the gradient of the bias"] = (grad_of(cast(torch.Tensor, layer.bias)), grad_of(full_layer.bias))
    summed = []

    def note_summand(summand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed.append(summand)
        return torch.zeros_like(summand)

    override(layer, output_reduce=note_summand)
    left = (layer(local) - (full_layer.bias if bias else 0)).abs().max().item()
    layer(0 * local)
    is_inside = any(summand.any().item() for summand in summed[1:])
    with torch.autocast("cpu", torch.bfloat16):
        dtypes = {layer(local).dtype, *(summand.dtype for summand in summed[2:])}
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    return RankResult(errors, forward, backward, retained, dtypes, left, is_inside, held)


def check() -> None:
    """Judge the forward of RowParallelLinear on 2 and 4 ranks, with a bias and without."""
    ranks = shared(4)
    with ranks.within(20):
        for n in (2, 4):
            for rank, trials in enumerate(ranks(in_groups, n, all_cases, row_trial, [(False,), (True,)])):
                for bias, result in zip((False, True), trials, strict=True):
                    judge(n, rank, bias, result)


def judge(n: int, rank: int, bias: bool, result: RankResult) -> None:
    """Judge one layer on one rank."""
    where = f"{n} ranks, rank {rank}{', with bias' if bias else ''}"
    assert not result.is_inside, f"{where}: the bias is an input of f* and is summed there: add it to what f* returns"
    for name, error in result.errors.items():
        assert error < 1e-5, f"{where}: {name} is not one process's"
    enough, forward = 2 * 6 * 10 * 4 * (n - 1) // n, result.forward
    assert (forward.calls, forward.bytes) == (1, enough), (
        f"{where}: forward sends {forward.bytes} bytes in {counted(forward.calls, 'call')}; one of {enough} is enough"
    )
    assert result.backward.calls == 0, (
        f"{where}: {counted(result.backward.calls, 'collective')} in backward: send nothing"
    )
    enough = 4 * (10 * 24 // n + 10 * bias)
    assert result.retained <= enough, (
        f"{where}: the layer keeps {result.retained} bytes, {enough} are enough: its shard, a copy"
    )
    assert result.left == 0, f"{where}: call f* as self.output_reduce"
    assert result.held == 0, f"{where}: {result.held} bytes are held beside x and the parameters: multiply x as it is"
    assert result.dtypes == {torch.bfloat16}, (
        f"{where}, under autocast: output and summand are {result.dtypes}, not bfloat16: sum in autocast's dtype, "
        "and cast the bias to the output's"
    )
