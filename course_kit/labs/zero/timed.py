"""Timelines of a step of stages 1 and 3, and the same steps with PyTorch's classes."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.data_parallel import batch_of
from course_kit.labs.peak import peak_of
from course_lib.recompute.profiling import Span, spans
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.zero import ZeroOptimizer, fully_shard

Parts = tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]


def made(name: str, config: ModelConfig, bucket_mb: float | None = None) -> Parts:
    """Return a model, its fused AdamW, and the function to call after backward. name: "stage 1", "stage 3",
    "ZeroRedundancyOptimizer" or "FSDP2".
    """
    model = Transformer(config)
    options: dict[str, Any] = {"lr": 1e-3, "fused": True}
    if name == "stage 1":
        zero = ZeroOptimizer(model, torch.optim.AdamW, bucket_mb=bucket_mb, **options)
        return model, zero, zero.finish
    if name == "stage 3":
        sharded = fully_shard(model)
        return sharded, torch.optim.AdamW(sharded.parameters(), **options), sharded.finish
    if name.startswith("Zero"):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        options["parameters_as_bucket_view"] = True
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
        return wrapped, optimizer, lambda: None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as fsdp2

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*model.blocks, model]:
        fsdp2(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **options), lambda: None


def profiled(name: str) -> list[Span] | None:
    """Return, on rank 0, the spans of three steps of preset small: forward, backward, wait, update, communication."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler writes no log lines between our outputs
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.set_num_threads(1)
    model, optimizer, finish = made(name, PRESETS["small"], bucket_mb=4)
    inputs, targets = batch_of(dist.get_rank(), PRESETS["small"], batch=2, seq=128)

    def step() -> None:
        with record_function("forward"):
            step_loss = loss(model(inputs), targets)
        with record_function("backward"):
            step_loss.backward()
        with record_function("wait"):
            finish()
        with record_function("update"):
            optimizer.step()
        optimizer.zero_grad()

    def steps(number: int) -> None:
        for _ in range(number):
            step()
        getattr(optimizer, "wait", bool)()  # a profile must not end while a collective is in flight

    steps(1)
    with contextlib.nullcontext() if dist.get_rank() else profile(activities=[ProfilerActivity.CPU]) as prof:
        steps(3)
    return prof and spans(prof)


def step_spans(all_spans: list[Span], names: set[str], with_next_forward: bool) -> tuple[list[Span], float]:
    """Return the spans of the second of three steps, on lanes "compute" and "network 1, 2 …", and its length in ms.

    names: of the spans to show. with_next_forward: include the forward of the third step.
    """
    forwards = [span for span in all_spans if span.name == "forward"]
    start, end = forwards[1].start_ms, forwards[2].end_ms if with_next_forward else forwards[2].start_ms
    shown = []
    for span in all_spans:
        if span.name in names and span.start_ms < end and span.end_ms > start:
            lane = span.lane.replace("communication", "network") if span.lane.startswith("communication") else "compute"
            shown.append(span._replace(lane=lane, start_ms=max(0, span.start_ms - start), end_ms=span.end_ms - start))
    return sorted(shown, key=lambda span: (span.lane, span.start_ms)), end - start


def rivals(names: tuple[str, ...], preset: str = "small", repeats: int = 3) -> tuple[dict, dict, dict]:
    """Return seconds per step, peak MiB of a step and losses of each rival on this rank, with steps in alternation."""
    torch.set_num_threads(1)
    inputs, targets = batch_of(dist.get_rank(), PRESETS[preset], batch=1, seq=128)
    parts = {name: made(name, PRESETS[preset]) for name in names}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def steps(name: str, number: int = 2) -> float:
        """Return the seconds per step of `number` steps; no collective is in flight afterwards."""
        model, optimizer, finish = parts[name]
        dist.barrier()
        start = time.perf_counter()
        for _ in range(number):
            optimizer.zero_grad()
            step_loss = loss(model(inputs), targets)
            step_loss.backward()
            finish()
            optimizer.step()
            losses[name].append(step_loss.detach())
        getattr(optimizer, "wait", bool)()
        return (time.perf_counter() - start) / number

    for name in names:
        steps(name, 1)  # makes the optimizer's states
    times = np.array([[steps(name) for name in names] for _ in range(repeats)])
    peaks = {name: peak_of(functools.partial(steps, name, 1)) for name in names}
    return dict(zip(names, times.T, strict=True)), peaks, {name: torch.stack(losses[name]).numpy() for name in names}
