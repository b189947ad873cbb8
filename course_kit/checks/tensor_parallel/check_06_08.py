"""Check of exercise 06.8: the split loss against one process: values, gradients, traffic, memory, a second backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_kit.checks.tensor_parallel.cases import all_cases, counted, in_case
from course_kit.checks.tensor_parallel.memory import AtOnce, saved_for_backward
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.recompute.modes import IGNORED
from course_lib.tensor_parallel import vocabulary
from course_lib.tensor_parallel.shards import TensorShard

CASES: dict[
    int, list[tuple]
] = {  # by number of ranks: tokens of the vocabulary, dtype, standard deviation of the logits, their mean
    2: [(97, torch.float32, 1), (512, torch.bfloat16, 1)],
    4: [(97, torch.float32, 1, -300.0), (512, torch.float32, 300)],
}


class RankResult(NamedTuple):
    """A rank's report on the split loss. Memory is in float32 tensors of the size of this rank's logits."""

    errors: tuple[float, float]  # of the loss and the gradient
    forward: Traffic
    backward: Traffic
    enough: float  # bytes of three elements per token
    unchanged: bool  # the logits are as before
    made: int  # such tensors that forward has at once
    in_all: float  # how many times their bytes are held for backward, the logits with them
    saved: float  # the same without the logits
    later: int  # such tensors that backward has at once
    repeats: bool  # a second backward gives what the first gave, or an error


def loss_trial(
    group: dist.ProcessGroup, vocab: int, dtype: torch.dtype, scale: float, around: float = 0.0
) -> RankResult:
    """Compute the loss of 40 tokens, of which five are ignored, and its gradient."""
    torch.manual_seed(8)
    n, tokens = group.size(), 40
    shard = TensorShard.of(vocab, group, -1)
    full = (around + scale * torch.randn(5, 8, vocab)).to(dtype)
    targets = torch.randint(vocab, (5, 8))
    targets[1, 3:] = IGNORED
    local = shard.cut(full).clone().requires_grad_()
    before = local.detach().clone()

    def compute() -> torch.Tensor:
        return vocabulary.vocab_parallel_cross_entropy(local, targets, group, vocab)

    of_loss = torch.tensor(float(n))  # the gradient that backward is given
    one = 4 * tokens * shard.size  # bytes of this rank's logits in float32
    with in_case(f"{vocab} tokens, {dtype}"):
        with count_traffic() as forward, AtOnce(one) as first:
            got, in_all = saved_for_backward(compute, targets)
        _, saved = saved_for_backward(compute, targets, local)
        with count_traffic() as backward, AtOnce(one) as second:
            got.backward(of_loss)
    full.requires_grad_()
    expected = F.cross_entropy(full.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
    expected.backward(of_loss)
    errors = relative_error(got, expected), relative_error(grad_of(local).float(), shard.cut(grad_of(full)).float())
    enough, unchanged = 4 * tokens * 3 * 2 * (n - 1) / n, torch.equal(local, before)
    again = vocabulary.vocab_parallel_cross_entropy(local, targets, group, vocab)
    gradient = torch.autograd.grad(again, local, retain_graph=True)[0].clone()
    try:
        repeats = torch.equal(torch.autograd.grad(again, local)[0], gradient)
    except RuntimeError:
        repeats = True
    held = in_all / one, saved / one
    return RankResult(errors, forward, backward, enough, unchanged, first.most, *held, second.most, repeats)


def check() -> None:
    """Judge VocabParallelCrossEntropy on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for n, cases in CASES.items():
            for rank, trials in enumerate(ranks(in_groups, n, all_cases, loss_trial, cases)):
                for case, result in zip(cases, trials, strict=True):
                    judge(n, rank, result, *case)


def judge(
    n: int, rank: int, result: RankResult, vocab: int, dtype: torch.dtype, scale: float, around: float = 0.0
) -> None:
    """Judge one case on one rank."""
    where = f"{vocab} tokens, {n} ranks, rank {rank}, {dtype}"
    large = "; logits are in the hundreds" * (scale > 1)
    if around:
        large = "; all logits are about -300: take off the row's own largest, below 0 too"
    assert result.errors[0] < 1e-5, f"{where}: not one process's loss{large}"
    close = 1e-4 if dtype == torch.float32 else 1e-2
    assert result.errors[1] < close, f"{where}: the gradient is not one process's{large}"
    assert result.unchanged, f"{where}: the logits that were given have changed"
    assert result.forward.bytes <= result.enough + 1, (
        f"{where}: forward sends {result.forward.bytes} bytes; three elements per token are {result.enough:.0f}"
    )
    assert result.forward.calls <= 2 and result.backward.calls == 0, (
        f"{where}: {counted(result.forward.calls, 'collective')} in forward, {result.backward.calls} in backward; "
        "not 2 and 0"
    )
    assert result.in_all < 1.35, (
        f"{where}: {result.in_all:.2f} times the logits in float32 are held, with the logits themselves: once is enough"
    )
    assert result.made <= 1, (
        f"{where}: forward has {result.made} float32 tensors of the logits' size at once: one is enough"
    )
    assert result.saved + result.later < 1.35, f"{where}: backward makes another float32 tensor of that size: in place"
    assert result.repeats, (
        f"{where}: a second backward gives another gradient: keep what backward changes by save_for_backward, so that "
        "it raises an error"
    )
