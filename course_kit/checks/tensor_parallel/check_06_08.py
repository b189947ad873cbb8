"""Check of exercise 06.8: the split loss against one process: values, gradients, traffic, memory, a second backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_kit.checks.tensor_parallel.cases import all_cases, counted, in_case
from course_kit.checks.tensor_parallel.memory import AtOnce
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.recompute.modes import IGNORED
from course_lib.tensor_parallel import vocabulary
from course_lib.tensor_parallel.shards import TensorShard

CASES = {  # by number of ranks: tokens of the vocabulary, dtype, standard deviation of the logits, their mean
    2: [(97, torch.float32, 1), (512, torch.bfloat16, 1)],
    4: [(97, torch.float32, 1, -300.0), (512, torch.float32, 300)],
}


class Told(NamedTuple):
    """What a rank tells of the split loss. Memory is in float32 tensors of the size of this rank's logits."""

    errors: tuple[float, float]  # of the loss and the gradient
    forward: Traffic
    backward: Traffic
    enough: float  # bytes of three numbers a token
    unchanged: bool  # the logits are as before
    made: int  # such tensors that forward has at once
    kept: float  # how many times their bytes are kept for backward
    later: int  # such tensors that backward has at once
    repeats: bool  # a second backward gives what the first gave, or an error


def loss_trial(group: dist.ProcessGroup, vocab: int, dtype: torch.dtype, scale: float, around: float = 0.0) -> Told:
    """Compute the loss of 40 tokens, of which five are ignored, and its gradient."""
    torch.manual_seed(8)
    n, tokens = group.size(), 40
    shard = TensorShard.of(vocab, group, -1)
    whole = (around + scale * torch.randn(5, 8, vocab)).to(dtype)
    targets = torch.randint(vocab, (5, 8))
    targets[1, 3:] = IGNORED
    own = shard.cut(whole).clone().requires_grad_()
    before, kept = own.detach().clone(), {}

    def note(tensor):
        if tensor.untyped_storage()._cdata not in (own.untyped_storage()._cdata, targets.untyped_storage()._cdata):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    one = 4 * tokens * shard.size  # bytes of this rank's logits in float32
    with in_case(f"{vocab} tokens, {dtype}"):
        with count_traffic() as forward, AtOnce(one) as first, hooks:
            got = vocabulary.vocab_parallel_cross_entropy(own, targets, group, vocab)
        with count_traffic() as backward, AtOnce(one) as second:
            got.backward()
    whole.requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
    expected.backward()
    errors = relative_error(got, expected), relative_error(grad_of(own).float(), shard.cut(grad_of(whole)).float())
    enough, unchanged = 4 * tokens * 3 * 2 * (n - 1) / n, torch.equal(own, before)
    again = vocabulary.vocab_parallel_cross_entropy(own, targets, group, vocab)
    gradient = torch.autograd.grad(again, own, retain_graph=True)[0].clone()
    try:
        repeats = torch.equal(torch.autograd.grad(again, own)[0], gradient)
    except RuntimeError:
        repeats = True
    kept_times = sum(kept.values()) / one
    return Told(errors, forward, backward, enough, unchanged, first.most, kept_times, second.most, repeats)


def check() -> None:
    """Judge VocabParallelCrossEntropy on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for n, cases in CASES.items():
            for rank, trials in enumerate(ranks(in_groups, n, all_cases, loss_trial, cases)):
                for case, told in zip(cases, trials, strict=True):
                    judge(n, rank, told, *case)


def judge(n: int, rank: int, told: Told, vocab: int, dtype: torch.dtype, scale: float, around: float = 0.0) -> None:
    """Judge one case on one rank."""
    where = f"{vocab} tokens, {n} ranks, rank {rank}, {dtype}"
    large = "; logits are in the hundreds" * (scale > 1)
    if around:
        large = "; all logits are about -300: take off the row's own largest, below 0 too"
    assert told.errors[0] < 1e-5, f"{where}: not one process's loss{large}"
    close = 1e-4 if dtype == torch.float32 else 1e-2
    assert told.errors[1] < close, f"{where}: the gradient is not one process's{large}"
    assert told.unchanged, f"{where}: the logits that were given have changed"
    assert told.forward.bytes <= told.enough + 1, (
        f"{where}: forward sends {told.forward.bytes} bytes; three numbers a token are {told.enough:.0f}"
    )
    assert told.forward.calls <= 2 and told.backward.calls == 0, (
        f"{where}: {counted(told.forward.calls, 'collective')} in forward, {told.backward.calls} in backward: 2 and 0"
    )
    assert told.kept < 1.35, f"{where}: {told.kept:.2f} times the logits in float32 are kept: once is enough"
    assert told.made <= 1, (
        f"{where}: forward has {told.made} float32 tensors of the logits' size at once: one is enough"
    )
    assert told.kept + told.later < 1.35, f"{where}: backward makes another float32 tensor of that size: in place"
    assert told.repeats, (
        f"{where}: a second backward gives another gradient: keep what backward changes by save_for_backward, so that "
        "it raises an error"
    )
