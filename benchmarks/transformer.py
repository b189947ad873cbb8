"""Forward and backward of course_lib's Transformer against transformers' LlamaForCausalLM: time and peak memory.

    python benchmarks/transformer.py        # writes benchmarks/results/transformer_<device>.json

Both have the same weights and the same batch. They run in alternation, and so does the rival against itself: the
spread of that ratio is the noise. Times are medians of 9 pairs.
"""

import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

from course_lib.model import PRESETS, Transformer, loss, to_hf

PAIRS = 9


def step(module: torch.nn.Module, forward) -> None:
    """One forward and backward, until the device has finished it."""
    module.zero_grad()
    forward().backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run) -> float:
    """Wall-clock seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired(run, rival) -> dict[str, float]:
    """Median times of both, and the median and spread of their ratio, from PAIRS runs in alternation after two."""
    times = [(seconds(run), seconds(rival)) for _ in range(PAIRS + 2)][2:]
    ratios = sorted(mine / theirs for mine, theirs in times)
    return {
        "ours_ms": 1e3 * statistics.median(mine for mine, _ in times),
        "rival_ms": 1e3 * statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def peak_mib(run) -> float:
    """MiB at the peak above what was there before: CUDA's allocator, or the profiler's memory events on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as log:
        run()
    events = sorted((e.start_ns(), e.nbytes()) for e in log.profiler.kineto_results.events() if e.name() == "[memory]")
    level = top = 0
    for _, nbytes in events:
        level += nbytes
        top = max(top, level)
    return top / 2**20


def processor() -> str:
    """The model and number of this machine's processors."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    """Measure on this machine's device, print the figures and write them down."""
    gpu = torch.cuda.is_available()
    device, preset, batch, seq = (
        (torch.device("cuda"), "llama3.2-1B", 2, 4096) if gpu else (torch.device("cpu"), "small", 4, 128)
    )
    with device:
        model = Transformer(PRESETS[preset]).to(torch.bfloat16 if gpu else torch.float32)
    theirs = to_hf(model).to(device).train()
    inputs, targets = torch.randint(model.config.vocab, (2, batch, seq), device=device)

    def ours():
        step(model, lambda: loss(model(inputs), targets))

    def rival():
        step(theirs, lambda: loss(theirs(inputs, use_cache=False).logits, targets))

    result = {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if gpu else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "preset": preset,
        "batch": batch,
        "seq": seq,
        "ours_against_llama": paired(ours, rival),
        "llama_against_itself": paired(rival, rival),
        "ours_peak_mib": peak_mib(ours),
        "llama_peak_mib": peak_mib(rival),
    }
    file = Path(__file__).parent / "results" / f"transformer_{device.type}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
