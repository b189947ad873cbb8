"""Models, steps and measurements of notebook 01: `largest(4)`, `step_peaks()`, `memory_tools()`, `against_llama()`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.hugging_face import to_hf
from course_lib.single_gpu.memory import activation_bytes, param_count, state_bytes
from course_lib.single_gpu.model import PRESETS, Transformer, loss
from course_lib.single_gpu.profile import MemoryProfile

MiB = 2**20


def this_device() -> torch.device:
    """Return the accelerator of this machine, or else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@functools.cache
def text_tokens(count: int = 100_000) -> torch.Tensor:
    """Return about `count` tokens of the corpus, [n], uint8."""
    return ByteTokenizer().encode(corpus(count))


def one_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator,
    begins: Callable[[str], None] = lambda phase: None,
) -> None:
    """Run forward, backward and the optimizer step on the next batch; the gradients of the last step go first.

    begins(phase) is called as "forward", "backward" and "optimizer" begin.
    """
    device = next(model.parameters()).device
    optimizer.zero_grad()
    inputs, targets = (part.to(device) for part in next(batches))
    begins("forward")
    step_loss = loss(model(inputs), targets)
    begins("backward")
    step_loss.backward()
    begins("optimizer")
    optimizer.step()


def largest(batch: int, seq: int = 128) -> dict[str, float]:
    """Return the largest MiB of each category in the second training step of `batch` sequences, FP32, preset small."""
    model = Transformer(PRESETS["small"]).to(this_device())
    optimizer = torch.optim.AdamW(model.parameters())
    batches = TokenBatches(torch.arange(10_000) % 256, batch, seq)
    one_step(model, optimizer, batches)  # makes the optimizer's states
    with MemoryProfile(model, optimizer) as profile:
        one_step(model, optimizer, batches)
    levels = profile.levels()[1]
    return {name: max(levels[name]) / MiB for name in ("parameters", "gradients", "optimizer states", "activations")}


def step_peaks(steps: int = 2) -> list[int]:
    """Return the bytes at the peak of each of the first steps: preset small, FP32, AdamW, 4 x 128 tokens."""
    model = Transformer(PRESETS["small"]).to(this_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = TokenBatches(text_tokens(), batch=4, seq=128)
    with MemoryProfile(model, optimizer) as profile:
        for step in range(steps):
            profile.mark(f"step {step}")
            one_step(model, optimizer, batches)
    return [sum(profile.peak(f"step {step}").values()) for step in range(steps)]


def sum_and_peak(vocab: int) -> tuple[float, dict[str, float]]:
    """Return the MiB that the formulas add up to, and those of each category at the peak of a second step.

    The model is preset small with another vocabulary, in FP32, on 4 x 128 tokens.
    """
    config = dataclasses.replace(PRESETS["small"], vocab=vocab)
    model = Transformer(config).to(this_device())
    optimizer = torch.optim.AdamW(model.parameters())
    batches = TokenBatches(text_tokens(), batch=4, seq=128)
    one_step(model, optimizer, batches)  # makes the optimizer's states
    with MemoryProfile(model, optimizer) as profile:
        one_step(model, optimizer, batches)
    added = sum(state_bytes(param_count(config), "fp32").values())
    added += activation_bytes(config, 4, 128, e=4, fused_norm=this_device().type == "cuda")
    return added / MiB, {name: size / MiB for name, size in profile.peak().items()}


def matmul_flops(size: int = 2048, rounds: int = 8) -> float:
    """Return the floating-point operations per second that a matmul of [size, size] in FP32 reaches on this device."""
    matrix, seconds = torch.randn(size, size, device=this_device()), []
    for _ in range(rounds):
        start = time.perf_counter()
        (matrix @ matrix).sum().item()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the profiler's C++ code writes to stderr."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def profiler_peak(function: Callable[[], object]) -> int:
    """Return the bytes at the peak of the allocator's own events while `function` runs, above what was there before."""
    with quiet(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as log:
        function()
    events = sorted((e.start_ns(), e.nbytes()) for e in log.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(np.cumsum([nbytes for _, nbytes in events]))


def tracker_peak(model: nn.Module, optimizer: torch.optim.Optimizer, function: Callable[[], object]) -> int:
    """Return the bytes at the peak while `function` runs by MemTracker, all categories, parameters included."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        function()
    return sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())


def our_peak(model: nn.Module, optimizer: torch.optim.Optimizer, function: Callable[[], object]) -> int:
    """Return the bytes at the peak while `function` runs by MemoryProfile, parameters included."""
    with MemoryProfile(model, optimizer) as profile:
        function()
    return sum(profile.peak().values())


def memory_tools(tokens: torch.Tensor, rounds: int = 3) -> dict[str, tuple[float, float | None]]:
    """Return the ms of a first training step under each memory tool, and the MiB that the tool says for its peak.

    Preset small on 2 x 128 of `tokens` ([n]), on the CPU, the tools in alternation; the last entry is without a tool.
    """
    warnings.filterwarnings("ignore", module="torch")
    model = Transformer(PRESETS["small"])
    optimizer = torch.optim.AdamW(model.parameters())
    batches = TokenBatches(tokens, batch=2, seq=128)
    weights = 4 * param_count(model.config)
    tools = {
        "MemoryProfile": lambda step: our_peak(model, optimizer, step),
        "torch.profiler": lambda step: profiler_peak(step) + weights,  # it does not see what was there before
        "MemTracker": lambda step: tracker_peak(model, optimizer, step),
        "no tool": lambda step: step(),
    }
    sizes, times = {}, {name: [] for name in tools}
    for _ in range(rounds):
        for name, tool in tools.items():
            optimizer.state.clear()
            model.zero_grad()
            start = time.perf_counter()
            sizes[name] = tool(lambda: one_step(model, optimizer, batches))
            times[name].append(time.perf_counter() - start)
    return {name: (np.median(times[name][1:]) * 1e3, sizes[name] and sizes[name] / MiB) for name in tools}


@dataclasses.dataclass
class Run:
    """Forward and backward of one model: what came out, the time of each turn, the peak above the weights."""

    loss: float
    grad_norm: float
    seconds: np.ndarray
    peak_mib: float


def against_llama(tokens: torch.Tensor, rounds: int = 8) -> dict[str, Run] | None:
    """Return a `Run` of our model and of Hugging Face's, which have the same weights and the same batch.

    Preset small on 2 x 128 of `tokens` ([n]), on the CPU, in alternation; the first turn's time is left out. None
    without transformers.
    """
    model = Transformer(PRESETS["small"])
    try:
        theirs = to_hf(model).train()
    except ImportError:
        return None
    inputs, targets = next(TokenBatches(tokens, batch=2, seq=128))
    models = {
        "Transformer (ours)": (model, lambda: loss(model(inputs), targets)),
        "LlamaForCausalLM": (theirs, lambda: loss(theirs(inputs, use_cache=False).logits, targets)),
    }
    times, found = {name: [] for name in models}, {}
    for _ in range(rounds):
        for name, (module, forward) in models.items():
            module.zero_grad()
            start = time.perf_counter()
            value = forward()
            value.backward()
            times[name].append(time.perf_counter() - start)
            found[name] = value.item(), nn.utils.get_total_norm([p.grad for p in module.parameters()]).item()
    runs = {}
    for name, (module, forward) in models.items():
        module.zero_grad()
        peak = profiler_peak(lambda forward=forward: forward().backward())
        runs[name] = Run(*found[name], np.array(times[name][1:]), peak / MiB)
    return runs
