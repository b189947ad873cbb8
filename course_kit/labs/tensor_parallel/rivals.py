"""Tensor parallelism against PyTorch's DTensor: the same model and tokens, time, memory, collectives and results."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_kit.labs.peak import peak_of
from course_kit.labs.tensor_parallel.models import batch_of, relative_error, split_model
from course_kit.labs.tensor_parallel.timeline import SHORT
from course_lib import tensor_parallel
from course_lib.collectives.traffic import count_traffic
from course_lib.single_gpu.model import ModelConfig, Transformer, loss


def split_by_dtensor(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Split a model over a mesh of one dimension with PyTorch's DTensor, in place; return it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    config, whole = model.config, Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=whole),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for number in range(config.layers):
        block = f"blocks.{number}"
        for part, inputs in (("attention", (whole, None, None)), ("mlp", (whole,))):
            plan[f"{block}.{part}"] = PrepareModuleInput(input_layouts=inputs, desired_input_layouts=inputs)
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.o_proj", "mlp.down_proj"):
            plan[f"{block}.{name}"] = RowwiseParallel()
    if config.tied:  # split one by one, tied again afterwards
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    parallelize_module(model, mesh, plan)
    if config.tied:
        model.head.weight = model.embedding.weight
    return model


class Comparison(NamedTuple):
    """Measurements of a step of "ours", "DTensor" and "DTensor again", by these names."""

    times: dict[str, np.ndarray]  # seconds of each round
    peaks: dict[str, float]  # MiB of a step above what was there before
    calls: dict[str, int]  # collectives
    losses: dict[str, float]
    gradient_error: float  # the largest relative difference between gradients of ours and DTensor's


def compare(
    group: dist.ProcessGroup, config: ModelConfig = SHORT, batch: int = 4, seq: int = 128, rounds: int = 5
) -> Comparison:
    """On a rank: steps of ours, of DTensor and of DTensor once more, in alternation."""
    from torch.distributed.tensor.parallel import loss_parallel

    inputs, targets = batch_of(config, batch, seq)
    models = {"ours": split_model(config, group)}
    mesh = DeviceMesh.from_group(group, "cpu")
    models |= {name: split_by_dtensor(Transformer(config), mesh) for name in ("DTensor", "DTensor again")}

    def step(name):
        model = models[name]
        model.zero_grad()
        if name == "ours":
            step_loss = tensor_parallel.vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab)
            step_loss.backward()
            return step_loss
        with loss_parallel():
            step_loss = loss(model(inputs), targets)
            step_loss.backward()
        return step_loss.full_tensor()

    losses, calls = {}, {}
    for name in models:
        with count_traffic() as traffic:
            losses[name] = step(name).item()
        calls[name] = traffic.calls
    pairs = zip(models["ours"].parameters(), models["DTensor"].parameters(), strict=True)
    worst = max(relative_error(p.grad, q.grad.to_local() if hasattr(q.grad, "to_local") else q.grad) for p, q in pairs)
    times = []
    for _ in range(rounds + 1):
        times.append([])
        for name in models:
            dist.barrier(group)
            start = time.perf_counter()
            step(name)
            times[-1].append(time.perf_counter() - start)
    peaks = {name: min(peak_of(lambda name=name: step(name)) for _ in range(2)) for name in models}
    return Comparison(dict(zip(models, np.array(times[1:]).T, strict=True)), peaks, calls, losses, worst)
