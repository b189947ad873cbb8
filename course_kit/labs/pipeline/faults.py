"""The break-it lab of exercise 09.16: four runners that train the same model, three of them with a fault."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from course_kit.ranks import Ranks
from course_lib.pipeline.runner import PipelineRunner
from course_lib.pipeline.schedules import one_f_one_b
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.model import ModelConfig, Transformer, loss

CONFIG = ModelConfig(4, 64, 4, 2, 176, 256)
RUNS = ("scaled", "cut", "lost", "sound")  # the runs A to D that the notebook shows
Tensors = dict[str, torch.Tensor]


class Lost(PipelineRunner):
    """Forgets the weights' gradient of micro-batch 2 on rank 2."""

    def run(self, action) -> None:
        lost = self.group.rank() == 2 and action.kind == "B" and action.micro_batch == 2
        before = {w: None if w.grad is None else w.grad.clone() for w in self.stages.parameters()} if lost else {}
        super().run(action)
        for weight, gradient in before.items():
            weight.grad = gradient


class Cut(PipelineRunner):
    """Passes on zeros for micro-batch 2, on rank 2."""

    def run(self, action) -> None:
        super().run(action)
        if self.group.rank() == 2 and action.kind == "B" and action.micro_batch == 2:
            self.p2p.leaving["B", 1, 2].zero_()


class Scaled(PipelineRunner):
    """Divides by the number of micro-batches once more, on rank 3."""

    def run(self, action) -> None:
        super().run(action)
        if self.group.rank() == 3 and action == self.actions[-1]:
            for weight in self.stages.parameters():
                weight.grad /= self.m


RUNNERS = {"sound": PipelineRunner, "lost": Lost, "cut": Cut, "scaled": Scaled}


def batches() -> TokenBatches:
    """The batches of the lab, each 8 sequences of 64 tokens."""
    return TokenBatches(ByteTokenizer().encode(corpus(20_000)), 8, 64)


def trained(kind: str, steps: int) -> tuple[list[float], Tensors]:
    """On a rank: the losses of a training, and this rank's gradients of the first step."""
    torch.set_num_threads(1)
    runner = RUNNERS[kind](split_stages(Transformer(CONFIG), 4), one_f_one_b(4, 8))
    optimizer = torch.optim.AdamW(runner.stages.parameters(), lr=3e-3)
    data, losses, first = iter(batches()), [], None
    for _ in range(steps):
        optimizer.zero_grad()
        part = runner.step(*next(data))
        dist.all_reduce(part)
        first = first or {n: w.grad.clone() for s in runner.stages.values() for n, w in s.named_parameters()}
        optimizer.step()
        losses.append(part.item())
    return losses, first


@functools.cache
def lab_truth() -> Tensors:
    """The gradients of the first step by name, of one process."""
    model = Transformer(CONFIG)
    inputs, targets = next(iter(batches()))
    loss(model(inputs), targets).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@functools.cache
def lab_runs(ranks: Ranks, steps: int = 6) -> dict[str, tuple[list[float], list[tuple[float, float]]]]:
    """By letter: the losses of four ranks, and for each stage what its gradient of the first step is like.

    That is its norm over the norm of one process's gradient, and the cosine of both.
    """
    truth, found = lab_truth(), {}
    for letter, kind in zip("ABCD", RUNS, strict=True):
        results, beside = ranks(trained, kind, steps), []
        for _, own in results:
            got, wanted = (torch.cat([each[name].flatten() for name in own]) for each in (own, truth))
            cosine = torch.cosine_similarity(got, wanted, dim=0)
            beside.append(((got.norm() / wanted.norm()).item(), cosine.item()))
        found[letter] = results[0][0], beside
    return found
