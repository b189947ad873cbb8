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

from course_kit.typed import grad_of
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
    """Run forward, backward and the optimizer step on the next batch; after freeing the gradients of the last step.

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
    """Return the total MiB by the formulas, and the MiB of each category at the peak of a second step.

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


def matmul_flops(size: int = 2048, repeats: int = 8) -> float:
    """Return the floating-point operations per second that a matmul of [size, size] in FP32 reaches on this device."""
    matrix, seconds = torch.randn(size, size, device=this_device()), []
    for _ in range(repeats):
        start = time.perf_counter()
        (matrix @ matrix).sum().item()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the output of the profiler's C++ code on stderr."""
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def profiler_peak(function: Callable[[], object]) -> int:
    """Return the bytes at the peak of the allocator's own events while `function` runs, above the start."""
    with quiet(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as log:
        function()
    events = sorted((e.start_ns(), e.nbytes()) for e in log.profiler.kineto_results.events() if e.name() == "[memory]")
    return int(max(np.cumsum([nbytes for _, nbytes in events])))


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


def memory_tools(tokens: torch.Tensor, repeats: int = 3) -> dict[str, tuple[float, float | None]]:
    """Return the ms of a first training step under each memory tool, and the peak MiB that the tool reports.

    Preset small on 2 x 128 of `tokens` ([n]), on the CPU, the tools in alternation; the last entry is without a tool.
    """
    warnings.filterwarnings("ignore", module="torch")
    model = Transformer(PRESETS["small"])
    optimizer = torch.optim.AdamW(model.parameters())
    batches = TokenBatches(tokens, batch=2, seq=128)
    weights = 4 * param_count(model.config)
    tools: dict[str, Callable[[Callable[[], None]], int | None]] = {
        "MemoryProfile": lambda step: our_peak(model, optimizer, step),
        "torch.profiler": lambda step: profiler_peak(step) + weights,  # it does not see earlier allocations
        "MemTracker": lambda step: tracker_peak(model, optimizer, step),
        "no tool": lambda step: step(),
    }
    sizes: dict[str, int | None] = {}
    times: dict[str, list[float]] = {name: [] for name in tools}
    for _ in range(repeats):
        for name, tool in tools.items():
            optimizer.state.clear()
            model.zero_grad()
            start = time.perf_counter()
            sizes[name] = tool(lambda: one_step(model, optimizer, batches))
            times[name].append(time.perf_counter() - start)
    return {name: (float(np.median(times[name][1:])) * 1e3, mib(sizes[name])) for name in tools}


def mib(size: int | None) -> float | None:
    """Return bytes in MiB; None for None."""
    return None if size is None else size / MiB


@dataclasses.dataclass
class Run:
    """Forward and backward of one model: results, the time of each repeat, the peak above the weights."""

    loss: float
    grad_norm: float
    seconds: np.ndarray
    peak_mib: float


def against_llama(tokens: torch.Tensor, repeats: int = 8) -> dict[str, Run] | None:
    """Return a `Run` of our model and of Hugging Face's, which have the same weights and the same batch.

    Preset small on 2 x 128 of `tokens` ([n]), on the CPU, in alternation; the time of the first repeat is left out.
    None without transformers.
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
    times: dict[str, list[float]] = {name: [] for name in models}
    results: dict[str, tuple[float, float]] = {}
    for _ in range(repeats):
        for name, (module, forward) in models.items():
            module.zero_grad()
            start = time.perf_counter()
            value = forward()
            value.backward()
            times[name].append(time.perf_counter() - start)
            results[name] = value.item(), nn.utils.get_total_norm([grad_of(p) for p in module.parameters()]).item()
    runs = {}
    for name, (module, forward) in models.items():
        module.zero_grad()

        def backward(forward: Callable[[], torch.Tensor] = forward) -> None:
            forward().backward()

        peak = profiler_peak(backward)
        runs[name] = Run(*results[name], np.array(times[name][1:]), peak / MiB)
    return runs
