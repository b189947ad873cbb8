"""PipelineRunner against torch.distributed.pipelining: step time, peak memory, bytes, gradients, schedule by schedule.

    python benchmarks/pipeline.py [PAIRS]        # writes benchmarks/results/pipeline_<device>.json

A step is zero_grad, all micro-batches' forwards and backwards, and the sum of their gradients; no optimizer. Both have
the same stages (Transformer's, cut by split_stages, embeddings not tied, since PyTorch has nothing for these), weights,
tokens and micro-batches. Each of PyTorch's schedules is paired with our runner in two ways:

    same order    our runner carries out the very list of actions that PyTorch's schedule has made
    ours          our schedule of that name; for InterleavedZeroBubble and DualPipeV, which we have not, zero_bubble_v:
                  as many stages, two per rank

GPipe and 1F1B are afab and one_f_one_b, action by action: one pair. PyTorch's overlapped F and B are run one after the
other, by both. Two and four ranks on this machine's CPU, or a rank for each GPU. Each kind runs in alternation with
PyTorch's, each after a barrier and until all ranks are done, as does PyTorch's with itself: the spread of that
ratio is the noise. Times are rank 0's, medians of PAIRS pairs; "step_peak_mib": the largest of all ranks, of each the
least of PEAKS; "mib_sent": by all ranks; "error": the largest difference of a gradient's element from PyTorch's, over
the largest element of that gradient. Kernels that fail to run are recorded with their error.

"halves": the price of a backward in two halves. In one process, on a middle stage of LAYERS layers: the time of F, I
and W over the time of F and B, for M micro-batches. Measured for our SplitPass, for PyTorch's stage_backward_input and
stage_backward_weight, and for layers that keep x and dY and add to .grad themselves, as DualPipe's WeightGradStore
does. The kinds alternate, HALVES times.
"""

import dataclasses
import statistics
import sys
import time
import warnings

import measure
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import _ComputationType

from course_kit.ranks import Ranks
from course_lib.collectives.traffic import count_traffic
from course_lib.pipeline.actions import validate
from course_lib.pipeline.runner import PipelineRunner
from course_lib.pipeline.schedules import Action, Schedule, afab, interleaved, one_f_one_b, zero_bubble_v
from course_lib.pipeline.simulation import simulate
from course_lib.pipeline.split_backward import SplitPass
from course_lib.pipeline.stages import StagePass, split_stages
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss

PAIRS = 15
PEAKS = 3
M = 8
LAYERS, HALVES = 3, 25
SIZES = {"hidden 16, 8 tokens": (16, 8), "hidden 256, 128 tokens": (256, 128), "hidden 512, 256 tokens": (512, 256)}
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
# PyTorch's: stages per rank, whether they form a V, and ours
RIVALS = {
    "ScheduleGPipe": (1, False, afab),
    "Schedule1F1B": (1, False, one_f_one_b),
    "ScheduleInterleaved1F1B": (2, False, lambda p, m: interleaved(p, m, 2)),
    "ScheduleInterleavedZeroBubble": (2, False, zero_bubble_v),
    "ScheduleZBVZeroBubble": (2, True, zero_bubble_v),
    "ScheduleDualPipeV": (2, True, zero_bubble_v),
}


def stage_numbers(rank: int, p: int, v: int, in_v: bool) -> list[int]:
    """Return the numbers of a rank's stages."""
    return [rank, 2 * p - 1 - rank] if in_v else [rank + p * i for i in range(v)]


def same_order(theirs, p: int) -> Schedule:
    """Return PyTorch's list of actions as one of ours. Raises ValueError if it is no schedule."""
    schedule = []
    for rank in range(p):
        actions = [action for action in theirs.pipeline_order[rank] if action is not None]
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        kinds = [LETTERS[_ComputationType(part.computation_type).name] for part in parts]
        schedule.append([Action(k, a.stage_index, a.microbatch_index) for k, a in zip(kinds, parts, strict=True)])
    validate(schedule, M)
    return schedule


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
        numbers, all_stages = stage_numbers(rank, p, v, in_v), split_stages(model, p * v)
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


def gathered(obj) -> list:
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, obj)
    return objects


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
        figures[kind] = {"mib_sent": sum(gathered(traffic.select("send").bytes)) / 2**20}
    steps["torch"]()
    everything = [{} for _ in kinds]
    for grads, kind in zip(everything, kinds.values(), strict=True):
        steps[next(k for k in kinds if kinds[k] is kind)]()
        for part in gathered({n: g.float().cpu() for n, g in gradients(kind).items()}):
            grads |= part
    expected = {n: g.float().cpu() for n, g in gradients(rival).items()}
    for kind, grads in zip(kinds, everything, strict=True):
        gaps = [((grads[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items()]
        simulation = simulate(kinds[kind].schedule)
        figures[kind] |= {"error": max(gathered(max(gaps))), "simulated_bubble_ratio": simulation.bubble_ratio}
    for kind in kinds:
        figures[f"{kind} against torch"] = measure.paired(steps[kind], steps["torch"], dist.barrier)
    figures["torch against itself"] = measure.paired(steps["again"], steps["torch"], dist.barrier)
    for kind in ("torch", *kinds):
        peak = min(measure.peak_mib(steps[kind]) for _ in range(PEAKS))
        figures[kind]["step_peak_mib"] = max(gathered(peak))
    return figures


class Unsplit(StagePass):
    """F and B."""

    def __init__(self, stage: nn.Module, x: torch.Tensor):
        super().__init__(stage, x, lambda out: out)

    def backwards(self, gradient: torch.Tensor) -> None:
        self.backward(gradient)


class OurHalves(SplitPass):
    """F, I, W."""

    def __init__(self, stage: nn.Module, x: torch.Tensor):
        super().__init__(stage, x, lambda out: out)

    def backwards(self, gradient: torch.Tensor) -> None:
        self.input_gradient(gradient)
        self.weight_gradients()


class TorchHalves:
    """F, I, W of torch.distributed.pipelining."""

    def __init__(self, stage: nn.Module, x: torch.Tensor):
        self.stage, self.x = stage, x.detach().requires_grad_()
        self.out = stage(self.x)

    def backwards(self, gradient: torch.Tensor) -> None:
        _, groups = stage_backward_input([self.out], [gradient], [self.x], self.stage.parameters())
        stage_backward_weight(self.stage.parameters(), groups)


class KeepingLinear(torch.autograd.Function):
    """x · weightᵀ, whose backward puts off the weight's gradient: it keeps x and its own gradient in `later`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, later: list) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        ctx.later.append((weight, x.flatten(0, -2), gradient.flatten(0, -2)))
        return gradient @ weight, None, None


class StoredHalves(Unsplit):
    """F, I, W of layers that keep what W needs."""

    @staticmethod
    def prepare(stage: nn.Module) -> nn.Module:
        stage.later = []
        for layer in stage.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = lambda x, layer=layer: KeepingLinear.apply(x, layer.weight, stage.later)
        return stage

    def __init__(self, stage: nn.Module, x: torch.Tensor):
        super().__init__(stage, x)
        self.later = stage.later

    @torch.no_grad()
    def backwards(self, gradient: torch.Tensor) -> None:
        self.backward(gradient)
        while self.later:
            weight, x, gradient = self.later.pop()
            if weight.grad is None:
                weight.grad = gradient.t() @ x
            else:
                weight.grad.addmm_(gradient.t(), x)


def halves(hidden: int, tokens: int) -> dict[str, dict[str, float]]:
    """Return, for each kind of halves, F, I and W over F and B: the median and the quartiles, in this process."""
    config = ModelConfig(LAYERS + 2, hidden, hidden // 64 or 1, hidden // 64 or 1, hidden * 5 // 2, 64)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    with device:
        x, gradient = torch.randn(2, 1, tokens, hidden)
        kinds = {"F and B": Unsplit, "ours": OurHalves, "torch": TorchHalves, "x and dY kept": StoredHalves}
        stages = {name: split_stages(Transformer(config), 3)[1] for name in kinds}
    StoredHalves.prepare(stages["x and dY kept"])
    times = []
    for _ in range(HALVES):
        spans = []
        for name, kind in kinds.items():
            stages[name].zero_grad()
            start = time.perf_counter()
            for _ in range(M):
                kind(stages[name], x).backwards(gradient)
            if x.is_cuda:
                torch.accelerator.synchronize()
            spans.append(time.perf_counter() - start)
        times.append(spans)
    figures = {"F and B": {"ms": 1e3 / M * statistics.median(spans[0] for spans in times)}}
    for i, name in enumerate(list(kinds)[1:], 1):
        quarters = statistics.quantiles([spans[i] / spans[0] for spans in times])
        figures[name] = dict(zip(("ratio_quarter", "ratio", "ratio_three_quarters"), quarters, strict=True))
    return figures


def main(pairs: int = PAIRS) -> None:
    """Measure on this machine, print the figures and write them down."""
    gpus = torch.cuda.device_count()
    preset = "bench-1B" if gpus else "small"
    figures = {"preset": f"{preset}, not tied", "batch": M, "micro-batches": M, "seq": 2048 if gpus else 128}
    config = dataclasses.replace(PRESETS[preset], tied=False)
    figures["pairs"] = pairs
    figures["halves"] = {size: halves(*numbers) for size, numbers in SIZES.items()}
    for n in [gpus] if gpus else [2, 4]:
        with Ranks(n, timeout_s=1800) as ranks:
            of_rivals = {}
            for name in RIVALS:
                try:
                    of_rivals[name] = ranks(compare, name, config, M, figures["seq"], pairs)[0]
                except Exception as error:
                    of_rivals[name] = {"does not run": str(error).splitlines()[0]}
            figures[f"{n} ranks, {ranks.backend}"] = of_rivals
    measure.write("pipeline", figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
