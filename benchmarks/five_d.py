"""Layouts of course_lib side by side, and against PyTorch's own classes composed: step time and peak memory.

    python benchmarks/five_d.py [PAIRS]        # writes benchmarks/results/five_d_<device>.json

A step is complete: gradients of M micro-batches, clipping by the norm over all ranks, fused AdamW.

Layouts of RIVALS against PyTorch's classes for the same: DTensor's tensor and sequence parallelism, loss_parallel, for
tp, FSDP2's fully_shard for zero3 (with pp: kept after forward), torch.distributed.pipelining's Schedule1F1B for pp.
FSDP2 prefetches implicitly or explicitly, whichever is faster; without pp it sends gradients once per step or, as ours
does, with each micro-batch. Embeddings are not tied, since PyTorch's pipeline does not support tied weights. Losses,
norms, and all weights after CHECKED steps must agree before any timing. Both run in alternation, each after a barrier
and until all ranks are done, as do two instances of the rival: the spread of their ratio is the noise. Times are
rank 0's, medians of PAIRS pairs; "step_peak_mib": the peak above the memory between steps, the maximum over ranks of
the minimum of PEAKS runs.

Then each of LAYOUTS by itself: the median of its steps, and the maximum over ranks of the peak while the model is built
and takes two steps ("peak_mib"). Four and eight ranks on this machine's CPU, or as many GPUs. A failure is recorded
with its message.
"""

import dataclasses
import statistics
import sys
import warnings

import measure
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from course_kit.labs.five_d.rivals import tensor_plan
from course_kit.ranks import Ranks
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.single_gpu.training import decay_groups

PAIRS, PEAKS = 15, 2
CHECKED = 2  # steps
TRIES = 1  # runs for each choice of prefetching
M = 4  # micro-batches of each rank
ADAMW = {"lr": 1e-3, "eps": 1e-4, "fused": True}  # eps: a gradient's rounding error must not become a full step
MAX_NORM = 1.0
LAYOUTS = {
    4: ["dp4", "dp4,zero1", "dp4,zero3", "tp4,sp", "cp4", "pp4", "dp2,tp2,sp", "dp2,tp2,sp,zero3", "dp2,pp2"]
    + ["dp2,pp2,zero1"],
    8: ["dp2,pp2,tp2,sp", "dp2,pp2,tp2,sp,zero1"],
}
RIVALS = {  # ranks, whether FSDP2 sends gradients once per step, layout
    "FSDP2, pipelining": (4, True, "dp2,pp2,zero3,keep"),
    "DTensor, pipelining": (4, True, "pp2,tp2,sp"),
    "FSDP2 once a step, DTensor": (4, True, "dp2,tp2,sp,zero3"),
    "FSDP2, DTensor, pipelining": (8, True, "dp2,pp2,tp2,sp,zero3,keep"),
    "FSDP2, DTensor": (4, False, "dp2,tp2,sp,zero3"),
}


# PyTorch's own, composed.


def torch_build(model: Transformer, layout: Layout, m: int, prefetch: bool = False) -> tuple:
    """Return this rank's stage of a full model, split by PyTorch's classes, its optimizer, the schedule (None without a
    pipeline) and the mesh. prefetch: FSDP2 prefetches the next block explicitly, in forward and in backward.
    """
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (layout.dp, layout.pp, layout.tp), mesh_dim_names=("dp", "pp", "tp"))
    number = mesh["pp"].get_local_rank()
    stage = split_stages(model, layout.pp)[number]
    if layout.tp > 1:
        plan = tensor_plan(stage.blocks)
        has = {name for name, module in stage.named_modules() if module is not None}
        parallelize_module(stage, mesh["tp"], {name: how for name, how in plan.items() if name in has})
    if layout.zero_stage == 3:
        blocks = list(stage.blocks)
        for module in [*blocks, stage]:
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False if layout.pp > 1 else None)
        for one, following in zip(blocks, blocks[1:], strict=False) if prefetch else ():
            one.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([one])
    schedule = None
    if layout.pp > 1:
        pipeline_stage = PipelineStage(stage, number, layout.pp, device, group=mesh["pp"].get_group())
        schedule = Schedule1F1B(pipeline_stage, m, loss_fn=loss)
    return stage, torch.optim.AdamW(decay_groups(stage), **ADAMW), schedule, mesh


def torch_gradients(built: tuple, m: int, inputs: torch.Tensor, targets: torch.Tensor, once: bool = True):
    """Run forward and backward of m micro-batches; inputs, targets: each [b, s]. Return the mean loss on the last
    stage, None elsewhere. once: without a pipeline, FSDP2 sends gradients only in the last backward.
    """
    (stage, _, schedule, _), losses, last = built, [], built[0].head is not None
    if schedule is None:
        for number, (x, y) in enumerate(zip(inputs.chunk(m), targets.chunk(m), strict=True)):
            stage.set_requires_gradient_sync(not once or number == m - 1)
            losses.append(loss(stage(x), y) / m)
            losses[-1].backward()
        return sum(each.detach() for each in losses)
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(
        inputs
    )  # a stage has micro-batches of x only
    ends = {"target": targets, "losses": losses} if last else {}
    schedule.step(*[inputs] * (stage.embedding is not None), positions=positions, **ends, return_outputs=False)
    return sum(each.detach() for each in losses) / m if last else None


def torch_step(built: tuple, m: int, inputs: torch.Tensor, targets: torch.Tensor, once: bool = True) -> tuple:
    """Take a step as ParallelModel.step does: gradients, clipping by the norm over all stages, and the optimizer."""
    stage, optimizer, _, mesh = built
    optimizer.zero_grad()
    with loss_parallel():
        step_loss = torch_gradients(built, m, inputs, targets, once)
    norm = get_total_norm([p.grad for p in stage.parameters()])
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    dist.all_reduce(square, group=mesh["pp"].get_group())
    clip_grads_with_norm_(stage.parameters(), MAX_NORM, square.sqrt())
    optimizer.step()
    return step_loss, square.sqrt()


# Measurements.


def by_rank(local) -> list:
    """Return the objects of all ranks. Collective."""
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, local)
    return objects


def peak(run) -> float:
    """Return the maximum over ranks of the minimum of PEAKS runs, in MiB."""
    return max(by_rank(min(measure.peak_mib(run) for _ in range(PEAKS))))


def local_device() -> torch.device:
    return torch.device("cpu") if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()


def with_micro_batches(text: str, batch: int) -> Layout:
    """Return the layout, with M micro-batches per rank."""
    layout = Layout.parse(text)
    return dataclasses.replace(layout, micro_batch=batch // layout.dp // M)


def local_batch(layout: Layout, mesh, config: ModelConfig, batch: int, seq: int) -> torch.Tensor:
    """Return the inputs and targets of this rank's dp coordinate: [2, batch / dp, seq]."""
    both = torch.randint(config.vocab, (2, batch, seq), generator=torch.Generator().manual_seed(0))
    return both.chunk(layout.dp, 1)[mesh.dp.rank()].to(local_device())


def finished(run, losses: list):
    """Return a function that calls `run`, appends its result to `losses`, and waits for all ranks and devices."""

    def step() -> None:
        losses.append(run())
        if local_device().type != "cpu":
            torch.accelerator.synchronize()
        dist.barrier()

    return step


def ours(layout: Layout, config: ModelConfig, batch: int, seq: int):
    """Return a function that takes a step of our model, the list of the steps' results, and the model."""
    mesh, losses = build_mesh(layout), []
    inputs, targets = local_batch(layout, mesh, config, batch, seq)
    dtype = torch.float32 if local_device().type == "cpu" else torch.bfloat16
    with local_device():
        parallel = parallelize(config, layout, mesh, dtype=dtype, **ADAMW)
    return finished(lambda: parallel.step(inputs, targets, MAX_NORM), losses), losses, parallel


def measure_layouts(texts: list[str], config: ModelConfig, batch: int, seq: int, runs: int) -> dict[str, dict]:
    """Return, on a rank, the time and the peak of each layout."""
    figures = {}
    for text in texts:
        layout, made = with_micro_batches(text, batch), []

        def first() -> None:
            made.extend(ours(layout, config, batch, seq))
            for _ in range(2):
                made[0]()

        figures[text] = {"peak_mib": max(by_rank(measure.peak_mib(first)))}
        times = [measure.seconds(made[0]) for _ in range(runs)]
        figures[text] |= {"step_ms": 1e3 * statistics.median(times), "first_loss": made[1][0][0].item()}
    return figures


def check_same(our_run: tuple, rival: tuple) -> float:
    """Return the largest relative difference of losses, norms and weights after CHECKED steps. Raises AssertionError if
    it is too large.
    """
    (step, losses, parallel), (their_step, their_losses, built) = our_run, rival
    for _ in range(CHECKED):
        step()
        their_step()
    gaps = []
    for (our_loss, our_norm), (their_loss, their_norm) in zip(losses, their_losses, strict=True):
        theirs = their_loss.full_tensor() if isinstance(their_loss, DTensor) else their_loss
        rank_losses = [each for each in by_rank(None if theirs is None else theirs.item()) if each is not None]
        gaps += [abs(our_loss.item() / statistics.mean(rank_losses) - 1), abs((our_norm / their_norm).item() - 1)]
    full = full_weights(parallel)
    for name, parameter in built[0].named_parameters():
        weight = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        gaps.append(((full[name] - weight).abs().max() / weight.abs().max()).item())
    worst, allowed = max(by_rank(max(gaps))), 1e-5 if local_device().type == "cpu" else 0.02
    assert worst <= allowed, f"not the same after {CHECKED} steps: {worst:.1e}"
    return worst


def compare(text: str, once: bool, config: ModelConfig, batch: int, seq: int, pairs: int) -> dict[str, dict]:
    """Return, on a rank, all figures of a layout against PyTorch's classes. once: see torch_gradients."""
    measure.PAIRS = pairs
    warnings.filterwarnings("ignore")
    layout = with_micro_batches(text, batch)
    our_run = ours(layout, config, batch, seq)
    inputs, targets = local_batch(layout, our_run[2].mesh, config, batch, seq)

    def theirs(prefetch: bool) -> tuple:
        with local_device():
            built, losses = torch_build(Transformer(config), layout, M, prefetch), []
        cast = torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda)

        def step() -> tuple:
            with cast:
                return torch_step(built, M, inputs, targets, once)

        return finished(step, losses), losses, built

    def time_of(step) -> float:
        return max(by_rank(statistics.median([measure.seconds(step) for _ in range(TRIES + 1)][1:])))

    choices = [False, True] if layout.zero_stage == 3 else [False]
    prefetch = min(choices, key=lambda choice: time_of(theirs(choice)[0])) if len(choices) > 1 else False
    rival, again = theirs(prefetch), theirs(prefetch)
    figures = {"largest difference": check_same(our_run, rival), "prefetch": prefetch}
    figures["ours against torch"] = measure.paired(our_run[0], rival[0], dist.barrier)
    figures["torch against itself"] = measure.paired(again[0], rival[0], dist.barrier)
    figures["ours"], figures["torch"] = ({"step_peak_mib": peak(each[0])} for each in (our_run, rival))
    return figures


def main(pairs: int = PAIRS) -> None:
    """Measure on this machine; print and write the figures, after each comparison."""
    gpus = torch.cuda.device_count()
    preset, batch, seq = ("bench-1B", 16, 2048) if gpus else ("small", 16, 64)
    config = dataclasses.replace(PRESETS[preset], tied=False)
    figures = {"preset": f"{preset}, not tied", "batch": batch, "micro-batches": M, "seq": seq, "pairs": pairs}
    runs = [(name, n, (compare, text, once)) for name, (n, once, text) in RIVALS.items()]
    runs += [("layouts", n, (measure_layouts, texts)) for n, texts in LAYOUTS.items()]
    for name, n, call in runs:
        if gpus and gpus < n:
            continue
        with Ranks(n, timeout_s=1800) as ranks:  # DTensor caches the groups of an earlier call: new ranks for each
            try:
                result = ranks(*call, config, batch, seq, pairs)[0]
            except Exception as error:
                result = {"does not run": str(error).splitlines()[0]}
        figures[f"{name}, {n} ranks, {ranks.backend}"] = result
        measure.write("five_d", figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
