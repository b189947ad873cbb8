"""Time of a step, by cause: FLOPs needed and executed, MFU and HFU, a profile, its timeline, its symptoms.

MFU = needed FLOPs / (step time x peak), HFU = executed FLOPs / (step time x peak) (Chowdhery et al. 2022, PaLM,
appendix B). Recomputation executes more than the model needs: it raises HFU, and lowers MFU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from course_lib.single_gpu.memory import parameter_parts
from course_lib.single_gpu.model import ModelConfig, loss


# exercise 02.7
def step_flops(config: ModelConfig, batch: int, seq: int, recompute: str = "none") -> tuple[int, int]:
    """Return the FLOPs of the matmuls of forward and backward on batch x seq tokens: (needed, executed).

    The core is a flash kernel, attention counts as if unmasked. recompute: none, selective (as none), or full, by
    torch.utils.checkpoint, which leaves out the block's last matmul.
    """
    parts = parameter_parts(config)
    matmuls = 2 * (parts["q_o"] + parts["kv"] + parts["mlp"])
    attention, head = 4 * config.attention_width * seq, 2 * config.vocab * config.hidden
    needed = 3 * (config.layers * (matmuls + attention) + head)
    executed = needed + config.layers * 2 * config.attention_width * seq
    if recompute == "full":
        executed += config.layers * (matmuls + attention - 2 * config.hidden * config.ffn_hidden)
    return batch * seq * needed, batch * seq * executed


def count_flops(run) -> int:
    """Return the FLOPs of all matmuls that `run()` executes, including fused attention on the CPU."""

    def all_heads(q, k):  # PyTorch 2.11 counts attention only where K and V have as many heads as Q
        return torch.Size((k[0], q[1], *k[2:]))

    def forward(q, k, v, *args, **kwargs):
        return sdpa_flop_count(q, all_heads(q, k), all_heads(q, v))

    def backward(grad_out, q, k, v, *args, **kwargs):
        return sdpa_backward_flop_count(grad_out, q, all_heads(q, k), all_heads(q, v))

    formulas: dict[Any, Callable[..., int]] = {}
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        formulas[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = forward
        formulas[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = backward
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run()
    return counter.get_total_flops()


def hfu(executed_flops: float, step_s: float, peak: float) -> float:
    """Return the hardware FLOPs utilization of one device, 0 to 1; peak: its floating-point operations per second."""
    return executed_flops / (step_s * peak)


def profiler(trace: str | Path | None = None, wait: int = 1, warmup: int = 1, active: int = 3) -> profile:
    """Return a torch.profiler.profile that records `active` steps, after wait + warmup: call `.step()` at the end of
    each.

    trace: a file for Perfetto (ui.perfetto.dev) or chrome://tracing.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    ready = None if trace is None else lambda prof: prof.export_chrome_trace(str(trace))
    return profile(activities=activities, schedule=plan, on_trace_ready=ready)


def profile_step(
    step: Callable[[], object], trace: str | Path | None = None, wait: int = 1, warmup: int = 1, active: int = 3
) -> profile:
    """Call `step()` wait + warmup + active times under a `profiler`. Returns it, for `.key_averages()` and `spans`."""
    with profiler(trace, wait, warmup, active) as prof:
        for _ in range(wait + warmup + active):
            step()
            prof.step()
    return prof


class Span(NamedTuple):
    """One event of a profile."""

    lane: str  # "phases", "CPU", "CPU 2", "communication", "communication 2", "GPU stream 7", ...
    name: str
    start_ms: float  # since the first span began
    end_ms: float


def spans(prof: profile) -> list[Span]:
    """Return the events of a profile, by start: marks (record_function) as phases, outermost operators by thread,
    kernels by stream, and the collectives that gloo and NCCL note.
    """
    events: list[tuple[float, float, str, str]] = []
    threads: dict[str, list[int]] = {"CPU": [], "communication": []}
    for event in prof.events():
        if event.device_type != torch.autograd.DeviceType.CPU and event.is_user_annotation:
            continue  # the shadow of a mark on the GPU
        elif event.device_type != torch.autograd.DeviceType.CPU:
            lane = f"GPU stream {event.device_resource_id}"
        elif event.name.startswith(("gloo:", "nccl:")):
            lane = "communication"
        elif event.is_user_annotation:
            lane = "phases"
        elif event.cpu_parent is None or event.cpu_parent.is_user_annotation:
            lane = "CPU"
        else:
            continue  # inside of another operator
        if (known := threads.get(lane)) is not None:
            known += [event.thread] * (event.thread not in known)
            number = known.index(event.thread) + 1
            lane = lane if number == 1 else f"{lane} {number}"
        events.append((event.time_range.start, event.time_range.end, lane, event.name))
    zero = min((start for start, *_ in events), default=0)
    return [Span(lane, name, (a - zero) / 1e3, (b - zero) / 1e3) for a, b, lane, name in sorted(events)]


# exercise 02.10
def symptoms(prof: profile) -> dict[str, float]:
    """Return three numbers of a profile, each of one step on average.

    data_share: the part of a step's time in phase `data`, 0 to 1. host_reads: how often a value is read on the host
    (aten::_local_scalar_dense). optimizer_ops: outermost operators on the CPU that start in phase `optimizer`.
    """
    everything = spans(prof)
    steps = [span for span in everything if span.name.startswith("ProfilerStep")]

    def took(marks):
        return sum(mark.end_ms - mark.start_ms for mark in marks)

    def phase(name):
        return [span for span in everything if span.lane == "phases" and span.name == name]

    inside = [
        span
        for span in everything
        if span.lane.startswith("CPU") and any(p.start_ms <= span.start_ms < p.end_ms for p in phase("optimizer"))
    ]
    reads = sum(event.name == "aten::_local_scalar_dense" for event in prof.events())
    return {
        "data_share": took(phase("data")) / took(steps),
        "host_reads": reads / len(steps),
        "optimizer_ops": len(inside) / len(steps),
    }


# exercise 02.11
def marked_training(model: nn.Module, text: str) -> Callable[[], torch.Tensor]:
    """Return a function that makes one training step on `text`, and returns its loss, detached.

    The phases data, forward, backward, clip and optimizer are marked for a profile. Row r of the 4 in batch i is 65
    bytes of the text from (37 (4 i + r) 64) % (n - 65) on. Gradients are clipped to norm 1; SGD, lr 0.05, momentum 0.9.
    No value is read on the host, few operators run in the optimizer, and the text is made into numbers once.
    """
    device = next(model.parameters()).device
    numbers, count = torch.tensor(list(text.encode())), iter(range(10**9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)

    def data(step, batch=4, seq=64):
        starts = [(37 * (step * batch + row) * seq) % (len(numbers) - seq - 1) for row in range(batch)]
        windows = torch.stack([numbers[start : start + seq + 1] for start in starts])
        return windows[:, :-1].to(device), windows[:, 1:].to(device)

    def step():
        with record_function("data"):
            inputs, targets = data(next(count))
        with record_function("forward"):
            step_loss = loss(model(inputs), targets)
        with record_function("backward"):
            step_loss.backward()
        with record_function("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return step_loss.detach()

    return step
