"""Helpers that the comparisons of this folder share: runs in alternation, peak memory, and the machine."""

import datetime
import json
import os
import platform
import re
import statistics
import time
from pathlib import Path

import torch

PAIRS = 9


def seconds(run) -> float:
    """Return the wall-clock seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired(run, rival, before=lambda: None, pairs: int | None = None) -> dict[str, float]:
    """Return the median times of both, and the median and spread of their ratio, from `pairs` runs in alternation after
    two. pairs: None for PAIRS, which a benchmark sets.

    `before` is called before each run and is not timed.
    """
    times = []
    for _ in range((PAIRS if pairs is None else pairs) + 2):
        pair = []
        for each in (run, rival):
            before()
            pair.append(seconds(each))
        times.append(pair)
    times = times[2:]
    ratios = sorted(mine / theirs for mine, theirs in times)
    return {
        "ours_ms": 1e3 * statistics.median(mine for mine, _ in times),
        "rival_ms": 1e3 * statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def peak_mib(run) -> float:
    """Return the MiB at the peak above those allocated before: from CUDA's allocator, or the profiler's memory events
    on a CPU.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    from course_kit.labs.peak import peak_of

    return peak_of(run)


def processor() -> str:
    """Return the model and number of this machine's processors."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def gpu_word(name: str | None = None) -> str:
    """Return a GPU's name, this machine's by default, as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "_", (name or torch.cuda.get_device_name()).lower().removeprefix("nvidia "))


def save(name: str, figures: dict, where: str | None = None) -> str:
    """Write results/NAME_WHERE.json (where: cuda or cpu if None) with the date and the machine; return the text."""
    gpu = torch.cuda.is_available()
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if gpu else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    text = json.dumps(about | figures, indent=1)
    file = Path(__file__).parent / "results" / f"{name}_{where or ('cuda' if gpu else 'cpu')}.json"
    file.write_text(text + "\n")
    return text


def write(name: str, figures: dict) -> None:
    """Write results/NAME_DEVICE.json, and print it."""
    print(save(name, figures))
