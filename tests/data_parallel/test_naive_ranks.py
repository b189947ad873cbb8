"""course_lib.data_parallel.naive on ranks against one process, and as modes of the program. CPU, gloo."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from calls import short_corpus
from course_lib.collectives.traffic import count_traffic
from course_lib.data_parallel import naive
from course_lib.data_parallel.program import main
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import ModelConfig, Transformer, loss

ODD = ModelConfig(layers=2, hidden=30, heads=3, kv_heads=1, ffn_hidden=37, vocab=53, tied=True)
MICRO_BATCHES = 3
ARGUMENTS = ["--preset", "debug", "--steps", "2", "--batch", "2", "--seq", "16", "--check-every", "1"]


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a rank, [3, 7] each."""
    return torch.randint(ODD.vocab, (2, MICRO_BATCHES, 7), generator=torch.Generator().manual_seed(rank)).unbind()


def averaged(overlaps: bool, micro_batches: int) -> tuple:
    """On a rank: the mean loss and the gradients of two backwards, and the all-reduces started during each of them."""
    model, during, starts = Transformer(ODD), [], []
    finish = naive.overlap_gradients(model) if overlaps else None

    def noted() -> None:
        during.append(traffic.calls)
        finish()

    for _ in range(2):
        model.zero_grad()
        during.clear()
        parts = list(zip(*(each.chunk(micro_batches) for each in batch_of(dist.get_rank())), strict=True))
        with count_traffic() as traffic:
            mean = naive.averaged_backward(model, parts, finish=noted if overlaps else None)
        starts.append((list(during), traffic.calls))
    return mean.item(), {name: p.grad for name, p in model.named_parameters()}, starts


@pytest.mark.parametrize("micro_batches", [1, MICRO_BATCHES])
@pytest.mark.parametrize("overlaps", [False, True])
def test_gradients_and_loss_are_those_of_one_process(ranks, overlaps, micro_batches):
    model = Transformer(ODD)
    inputs, targets = (torch.cat(each) for each in zip(*map(batch_of, range(4)), strict=True))
    whole = loss(model(inputs), targets)
    whole.backward()
    count = len(list(model.parameters()))
    for mean, grads, starts in ranks(averaged, overlaps, micro_batches):
        assert mean == pytest.approx(whole.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)
        for during, calls in starts:
            started = [count * (number + 1) for number in range(micro_batches)]
            assert during == (started if overlaps else []), "each backward starts an all-reduce for each gradient"
            assert calls == (started[-1] if overlaps else count) + 1, "one all-reduce more, of the loss"


def trained(argv: list[str]) -> tuple[list[float], list[str]]:
    """On a rank: the losses of the program, and which of the two functions it has called."""
    called = []

    def marked(name: str):
        function = getattr(naive, name)
        return mock.patch.object(naive, name, lambda *given: called.append(name) or function(*given))

    with short_corpus(), marked("average_gradients"), marked("overlap_gradients"):
        return [record["loss"] for record in main(argv)], called


@pytest.mark.parametrize("more", [[], ["--micro-batch", "1"]])
def test_the_program_trains_with_these_functions_as_one_process(ranks, more):
    with short_corpus():
        alone = single_gpu.main(["--preset", "debug", "--steps", "2", "--batch", "8", "--seq", "16"])
    used = {"naive": ["average_gradients"] * 2, "overlap": ["overlap_gradients"], "bucket": []}
    for mode, functions in used.items():
        for losses, called in ranks(trained, [*ARGUMENTS, "--mode", mode, *more]):
            assert losses == pytest.approx([record["loss"] for record in alone], rel=1e-4), mode
            assert called == functions
