"""Jobs that hang or are slow, for the flight recorder: three faults drawn by chance, and a slow rank."""

from __future__ import annotations

import tempfile
import time

import torch
import torch.distributed as dist

from course_kit.labs.five_d.models import ADAMW, after_steps, built, local_batch
from course_kit.ranks import RankError, Ranks
from course_kit.typed import transformer_blocks
from course_lib.five_d import flight_records
from course_lib.five_d.flight_records import CollectiveRecord, Watchdog

JOBS, FAULTS = "ABC", ("left", "alone", "circle")
Records = tuple[dict[str, list[int]], dict[int, list[CollectiveRecord]]]  # groups by name, records by rank


def planted(number: int) -> tuple[str, list[int]]:
    """Return the fault of job A, B or C, by number, and the ranks to blame: drawn by chance."""
    draw = torch.Generator().manual_seed(4100)
    fault = FAULTS[int(torch.randperm(3, generator=draw)[number])]
    guilty = int(torch.randint(8, (3,), generator=draw)[number])
    return fault, sorted([guilty, guilty ^ 5]) if fault == "circle" else [guilty]  # 5: the other dp and tp


def hanging_job(job: int, folder: str) -> None:
    """On a rank: take a good step, then a step with a fault; the watchdog writes the records when it takes too long."""
    layout, mesh, parallel = built("dp2,pp2,tp2,mb2")
    inputs, targets = local_batch(layout, mesh)
    parallel.gradients(inputs, targets)
    fault, guilty = planted(job)
    to_blame = dist.get_rank() in guilty
    with Watchdog(folder, 1.2):
        if fault == "left" and to_blame:
            time.sleep(60)
        parallel.gradients(inputs, targets)
        if fault == "alone" and to_blame:
            dist.barrier()
        for group in [mesh.dp, mesh.tp] if fault == "circle" and to_blame else [mesh.tp, mesh.dp]:
            dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(5))


def warm_up() -> None:
    """On a rank: take a full step, so that all modules are imported."""
    after_steps(built("dp8", **ADAMW)[2], 1)


def hung_jobs(ranks: Ranks) -> dict[str, Records]:
    """Run jobs A, B and C on eight ranks, each until the ranks give up; print the launcher's message for each.

    Return the records that the watchdogs have written, by job.
    """
    records = {}
    ranks(warm_up)
    with ranks.within(5):
        for number, job in enumerate(JOBS):
            folder = tempfile.mkdtemp()
            try:
                ranks(hanging_job, number, folder)
            except RankError as error:
                print(f"job {job}: {str(error).split(chr(10))[0].split(' They')[0]}")
            records[job] = flight_records.read_records(folder)
    return records


def slow_job(guilty: int | None, folder: str, pause_s: float = 0.08, steps: int = 4) -> float:
    """On a rank: seconds per step of data and tensor parallelism, with one rank that takes longer for each layer."""
    layout, mesh, parallel = built("dp4,tp2,mb2")
    inputs, targets = local_batch(layout, mesh)
    for block in transformer_blocks(parallel.stages["0"]) if dist.get_rank() == guilty else ():
        block.register_forward_pre_hook(lambda *_: time.sleep(pause_s))
    parallel.gradients(inputs, targets)
    dist.barrier()
    begin = time.time_ns()
    for _ in range(steps):
        parallel.gradients(inputs, targets)
    spent = (time.time_ns() - begin) / 1e9 / steps
    flight_records.dump_records(folder, begin)
    return spent


def slow_runs(ranks: Ranks, steps: int = 4) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds per step of each of eight ranks, and the seconds per step that other ranks waited for it, with
    and without a slow rank.
    """
    guilty, results = int(torch.randperm(8, generator=torch.Generator().manual_seed(11))[0]), {}
    for name, rank in (("no slow rank", None), ("a slow rank", guilty)):
        folder = tempfile.mkdtemp()
        times = ranks(slow_job, rank, folder, steps=steps)
        late = flight_records.straggler_delay(*flight_records.read_records(folder))
        results[name] = times, [late[each] / steps for each in range(len(ranks))]
    return results
