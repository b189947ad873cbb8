"""Saves and loads of small models: bytes by rank, the next losses, and the cost of a save for the steps around it."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from course_kit.labs.checkpoint.resharding import local_samples
from course_kit.labs.five_d.models import SHALLOW, built
from course_kit.ranks import Ranks
from course_lib.checkpoint.checkpoints import Checkpoints, latest, load
from course_lib.single_gpu.model import PRESETS

STEPS, EVERY = 20, 4  # of the timed run; steps from one save to the next


def three_batches() -> torch.Tensor:
    """Return inputs and targets of three steps, [3, 2, 8, 8]."""
    return torch.randint(97, (3, 2, 8, 8), generator=torch.Generator().manual_seed(1))


def save_checkpoint_of_run(text: str, root: Path) -> tuple[int, list[float]]:
    """On a rank: take a step, save a checkpoint, take two more steps. Return the bytes of the copies, and two
    losses.
    """
    layout, mesh, parallel = built(text, SHALLOW, lr=1e-3, eps=1e-4)
    local, batches = local_samples(layout, mesh), three_batches()
    parallel.step(*batches[0][:, local])
    checkpoints = Checkpoints(parallel, root)
    checkpoints.save(1)
    checkpoints.wait()
    assert checkpoints.failure is None, checkpoints.failure
    losses = [parallel.step(*batch[:, local])[0].item() for batch in batches[1:]]
    return sum(copy.nbytes for copy in checkpoints.copies.values()), losses


def load_checkpoint(text: str, root: Path) -> list[float]:
    """On a rank: two losses of a model with other initial weights after it has loaded the checkpoint."""
    layout, mesh, parallel = built(text, SHALLOW, seed=5, lr=1e-3, eps=1e-4)
    folder = latest(root)
    assert folder is not None
    load(parallel, folder)
    return [parallel.step(*batch[:, local_samples(layout, mesh)])[0].item() for batch in three_batches()[1:]]


def timed_saves(root: str) -> tuple[list[float], list[float]]:
    """On a rank: the seconds of each step, and of each save().

    Every fourth step but the last saves; every other save waits for the disk.
    """
    config = dataclasses.replace(PRESETS["small"], layers=3)
    _, _, parallel = built("dp2,zero1,mb2", config, lr=1e-3)
    batch = torch.randint(256, (2, 2, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
    checkpoints, times, stood = Checkpoints(parallel, Path(root)), [], []
    parallel.step(*batch)
    checkpoints.save(0)  # allocates the memory for the copies
    checkpoints.wait()
    for step in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        parallel.step(*batch)
        if step % EVERY == EVERY - 1 and step + EVERY < STEPS:
            begin_save = time.perf_counter()
            checkpoints.save(step)
            if step % (2 * EVERY) == EVERY - 1:
                checkpoints.wait()
            stood.append(time.perf_counter() - begin_save)
        dist.barrier()
        times.append(time.perf_counter() - start)
    checkpoints.wait()
    assert checkpoints.failure is None, checkpoints.failure
    return times, stood


def stalls(ranks: Ranks) -> tuple[list[float], list[float]]:
    """Return the result of `timed_saves` on rank 0 of two; the checkpoints are removed."""
    folder = tempfile.mkdtemp()
    try:
        return ranks(timed_saves, folder)[0]
    finally:
        shutil.rmtree(folder)


def print_stalls(times: list[float], stood: list[float]) -> None:
    """Print the standstill of either kind of save, its cost with the steps after it, and the time of other steps."""
    quiet = statistics.median(each for step, each in enumerate(times) if step % 8 in (4, 5, 6))
    for first, name in ((3, "waits for the disk"), (7, "written beside")):
        extra = [sum(times[step : step + 4]) - 4 * quiet for step in range(first, 16, 8)]
        standstill = statistics.median(stood[first // 4 :: 2])
        print(f"{name:18s}: training stands still for {1e3 * standstill:4.0f} ms;", end=" ")
        print(f"this step and the three after it take {1e3 * statistics.median(extra):4.0f} ms more")
    print(f"a step without a save: {1e3 * quiet:.0f} ms")
