"""Checkpoints of any layout against torch.save of everything on rank 0: saves, loads, and what training waits for.

    python benchmarks/checkpoint.py [REPETITIONS [FOLDER]]     # writes benchmarks/results/checkpoint_<device>.json

FOLDER is on the disk that is measured; the current folder by default. Each layout has the weights and AdamW's states
of a few steps, in float32. In turn, each after a barrier and until all ranks are done:

    save                  course_lib.checkpoint.checkpoints.save: copy, write, fsync of every file, checksums, commit
    load                  course_lib.checkpoint.checkpoints.load into the same layout, with checksums
    load elsewhere        the same into another layout, that of ELSEWHERE
    torch.save            all boxes sent to rank 0, on the host, and one file written there, without an fsync
    torch.save, fsync     the same, and an fsync of the file
    torch.load            on every rank the whole file, memory-mapped, and what is the rank's own copied from it

and then, also in turn, STEPS or more training steps: as many as a save takes.

    quiet                 no save
    Checkpoints.save      a save begins before the first step; "stall": what the call itself takes, "steps": the rest,
                          "extra": that above the quiet steps before it
    async_save            torch.distributed.checkpoint's, of the same tensors: with an fsync of every file, without
                          checksums and commit

Times are rank 0's, in seconds: median, least and most of REPETITIONS. What is loaded was written just before and comes
from memory. "host_peak_mib": of rank 0's process, above what it had, the largest of REPETITIONS. Before anything is
timed, both ways have to give every bit back. Two and four ranks on this machine's CPU, or a rank for each GPU.
"""

import ctypes
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import measure
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from course_kit.ranks import Ranks
from course_lib.checkpoint.checkpoints import Checkpoints, load, save
from course_lib.checkpoint.chunks import Chunk, own_share, state_chunks, weight_chunks
from course_lib.checkpoint.staging import synchronize_for_save
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import ParallelModel, parallelize
from course_lib.single_gpu.model import PRESETS

REPETITIONS = 9
STEPS = 4
SEQ = 128
ELSEWHERE = {"dp2,zero1": "tp2", "dp2,tp2,zero1": "dp2,pp2", "dp4,zero3": "dp2,tp2,zero1"}
ONE_GPU = {"dp1,zero1": "dp1"}


def all_boxes(parallel: ParallelModel) -> dict[str, list[Chunk]]:
    """This rank's boxes of weights and states: views of the model's memory."""
    return weight_chunks(parallel) | state_chunks(parallel, synchronize_for_save(parallel).state)


def part_of(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Where a box is in its whole tensor."""
    return tuple(slice(begin, begin + n) for begin, n in zip(offsets, shape, strict=True))


def gathered(parallel: ParallelModel, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """All weights and states whole, on rank 0's host; nothing on the others. Collective."""
    share, wholes = own_share(all_boxes(parallel), group), {}
    own = [
        (name, box.offsets, box.full_shape, tuple(box.values.shape), box.values.dtype)
        for name, each in share.items()
        for box in each
    ]
    of_all: list = [None] * group.size()
    dist.all_gather_object(of_all, own, group=group)
    mine = iter([box.values for each in share.values() for box in each])
    for rank, theirs in enumerate(of_all):
        for name, offsets, whole, shape, dtype in theirs:
            if rank == group.rank():
                values = next(mine).to("cpu").contiguous()
            elif group.rank() == 0:
                values = torch.empty(shape, dtype=dtype)
                dist.recv(values, rank, group=group)
            if group.rank() == 0:
                if name not in wholes:
                    wholes[name] = torch.empty(whole, dtype=dtype)
                wholes[name][part_of(offsets, shape)] = values
            elif rank == group.rank():
                dist.send(values, 0, group=group)
    return wholes


def torch_save(parallel: ParallelModel, group: dist.ProcessGroup, file: Path, sync: bool) -> None:
    """The rival's save."""
    wholes = gathered(parallel, group)
    if group.rank() == 0:
        with open(file, "wb") as opened:
            torch.save(wholes, opened)
            if sync:
                opened.flush()
                os.fsync(opened.fileno())


def torch_load(parallel: ParallelModel, file: Path) -> None:
    """The rival's load: this rank's boxes from the whole file."""
    wholes = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    with torch.no_grad():
        for name, boxes in all_boxes(parallel).items():
            for box in boxes:
                box.values.copy_(wholes[name][part_of(box.offsets, box.values.shape)])


def copies(parallel: ParallelModel) -> dict[tuple, torch.Tensor]:
    """This rank's boxes, copied."""
    boxes = all_boxes(parallel)
    return {(name, box.offsets): box.values.clone() for name, each in boxes.items() for box in each}


def check_restored(make: Callable, parallel: ParallelModel, others: str, group, folder: Path) -> None:
    """Raise AssertionError where either way loses a bit, in the same layout or by way of another one."""
    expected, other, there = copies(parallel), make(others), folder / "there"
    load(other, save(parallel, folder / "checked", 1))
    for each in (there, folder / "checked.pt"):
        back = make(str(parallel.layout))
        if each == there:
            load(back, save(other, there, 1))
        else:
            torch_save(parallel, group, each, sync=False)
            dist.barrier()
            load(back, folder / "checked" / "step-000000001")  # makes room for the states
            with torch.no_grad():
                for boxes in all_boxes(back).values():
                    for box in boxes:
                        box.values.zero_()
            torch_load(back, each)
        found = copies(back)
        assert found.keys() == expected.keys() and all(found[key].equal(expected[key]) for key in found), each


def host_peak_mib(run: Callable[[], None]) -> float | None:
    """MiB at the peak of this process's memory on the host, above what it had; None where Linux does not tell."""

    def kib(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier runs have freed does not count as there
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = kib("VmRSS")
    except (OSError, AttributeError):
        run()
        return None
    run()
    return (kib("VmHWM") - before) / 1024


def spread(times: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def in_turn(runs: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each, in alternation, after one of each; a run has ended when it has on all ranks."""
    times = {name: [] for name in runs}
    for _ in range(repetitions + 1):
        for name, run in runs.items():
            dist.barrier()
            times[name].append(measure.seconds(lambda run=run: (run(), dist.barrier())))
    return {name: each[1:] for name, each in times.items()}


def stalls(parallel: ParallelModel, step: Callable, count: int, folder: Path, group, repetitions: int) -> dict:
    """Training steps beside a save, ours and torch.distributed.checkpoint's, and without one."""
    ours, begun = Checkpoints(parallel, folder / "beside", keep=1), {"Checkpoints.save": [], "async_save": []}
    numbers = iter(range(1, 10**6))
    beside = {name: [] for name in ("quiet", *begun)}
    written = {name: [] for name in begun}

    def begin(name: str) -> Callable[[], object]:
        """Begin to save; returns what waits for its end."""
        if name == "Checkpoints.save":
            ours.save(next(numbers))
            return ours.wait
        all_boxes = [(each, box) for each, boxes in ours.all_boxes().items() for box in boxes]
        own = [(each, box) for each, box in all_boxes if (each, box.offsets) in ours.own]
        flat = {f"{group.rank()} {each} {box.offsets}": box.values for each, box in own}
        return dcp.async_save(flat, storage_writer=dcp.FileSystemWriter(folder / "async"), process_group=group).result

    for _ in range(repetitions + 1):
        for name in beside:
            dist.barrier()
            begins, waits = time.perf_counter(), None
            if name != "quiet":
                waits = begin(name)
                begun[name].append(time.perf_counter() - begins)
            beside[name].append(measure.seconds(lambda: [step() for _ in range(count)]))
            if waits:
                waits()
                written[name].append(time.perf_counter() - begins)
            assert ours.failure is None, ours.failure
    found = {"steps": count, "quiet": {"steps": spread(beside["quiet"][1:])}}
    for name in begun:
        extra = [mine - quiet for mine, quiet in zip(beside[name][1:], beside["quiet"][1:], strict=True)]
        found[name] = {"stall": spread(begun[name][1:]), "steps": spread(beside[name][1:]), "extra": spread(extra)}
        found[name]["until both are done"] = spread(written[name][1:])
    return found


def compare(words: str, others: str, preset: str, folder: str, repetitions: int) -> dict:
    """On a rank: all figures of a layout."""
    warnings.filterwarnings("ignore")
    folder, group = Path(folder), dist.new_group(backend="gloo")
    (folder / "beside").mkdir(exist_ok=True)
    on_gpu = dist.get_backend() != "gloo"
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")

    def make(layout: str) -> ParallelModel:
        layout = Layout.parse(layout)
        return parallelize(PRESETS[preset], layout, build_mesh(layout), lr=1e-3)

    parallel, other = make(words), make(others)
    tokens = torch.randint(PRESETS[preset].vocab, (2, 4 // parallel.layout.dp, SEQ)).to(device)

    def step() -> None:
        parallel.step(*tokens)
        synchronize_for_save(parallel)
        if on_gpu:
            torch.accelerator.synchronize()

    for _ in range(3):
        step()
    for name in ("checked", "there", "saved"):
        (folder / name).mkdir(exist_ok=True)
    check_restored(make, parallel, others, group, folder)
    last, file, numbers = [None], folder / "whole.pt", iter(range(1, 10**6))

    def ours() -> None:
        last[0] = save(parallel, folder / "saved", next(numbers), keep=1)

    runs = {
        "save": ours,
        "torch.save": lambda: torch_save(parallel, group, file, sync=False),
        "torch.save, fsync": lambda: torch_save(parallel, group, file, sync=True),
        "load": lambda: load(parallel, last[0]),
        "load elsewhere": lambda: load(other, last[0]),
        "torch.load": lambda: torch_load(parallel, file),
    }
    times = in_turn(runs, repetitions)
    found = {"load elsewhere is": others} | {name: spread(each) for name, each in times.items()}
    for name in ("save", "torch.save"):
        peaks = []
        for _ in range(repetitions):
            dist.barrier()
            peaks.append(host_peak_mib(runs[name]))
        found[name]["host_peak_mib"] = None if None in peaks else max(peaks)
    found["save"]["bytes"] = sum(each.stat().st_size for each in last[0].iterdir())
    found["torch.save"]["bytes"] = file.stat().st_size
    longest, one = [
        torch.tensor(each, device=device) for each in (times["save"], in_turn({"step": step}, repetitions)["step"])
    ]
    count = torch.tensor(max(STEPS, math.ceil((longest.median() / one.median()).item()) + 1), device=device)
    dist.broadcast(count, 0)
    found["beside training"] = stalls(parallel, step, count.item(), folder, group, repetitions)
    return found


def main(repetitions: int = REPETITIONS, folder: str = ".") -> None:
    """Measure on this machine, print the figures and write them down."""
    gpus = torch.cuda.device_count()
    preset = "SmolLM-135M" if gpus else "small"
    figures = {"preset": preset, "sequences": 4, "seq": SEQ, "repetitions": repetitions}
    layouts = {words: other for words, other in ELSEWHERE.items() if not gpus or Layout.parse(words).ranks <= gpus}
    for words, other in (layouts or ONE_GPU).items():
        place = tempfile.mkdtemp(prefix="checkpoint-", dir=Path(folder).resolve())
        try:
            with Ranks(Layout.parse(words).ranks, timeout_s=1800) as ranks:
                figures[f"{words}, {ranks.backend}"] = ranks(compare, words, other, preset, place, repetitions)[0]
        finally:
            shutil.rmtree(place)
    measure.write("checkpoint", figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
