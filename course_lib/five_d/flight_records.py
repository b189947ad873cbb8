"""The records of each rank's flight recorder, and their joint diagnosis.

PyTorch keeps the last TORCH_FR_BUFFER_SIZE collectives of a process in a ring buffer: name, group, number within the
group, sizes, time of issue. (Sends and receives are in it on NCCL, not on gloo.) Set the variable before the process
groups are made. `Watchdog` writes the buffer to a folder when a step takes too long.

    find_desync       a hang: the ranks that have not issued a collective, or have issued another one
    straggler_delay   a slow job: the rank that the others wait for

(PyTorch, "Flight Recorder for Debugging Stuck Jobs"; Jiang et al. 2024, MegaScale, §5, for stragglers.)
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist


class CollectiveRecord(NamedTuple):
    """One collective, as issued by one rank."""

    group: str  # the group's name, the same on all its ranks
    number: int  # among the group's collectives, from 1
    name: str  # all_reduce, ...
    sizes: tuple  # of the inputs
    time_ns: int  # of issue


def entries() -> list[dict]:
    """Return the entries of this process's flight recorders; NCCL has its own. (Private functions of torch 2.13.)"""
    c10d = torch._C._distributed_c10d
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return [entry for dump in dumps if dump for entry in json.loads(dump()).get("entries", [])]


def dump_records(folder: str | Path, since_ns: int = 0) -> Path:
    """Write the collectives that this rank has issued since `since_ns` (time.time_ns()), and its groups' ranks, to
    folder/rank_N.json. Return the file.

    Destroyed groups are omitted; if groups were made after that, pass since_ns.
    """
    groups = {
        name: dist.get_process_group_ranks(group) for group, name in dist.distributed_c10d._world.pg_names.items()
    }
    records = [
        (e["process_group"][0], e["collective_seq_id"], e["profiling_name"].split(":")[-1], e["input_sizes"], at)
        for e in entries()
        if not e["is_p2p"] and e["process_group"][0] in groups and (at := e["time_created_ns"]) >= since_ns
    ]
    file = Path(folder) / f"rank_{dist.get_rank()}.json"
    file.write_text(json.dumps({"groups": groups, "records": records}))
    return file


def read_records(folder: str | Path) -> tuple[dict[str, list[int]], dict[int, list[CollectiveRecord]]]:
    """Return the groups' ranks by name, and the records by rank, from all files in a folder."""
    groups: dict[str, list[int]] = {}
    records = {}
    for file in sorted(Path(folder).glob("rank_*.json")):
        contents = json.loads(file.read_text())
        groups |= contents["groups"]
        rank = int(file.stem.removeprefix("rank_"))
        records[rank] = [
            CollectiveRecord(group, number, name, tuple(map(tuple, sizes)), at)
            for group, number, name, sizes, at in contents["records"]
        ]
    return groups, records


class Watchdog:
    """`with Watchdog(folder, timeout_s):` writes the collectives that the block has issued, if it takes longer.

    All ranks must enter the block at the same point of the program, so that their records begin with the same
    collectives. On a GPU the block must end by waiting for the device; otherwise it ends before a hang shows.
    """

    def __init__(self, folder: str | Path, timeout_s: float):
        self.folder, self.timeout_s = Path(folder), timeout_s
        self.folder.mkdir(parents=True, exist_ok=True)  # now, not when the block hangs

    def __enter__(self):
        self.timer = threading.Timer(self.timeout_s, dump_records, [self.folder, time.time_ns()])
        self.timer.daemon = True
        self.timer.start()
        return self

    def __exit__(self, *error):
        self.timer.cancel()


def described(record: CollectiveRecord) -> str:
    """Return what a group's ranks must agree on: the collective and its sizes. All-to-alls may differ in sizes."""
    if record.name.startswith("all_to_all"):
        return record.name
    return f"{record.name} {[list(size) for size in record.sizes]}"


# exercise 10.12
def find_desync(groups: dict[str, list[int]], records: dict[int, list[CollectiveRecord]]) -> list[str]:
    """Return one line per group whose ranks disagree, about the first collective on which they do. Groups of one rank,
    and groups in sync, get no line.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records has issued no
    collective.
    """
    lines, first_ns = [], {rank: local[0].time_ns for rank, local in records.items() if local}
    for name, ranks in groups.items():
        seen = {rank: {r.number: r for r in records.get(rank, ()) if r.group == name} for rank in ranks}
        oldest = max((min(numbers) for numbers in seen.values() if numbers), default=1)  # the buffers are rings
        newest = max((max(numbers) for numbers in seen.values() if numbers), default=0)
        for number in range(oldest, newest + 1):
            present = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((record.time_ns for record in present.values()), default=0)
            absent = [rank for rank in ranks if rank not in present and first_ns.get(rank, 0) <= at]  # else: lost
            ranks_in: dict[str, list[int]] = {}
            for rank, record in present.items():
                ranks_in.setdefault(described(record), []).append(rank)
            if present and absent or len(ranks_in) > 1:
                calls = "; ".join(f"{who} in {call}" for call, who in ranks_in.items())
                lines.append(f"group {ranks}, number {number}: {calls}" + (f"; not there: {absent}" if absent else ""))
                break
    return lines


# exercise 10.14
def straggler_delay(groups: dict[str, list[int]], records: dict[int, list[CollectiveRecord]]) -> dict[int, float]:
    """Return the seconds that others waited for each rank. For each collective that all ranks of a group of two or more
    have issued, the last rank is charged with the time from the median of the ranks' times to its own. The hosts'
    clocks must agree.
    """
    delays = dict.fromkeys(records, 0.0)
    arrivals: dict[tuple[str, int], dict[int, int]] = {}
    for rank, local in records.items():
        for record in local:
            arrivals.setdefault((record.group, record.number), {})[rank] = record.time_ns
    for (name, _), times in arrivals.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            last = max(times, key=lambda rank: times[rank])
            delays[last] += (times[last] - statistics.median(times.values())) / 1e9
    return delays
