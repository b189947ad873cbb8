"""PyTorch's FSDP2, DTensor and pipelining combined: dp2, pp2, tp2 with sequence parallelism, and ours beside it.

DTensor comes first, then `fully_shard` on each block and on the stage. Every stage takes positions as an argument,
because its hidden states are a shard of the sequence. The norm of the stages' DTensors is summed over stages by hand.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.five_d.models import built
from course_kit.typed import grad_of
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.single_gpu.training import decay_groups

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

OURS = "dp2,pp2,tp2,sp,zero3,keep,mb2"


def tensor_plan(blocks: nn.ModuleList) -> dict:
    """Return DTensor's plan for each layer; hidden states between the layers are [b, s / tp, h]."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    split, replicated = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=replicated, output_layouts=split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False),
    }
    for number, _ in blocks.named_children():
        block = f"blocks.{number}"
        for part, rest in (("attention", (None, None)), ("mlp", ())):
            plan[f"{block}.{part}_norm"] = SequenceParallel()
            layouts: dict[str, Any] = {"input_layouts": (split, *rest), "desired_input_layouts": (replicated, *rest)}
            plan[f"{block}.{part}"] = PrepareModuleInput(**layouts)
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.o_proj", "mlp.down_proj"):
            plan[f"{block}.{name}"] = RowwiseParallel(output_layouts=split)
    return plan


def torch_parallel(config: ModelConfig, settings: dict, m: int) -> tuple[int, Callable]:
    """Return the dp coordinate of this rank, and step(inputs, targets) with PyTorch's classes: loss and norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    number = mesh["pp"].get_local_rank()
    stage = split_stages(Transformer(config), 2)[number]
    has = {name for name, module in stage.named_modules() if module is not None}
    blocks = cast(nn.ModuleList, stage.blocks)
    parallelize_module(stage, mesh["tp"], {name: how for name, how in tensor_plan(blocks).items() if name in has})
    for unit in [*blocks, stage]:
        fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=False)
    pipeline_stage = PipelineStage(stage, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(pipeline_stage, m, loss_fn=loss)
    optimizer = torch.optim.AdamW(decay_groups(stage), **settings)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        losses: list[DTensor] = []
        with loss_parallel():
            ends: dict[str, Any] = {"target": targets, "losses": losses} if number == 1 else {}
            schedule.step(*[inputs] * (number == 0), positions=positions, **ends, return_outputs=False)
        norm = get_total_norm([grad_of(weight) for weight in stage.parameters()])
        square = cast("DTensor", norm).full_tensor().square()
        dist.all_reduce(square, group=mesh["pp"].get_group())
        clip_grads_with_norm_(stage.parameters(), 1.0, square.sqrt())
        optimizer.step()
        full = [cast("DTensor", each.detach()).full_tensor() for each in losses]
        mean_loss = torch.stack(full).mean() if full else torch.zeros(())
        dist.all_reduce(mean_loss)
        return mean_loss / 4, square.sqrt()

    return mesh["dp"].get_local_rank(), step


def against_torch(pairs: int = 2) -> tuple[list[list[list[float]]], list[list[float]]]:
    """On a rank: losses and norms of both, and seconds of steps in alternation, theirs twice, after a step of each."""
    config = dataclasses.replace(PRESETS["small"], layers=2, tied=False)
    settings: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4, "fused": True}
    _, _, parallel = built(OURS, config, **settings)
    coordinate, theirs = torch_parallel(config, settings, 2)
    batch = torch.randint(config.vocab, (2, 8, 32), generator=torch.Generator().manual_seed(1))
    inputs, targets = batch[:, 4 * coordinate : 4 * coordinate + 4]
    numbers: dict[Callable, list[list[float]]] = {parallel.step: [], theirs: []}
    times: list[float] = []
    for step in [parallel.step, theirs] + pairs * [parallel.step, theirs, theirs]:
        dist.barrier()
        start = time.perf_counter()
        result = step(inputs, targets)
        dist.barrier()
        times.append(time.perf_counter() - start)
        numbers[step].append([each.item() for each in result])
    return list(numbers.values()), [times[first : first + 3] for first in range(2, len(times), 3)]


def compare(numbers: list[list[list[float]]], times: list[list[float]]) -> None:
    """Print the largest difference of losses and norms, and the time ratios ours / PyTorch and PyTorch / itself."""
    steps = list(zip(*numbers, strict=False))  # theirs has taken more steps
    off = max(abs(a - b) / b for mine, other in steps for a, b in zip(mine, other, strict=True))
    print(f"{len(steps)} steps: losses and norms differ by at most {off:.0e}")
    for name, (a, b) in {"ours / PyTorch": (0, 1), "PyTorch / itself": (2, 1)}.items():
        ratios = sorted(row[a] / row[b] for row in times)
        ms, middle = 1e3 * statistics.median(row[a] for row in times), statistics.median(ratios)
        print(f"{name:17s} {ms:4.0f} ms, ratio {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
