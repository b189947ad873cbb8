"""The break-it lab of exercise 09.16: four runners that train the same model, three of them with a fault."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from course_kit.ranks import Ranks
from course_kit.typed import grad_of
from course_lib.pipeline.actions import Action
from course_lib.pipeline.runner import PipelineRunner, Step
from course_lib.pipeline.schedules import one_f_one_b
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.model import ModelConfig, Transformer, loss

CONFIG = ModelConfig(4, 64, 4, 2, 176, 256)
RUNS = ("scaled", "cut", "lost", "sound")  # the runs A to D that the notebook shows
Tensors = dict[str, torch.Tensor]


class Lost(PipelineRunner):
    """A runner that loses the weights' gradient of micro-batch 2 on rank 2."""

    def run(self, action: Action, step: Step) -> None:
        lost = dist.get_rank(self.group) == 2 and action.kind == "B" and action.micro_batch == 2
        before = {w: None if w.grad is None else w.grad.clone() for w in self.stages.parameters()} if lost else {}
        super().run(action, step)
        for weight, gradient in before.items():
            weight.grad = gradient


class Cut(PipelineRunner):
    """A runner that sends zeros for micro-batch 2 on rank 2."""

    def run(self, action: Action, step: Step) -> None:
        super().run(action, step)
        if dist.get_rank(self.group) == 2 and action.kind == "B" and action.micro_batch == 2:
            step.p2p.outgoing["B", 1, 2].zero_()


class Scaled(PipelineRunner):
    """A runner that divides by the number of micro-batches a second time on rank 3."""

    def run(self, action: Action, step: Step) -> None:
        super().run(action, step)
        if dist.get_rank(self.group) == 3 and action == self.actions[-1]:
            for weight in self.stages.parameters():
                grad_of(weight).div_(self.m)


RUNNERS = {"sound": PipelineRunner, "lost": Lost, "cut": Cut, "scaled": Scaled}


def batches() -> TokenBatches:
    """Return the batches of the lab, each 8 sequences of 64 tokens."""
    return TokenBatches(ByteTokenizer().encode(corpus(20_000)), 8, 64)


def trained(kind: str, steps: int) -> tuple[list[float], Tensors]:
    """On a rank: the losses of a training, and the local gradients of the first step."""
    torch.set_num_threads(1)
    runner = RUNNERS[kind](split_stages(Transformer(CONFIG), 4), one_f_one_b(4, 8))
    optimizer = torch.optim.AdamW(runner.stages.parameters(), lr=3e-3)
    data, losses = iter(batches()), []
    first: Tensors = {}
    for _ in range(steps):
        optimizer.zero_grad()
        inputs, targets = next(data)
        step_loss = runner.step(inputs, targets)
        dist.all_reduce(step_loss)
        named = [each for stage in runner.stages.values() for each in stage.named_parameters()]
        first = first or {name: grad_of(weight).clone() for name, weight in named}
        optimizer.step()
        losses.append(step_loss.item())
    return losses, first


@functools.cache
def lab_truth() -> Tensors:
    """Return the gradients of the first step in one process, by name."""
    model = Transformer(CONFIG)
    inputs, targets = next(iter(batches()))
    loss(model(inputs), targets).backward()
    return {name: grad_of(weight) for name, weight in model.named_parameters()}


@functools.cache
def lab_runs(ranks: Ranks, steps: int = 6) -> dict[str, tuple[list[float], list[tuple[float, float]]]]:
    """Return, by letter, the losses of four ranks, and for each stage the norm of its first gradient over the norm of
    one process's gradient, with the cosine of both.
    """
    truth, runs = lab_truth(), {}
    for letter, kind in zip("ABCD", RUNS, strict=True):
        results, beside = ranks(trained, kind, steps), []
        for _, gradients in results:
            got, wanted = (torch.cat([each[name].flatten() for name in gradients]) for each in (gradients, truth))
            cosine = torch.cosine_similarity(got, wanted, dim=0)
            beside.append(((got.norm() / wanted.norm()).item(), cosine.item()))
        runs[letter] = results[0][0], beside
    return runs


def first_gradients(runs: dict[str, tuple[list[float], list[tuple[float, float]]]]) -> str:
    """Return a table of the runs' first gradients beside one process's, by letter and stage; see lab_runs."""
    lines = ["first step:  ratio of the gradient's norm to one process's | cosine, by stage"]
    for letter, (_, beside) in runs.items():
        lines.append(f"{letter}:   " + "     ".join(f"{ratio:.3f} | {cosine:.4f}" for ratio, cosine in beside))
    return "\n".join(lines)
