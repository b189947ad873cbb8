"""Runs of notebook 05: bytes sent per step, clipping by three norms, a state that moves to another number of ranks."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_kit.labs.collectives import published
from course_kit.labs.data_parallel import batch_of
from course_kit.labs.zero.models import TINY
from course_kit.ranks import Ranks
from course_kit.typed import grad_of, world
from course_lib.collectives.into_tensor import reduce_scatter_tensor
from course_lib.collectives.traffic import count_traffic
from course_lib.data_parallel.replicas import DataParallel, find_diverged_params
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.zero import ZeroOptimizer, by_hand, full_sharding, fully_shard
from course_lib.zero.shards import FlatLayout

FAULTS = ("own part", None, "sum of norms")  # of runs 0 to 2 in the lab
State = dict[str, torch.Tensor]


def sent_by_hand(config: ModelConfig = TINY) -> tuple[int, int]:
    """Return the bytes that this rank sends in a step of stage 1 by hand, and in an all-reduce of its gradients.

    The second is the formula of notebook 04, with float32 gradients.
    """
    model = Transformer(config)
    inputs, targets = batch_of(dist.get_rank(), config)
    layout = FlatLayout(list(model.parameters()), world())
    values, gradient = torch.zeros(layout.padded), torch.zeros(layout.padded)
    for parameter, view in zip(model.parameters(), layout.views(values), strict=True):
        parameter.data = view.copy_(parameter.detach())
    loss(model(inputs), targets).backward()
    for parameter, view in zip(model.parameters(), layout.views(gradient), strict=True):
        view.copy_(grad_of(parameter))

    def update(shard: torch.Tensor, mean: torch.Tensor) -> None:
        shard.sub_(0.1 * mean)

    with count_traffic() as traffic:
        by_hand.zero_1_step(layout, values, gradient, update)
    n = layout.world_size
    return traffic.bytes, 2 * (n - 1) * 4 * layout.numel // n


def clipped(fault: str | None, steps: int = 12, max_norm: float = 0.03, lr: float = 8.0) -> tuple[dict, list[str]]:
    """Return this rank's records of a run with stage 1 by hand, and the names of tensors that differ at the end.

    By step: the loss of the local batch, the norm that it clips by (used), the norm of its local shard of the mean
    gradient (shard), and the cosine between update and gradient. fault: one of FAULTS.
    """
    torch.manual_seed(0)
    config, n, rank = PRESETS["debug"], dist.get_world_size(), dist.get_rank()
    model = Transformer(config)
    records: dict[str, list[float]] = {"loss": [], "used": [], "shard": [], "cosine": []}
    parameters: list[torch.Tensor] = list(model.parameters())
    layout = FlatLayout(parameters, world())
    flat, shard = torch.zeros(layout.padded), torch.zeros(layout.shard_numel)
    inputs, targets = batch_of(rank, config, seq=32)
    for _ in range(steps):
        model.zero_grad()
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        for parameter, view in zip(parameters, layout.views(flat), strict=True):
            view.copy_(grad_of(parameter))
        reduce_scatter_tensor(shard, flat)
        shard /= n
        square = shard.square().sum()
        norm = square.sqrt()
        if fault is None:
            dist.all_reduce(square)
            norm = square.sqrt()
        elif fault == "sum of norms":
            dist.all_reduce(norm)
        scaled = shard * (max_norm / norm).clamp(max=1)
        gradient, update = (torch.cat([v.flatten() for v in layout.gather(part)]) for part in (shard, scaled))
        cosine = gradient @ update / gradient.norm() / update.norm()
        numbers = {"loss": step_loss, "used": norm, "shard": shard.norm(), "cosine": cosine}
        for name, number in numbers.items():
            records[name].append(number.item())
        with torch.no_grad():
            for parameter, part in zip(parameters, layout.gather(scaled), strict=True):
                parameter.sub_(lr * part)
    return records, find_diverged_params(model)


@functools.cache
def clipped_runs(ranks: Ranks) -> list[list[tuple[dict, list[str]]]]:
    """Return the results of `clipped` with each of FAULTS, as lists with one entry per rank. They are cached."""
    return [ranks(clipped, fault) for fault in FAULTS]


def train_on(group: dist.ProcessGroup, zero_state: dict | None, model_state: State | None, steps: int) -> tuple:
    """Train some more steps of stage 2, from a state if it is given; return the states of optimizer and model.

    The ranks of the group divide the four sequences of a step.
    """
    model = Transformer(TINY)
    zero = ZeroOptimizer(model, torch.optim.AdamW, group, stage=2, bucket_mb=0.02, lr=1e-3)
    if zero_state is not None and model_state is not None:
        model.load_state_dict(model_state)
        zero.load_state_dict(zero_state)
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    inputs, targets = torch.cat([batch_of(r, TINY, batch=1) for r in range(4)], 1).chunk(n, 1)[rank].unbind()
    for _ in range(steps):
        zero.zero_grad()
        loss(model(inputs), targets).backward()
        zero.step()
    return zero.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}


def farthest(got: State, expected: State) -> tuple[str, float]:
    """Return the name of the tensor with the largest relative difference from the expected tensor, and the
    difference.
    """
    distances = {name: ((got[name] - e).abs().max() / e.abs().max()).item() for name, e in expected.items()}
    name = max(distances, key=lambda name: distances[name] if distances[name] == distances[name] else 1e9)
    return name, distances[name]


def sent_per_step(stage: int, config: ModelConfig) -> tuple[int, int]:
    """Return this rank's all-gathers and bytes sent in forward and backward of stage 0 or 3."""
    model = Transformer(config)
    sharded = DataParallel(model) if stage == 0 else fully_shard(model)
    inputs, targets = batch_of(dist.get_rank(), config)
    with count_traffic() as traffic:
        loss(sharded(inputs), targets).backward()
        sharded.finish()
    return traffic.select("all_gather").calls, traffic.bytes


def sent_with_replicas(replicas: int, config: ModelConfig, as_one_unit: bool = False) -> tuple[int, int, int, int]:
    """Return the elements that this rank keeps, and the bytes of its all-gathers, reduce-scatters and all-reduces in a
    step of two micro-batches over a mesh of four ranks.
    """
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replica", "shard"))
    model = Transformer(config)
    sharded = fully_shard(model, mesh, units=[model] if as_one_unit else None)
    inputs, targets = batch_of(dist.get_rank(), config)
    with count_traffic() as traffic:
        with sharded.no_sync():
            loss(sharded(inputs), targets).backward()
        loss(sharded(inputs), targets).backward()
        sharded.finish()
    bytes_sent = (traffic.select(name).bytes for name in ("all_gather", "reduce_scatter", "all_reduce"))
    gathered, scattered, reduced = bytes_sent
    return sum(p.numel() for p in sharded.parameters()), gathered, scattered, reduced


def gather_ratios(tokens: int, reached: float = 0.4) -> dict[int, float]:
    """Return the time of stage 3's all-gather over that of forward by number of GPUs, at the published bandwidths.

    tokens: per GPU; reached: the share of an H100's peak that forward reaches.
    """
    each = zip(published("all_gather", "gpus"), published("all_gather", "median_gb_s"), strict=True)
    return {round(n): full_sharding.gather_ratio(tokens, round(n), 1e9 * s, reached * 989.5e12) for n, s in each}
