"""What each rank's flight recorder has seen, and what the ranks' records say together.

PyTorch keeps the last TORCH_FR_BUFFER_SIZE collectives of a process in a ring buffer: which, in which group, its number
there, how large, when it was asked for. (Not gloo's sends and receives; on NCCL those too.) Set the variable
before the process groups are made. `Watchdog` writes the buffer to a folder when a step takes too long.

    find_desync    a hang: who has not come to which collective, or has come with another one
    straggler_delay   a slow job: whom the others wait for

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
    """One collective, as one rank asked for it."""

    group: str  # the group's name, the same on all its ranks
    number: int  # of the group's collectives, from 1
    name: str  # all_reduce, ...
    sizes: tuple  # of its inputs
    time_ns: int  # when it was asked for


def entries() -> list[dict]:
    """What this process's flight recorders hold: NCCL has one of its own. (Private functions, of torch 2.13.)"""
    c10d = torch._C._distributed_c10d
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return [entry for dump in dumps if dump for entry in json.loads(dump()).get("entries", [])]


def dump_records(folder: str | Path, since_ns: int = 0) -> Path:
    """Write what this rank has asked for since then (time.time_ns()), and who is in its groups, to folder/rank_N.json.

    Returns the file. Groups that have been destroyed are left out; where others have been made since, say since when.
    """
    groups = {
        name: dist.get_process_group_ranks(group) for group, name in dist.distributed_c10d._world.pg_names.items()
    }
    flights = [
        (e["process_group"][0], e["collective_seq_id"], e["profiling_name"].split(":")[-1], e["input_sizes"], at)
        for e in entries()
        if not e["is_p2p"] and e["process_group"][0] in groups and (at := e["time_created_ns"]) >= since_ns
    ]
    file = Path(folder) / f"rank_{dist.get_rank()}.json"
    file.write_text(json.dumps({"groups": groups, "flights": flights}))
    return file


def read_records(folder: str | Path) -> tuple[dict[str, list[int]], dict[int, list[CollectiveRecord]]]:
    """The groups' ranks by name, and the records by rank, of all files in a folder."""
    groups, records = {}, {}
    for file in sorted(Path(folder).glob("rank_*.json")):
        found = json.loads(file.read_text())
        groups |= found["groups"]
        rank = int(file.stem.removeprefix("rank_"))
        records[rank] = [
            CollectiveRecord(group, number, name, tuple(map(tuple, sizes)), at)
            for group, number, name, sizes, at in found["flights"]
        ]
    return groups, records


class Watchdog:
    """`with Watchdog(folder, timeout_s):` writes what this rank has asked for inside, if the block takes longer.

    All ranks begin such a block at the same point of the program: then its records begin with the same collectives. On
    a GPU the block ends by waiting for the device; else it is over before a hang shows.
    """

    def __init__(self, folder: str | Path, timeout_s: float):
        self.folder, self.timeout_s = Path(folder), timeout_s
        self.folder.mkdir(parents=True, exist_ok=True)  # now, not when it hangs

    def __enter__(self):
        self.timer = threading.Timer(self.timeout_s, dump_records, [self.folder, time.time_ns()])
        self.timer.daemon = True
        self.timer.start()
        return self

    def __exit__(self, *error):
        self.timer.cancel()


def described(flight: CollectiveRecord) -> str:
    """What the ranks of a group have to agree on: the collective, and its sizes, which an all-to-all may differ in."""
    return (
        flight.name
        if flight.name.startswith("all_to_all")
        else f"{flight.name} {[list(each) for each in flight.sizes]}"
    )


# exercise 10.12
def find_desync(groups: dict[str, list[int]], records: dict[int, list[CollectiveRecord]]) -> list[str]:
    """Return a line for each group whose ranks do not agree, about its first collective on which they do not. Groups of
    one rank, and those in sync, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks}
        oldest = max((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(oldest, newest + 1):
            there = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in ranks if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(described(flight), []).append(rank)
            if there and absent or len(came) > 1:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
                break
    return found


# exercise 10.14
def straggler_delay(groups: dict[str, list[int]], records: dict[int, list[CollectiveRecord]]) -> dict[int, float]:
    """Return for how many seconds others have waited for each rank: of each collective that all ranks of a group of two
    or more have come to, from the median of the times at which they came to the last one's, which is charged with it.
    The hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault((flight.group, flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            last = max(times, key=times.get)
            late[last] += (times[last] - statistics.median(times.values())) / 1e9
    return late
