"""PipelineRunner against torch.distributed.pipelining: step time, peak memory, bytes, gradients, schedule by schedule.

    python benchmarks/pipeline.py [PAIRS]        # writes benchmarks/results/pipeline_<device>.json

A step is zero_grad, all micro-batches' forwards and backwards, and the sum of their gradients; no optimizer. Both have
the same stages (Transformer's, cut by split_stages, embeddings not tied, since PyTorch has nothing for these), weights,
tokens and micro-batches. Each of PyTorch's schedules is paired with our runner in two ways:

    same order    our runner carries out the very list of actions that PyTorch's schedule has made
    ours          our schedule of that name; for InterleavedZeroBubble and DualPipeV, which we have not, zero_bubble_v:
                  as many stages, two a rank

GPipe and 1F1B are afab and one_f_one_b, action by action: one pair. PyTorch's overlapped F and B are run one after the
other, by both. Two and four ranks on this machine's CPU, or a rank for each GPU. Each kind runs in alternation with
PyTorch's, each after a barrier and until all ranks are done, and so does PyTorch's with itself: the spread of that
ratio is the noise. Times are rank 0's, medians of PAIRS pairs; "step_peak_mib": the largest of all ranks, of each the
least of PEAKS; "mib_sent": by all ranks; "error": the largest difference of a gradient's element from PyTorch's, over
the largest element of that gradient. What does not run is written down with what it said.
"""

import dataclasses
import sys
import warnings

import measure
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import _ComputationType

from course_kit.ranks import Ranks
from course_lib.collectives.traffic import count_traffic
from course_lib.pipeline.runner import PipelineRunner
from course_lib.pipeline.schedules import (
    Action,
    Schedule,
    afab,
    interleaved,
    one_f_one_b,
    simulate,
    validate,
    zero_bubble_v,
)
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss

PAIRS = 15
PEAKS = 3
M = 8
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
# PyTorch's: stages a rank, whether they lie in a V, and ours
RIVALS = {
    "ScheduleGPipe": (1, False, afab),
    "Schedule1F1B": (1, False, one_f_one_b),
    "ScheduleInterleaved1F1B": (2, False, lambda p, m: interleaved(p, m, 2)),
    "ScheduleInterleavedZeroBubble": (2, False, zero_bubble_v),
    "ScheduleZBVZeroBubble": (2, True, zero_bubble_v),
    "ScheduleDualPipeV": (2, True, zero_bubble_v),
}


def own_numbers(rank: int, p: int, v: int, in_v: bool) -> list[int]:
    """The numbers of a rank's stages."""
    return [rank, 2 * p - 1 - rank] if in_v else [rank + p * i for i in range(v)]


def same_order(theirs, p: int) -> Schedule:
    """PyTorch's list of actions as one of ours. Raises ValueError where it is no schedule."""
    found = []
    for rank in range(p):
        actions = [action for action in theirs.pipeline_order[rank] if action is not None]
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        kinds = [LETTERS[_ComputationType(part.computation_type).name] for part in parts]
        found.append([Action(k, a.stage_index, a.microbatch_index) for k, a in zip(kinds, parts, strict=True)])
    validate(found, M)
    return found


class Ours:
    """A schedule, run by PipelineRunner."""

    def __init__(self, model: Transformer, schedule: Schedule, stages: int):
        self.runner = PipelineRunner(split_stages(model, stages), schedule)
        self.stages = {int(number): stage for number, stage in self.runner.stages.items()}
        self.schedule = schedule

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.runner.step(inputs, targets)


class Theirs:
    """One of PyTorch's schedules."""

    def __init__(self, model: Transformer, name: str):
        p, rank, (v, in_v, _) = dist.get_world_size(), dist.get_rank(), RIVALS[name]
        device = next(model.parameters()).device
        numbers, all_stages = own_numbers(rank, p, v, in_v), split_stages(model, p * v)
        self.stages = {number: all_stages[number] for number in numbers}
        parts = [PipelineStage(stage, number, p * v, device) for number, stage in self.stages.items()]
        make = getattr(schedules, name)
        self.schedule = make(parts[0] if v == 1 else parts, M, loss_fn=loss)
        self.first, self.last = 0 in numbers, p * v - 1 in numbers

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        targets = {"target": targets, "losses": []} if self.last else {}
        self.schedule.step(*([inputs] if self.first else []), **targets, return_outputs=False)


def timed(kind, inputs: torch.Tensor, targets: torch.Tensor):
    """A training step without the optimizer, until all ranks and their devices are done."""

    def step() -> None:
        for stage in kind.stages.values():
            stage.zero_grad()
        kind.step(inputs, targets)
        if inputs.is_cuda:
            torch.accelerator.synchronize()
        dist.barrier()

    return step


def of_all(own) -> list:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def gradients(kind) -> dict[str, torch.Tensor]:
    return {name: p.grad for stage in kind.stages.values() for name, p in stage.named_parameters()}


def compare(name: str, config: ModelConfig, batch: int, seq: int, pairs: int) -> dict[str, dict]:
    """On a rank: all figures of one of PyTorch's schedules."""
    measure.PAIRS = pairs
    warnings.filterwarnings("ignore")
    p, (v, _, make) = dist.get_world_size(), RIVALS[name]
    on_gpu = dist.get_backend() != "gloo"
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(config.vocab, (2, batch, seq), generator=generator).to(device)

    def model() -> Transformer:
        with device:
            return Transformer(config).to(torch.bfloat16 if on_gpu else torch.float32)

    rival, again = Theirs(model(), name), Theirs(model(), name)
    kinds = {"ours": Ours(model(), make(p, M), p * v)}
    if v > 1:
        kinds["same order"] = Ours(model(), same_order(rival.schedule, p), p * v)
    steps = {kind: timed(each, inputs, targets) for kind, each in {"torch": rival, "again": again, **kinds}.items()}
    figures = {}
    for kind in ("torch", *kinds):
        with count_traffic() as traffic:
            steps[kind]()
        figures[kind] = {"mib_sent": sum(of_all(traffic.select("send").bytes)) / 2**20}
    steps["torch"]()
    everything = [{} for _ in kinds]
    for found, kind in zip(everything, kinds.values(), strict=True):
        steps[next(k for k in kinds if kinds[k] is kind)]()
        for part in of_all({n: g.float().cpu() for n, g in gradients(kind).items()}):
            found |= part
    expected = {n: g.float().cpu() for n, g in gradients(rival).items()}
    for kind, found in zip(kinds, everything, strict=True):
        gaps = [((found[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items()]
        simulation = simulate(kinds[kind].schedule)
        figures[kind] |= {"error": max(of_all(max(gaps))), "simulated_bubble_ratio": simulation.bubble_ratio}
    for kind in kinds:
        figures[f"{kind} against torch"] = measure.paired(steps[kind], steps["torch"], dist.barrier)
    figures["torch against itself"] = measure.paired(steps["again"], steps["torch"], dist.barrier)
    for kind in ("torch", *kinds):
        own = min(measure.peak_mib(steps[kind]) for _ in range(PEAKS))
        figures[kind]["step_peak_mib"] = max(of_all(own))
    return figures


def main(pairs: int = PAIRS) -> None:
    """Measure on this machine, print the figures and write them down."""
    gpus = torch.cuda.device_count()
    preset = "bench-1B" if gpus else "small"
    figures = {"preset": f"{preset}, not tied", "batch": M, "micro-batches": M, "seq": 2048 if gpus else 128}
    config = dataclasses.replace(PRESETS[preset], tied=False)
    figures["pairs"] = pairs
    for n in [gpus] if gpus else [2, 4]:
        with Ranks(n, timeout_s=1800) as ranks:
            found = {}
            for name in RIVALS:
                try:
                    found[name] = ranks(compare, name, config, M, figures["seq"], pairs)[0]
                except Exception as error:
                    found[name] = {"does not run": str(error).splitlines()[0]}
            figures[f"{n} ranks, {ranks.backend}"] = found
    measure.write("pipeline", figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
