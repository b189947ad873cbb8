"""Tensor parallelism against PyTorch's DTensor: time, memory, collectives and results on the same model."""

from __future__ import annotations

import functools
import time
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_kit.labs.peak import peak_of
from course_kit.labs.tensor_parallel.models import batch_of, relative_error, split_model
from course_kit.labs.tensor_parallel.timeline import SHORT
from course_kit.typed import grad_of
from course_lib import tensor_parallel
from course_lib.collectives.traffic import count_traffic
from course_lib.single_gpu.model import ModelConfig, Transformer, loss


def split_by_dtensor(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Split a model over a mesh of one dimension with PyTorch's DTensor, in place; return it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    config, replicated = model.config, Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=replicated),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for number in range(config.layers):
        block = f"blocks.{number}"
        for part, inputs in (("attention", (replicated, None, None)), ("mlp", (replicated,))):
            plan[f"{block}.{part}"] = PrepareModuleInput(input_layouts=inputs, desired_input_layouts=inputs)
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.o_proj", "mlp.down_proj"):
            plan[f"{block}.{name}"] = RowwiseParallel()
    embedding, head = model.embedding, model.head
    assert embedding is not None and head is not None
    if config.tied:  # split separately, tied again afterwards
        head.weight = nn.Parameter(head.weight.detach().clone())
    parallelize_module(model, mesh, plan)
    if config.tied:
        head.weight = embedding.weight
    return model


class Comparison(NamedTuple):
    """Measurements of a step of "ours", "DTensor" and "DTensor again", by these names."""

    times: dict[str, np.ndarray]  # seconds of each repeat
    peaks: dict[str, float]  # MiB at the peak of a step above its start
    calls: dict[str, int]  # collectives
    losses: dict[str, float]
    gradient_error: float  # the largest relative difference between gradients of ours and DTensor's


def compare(
    group: dist.ProcessGroup, config: ModelConfig = SHORT, batch: int = 4, seq: int = 128, repeats: int = 5
) -> Comparison:
    """On a rank: compare steps of ours, of DTensor and of DTensor again, in alternation."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    inputs, targets = batch_of(config, batch, seq)
    models: dict[str, nn.Module] = {"ours": split_model(config, group)}
    mesh = DeviceMesh.from_group(group, "cpu")
    models |= {name: split_by_dtensor(Transformer(config), mesh) for name in ("DTensor", "DTensor again")}

    def step(name: str) -> torch.Tensor:
        model = models[name]
        model.zero_grad()
        if name == "ours":
            step_loss = tensor_parallel.vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab)
            step_loss.backward()
            return step_loss
        with loss_parallel():
            step_loss = loss(model(inputs), targets)
            step_loss.backward()
        return cast(DTensor, step_loss).full_tensor()

    def local(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    losses, calls = {}, {}
    for name in models:
        with count_traffic() as traffic:
            losses[name] = step(name).item()
        calls[name] = traffic.calls
    pairs = zip(models["ours"].parameters(), models["DTensor"].parameters(), strict=True)
    worst = max(relative_error(p.grad, local(grad_of(q))) for p, q in pairs)
    times: list[list[float]] = []
    for _ in range(repeats + 1):
        times.append([])
        for name in models:
            dist.barrier(group)
            start = time.perf_counter()
            step(name)
            times[-1].append(time.perf_counter() - start)
    peaks = {name: min(peak_of(functools.partial(step, name)) for _ in range(2)) for name in models}
    return Comparison(dict(zip(models, np.array(times[1:]).T, strict=True)), peaks, calls, losses, worst)
