"""Checkpoints of any layout against torch.save of everything on rank 0: saves, loads, and what training waits for.

    python benchmarks/checkpoint.py [REPETITIONS [FOLDER]]     # writes benchmarks/results/checkpoint_<device>.json

FOLDER is on the disk to measure; default: the current folder. Each layout has the weights and AdamW's states of a few
steps, in float32. The runs alternate, each after a barrier and until all ranks are done:

    save                  course_lib.checkpoint.checkpoints.save: copy, write, fsync of every file, checksums, commit
    load                  course_lib.checkpoint.checkpoints.load into the same layout, with checksums
    load elsewhere        the same into another layout, ELSEWHERE
    torch.save            all chunks are sent to rank 0's host, which writes one file, without an fsync
    torch.save, fsync     the same, with an fsync of the file
    torch.load            every rank maps the full file into memory and copies its own chunks

Then, also in alternation, at least STEPS training steps: as many as a save takes.

    quiet                 no save
    Checkpoints.save      a save begins before the first step; "stall": the time of the call, "steps": the rest,
                          "extra": the rest minus the quiet steps before it
    async_save            torch.distributed.checkpoint's, with the same tensors: with an fsync of every file,
                          without checksums and commit

Times are rank 0's, in seconds: median, minimum and maximum of REPETITIONS. A loaded file was written just before
and comes from memory. "host_peak_mib": the peak of rank 0's process above its memory before, the maximum of
REPETITIONS. Before any timing, both ways must restore every bit. Runs on two and four ranks on this machine's CPU, or
on one rank per GPU.
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
from course_lib.checkpoint.chunks import Chunks, state_chunks, weight_chunks, write_assignment
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


def model_chunks(parallel: ParallelModel) -> Chunks:
    """Return this rank's chunks of weights and states: views of the model's memory."""
    return weight_chunks(parallel) | state_chunks(parallel, synchronize_for_save(parallel).state)


def slices_of(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of a chunk in its full tensor."""
    return tuple(slice(begin, begin + n) for begin, n in zip(offsets, shape, strict=True))


def gather_full(parallel: ParallelModel, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return all full weights and states on rank 0's host, and nothing on the other ranks. Collective."""
    assigned, full = write_assignment(model_chunks(parallel), group), {}
    local = [
        (name, chunk.offsets, chunk.full_shape, tuple(chunk.values.shape), chunk.values.dtype)
        for name, each in assigned.items()
        for chunk in each
    ]
    by_rank: list = [None] * group.size()
    dist.all_gather_object(by_rank, local, group=group)
    local_values = iter([chunk.values for each in assigned.values() for chunk in each])
    for rank, chunks in enumerate(by_rank):
        for name, offsets, full_shape, shape, dtype in chunks:
            if rank == group.rank():
                values = next(local_values).to("cpu").contiguous()
            elif group.rank() == 0:
                values = torch.empty(shape, dtype=dtype)
                dist.recv(values, rank, group=group)
            if group.rank() == 0:
                if name not in full:
                    full[name] = torch.empty(full_shape, dtype=dtype)
                full[name][slices_of(offsets, shape)] = values
            elif rank == group.rank():
                dist.send(values, 0, group=group)
    return full


def torch_save(parallel: ParallelModel, group: dist.ProcessGroup, file: Path, sync: bool) -> None:
    """Save as the rival does."""
    full = gather_full(parallel, group)
    if group.rank() == 0:
        with open(file, "wb") as opened:
            torch.save(full, opened)
            if sync:
                opened.flush()
                os.fsync(opened.fileno())


def torch_load(parallel: ParallelModel, file: Path) -> None:
    """Load as the rival does: this rank's chunks from the full file."""
    full = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    with torch.no_grad():
        for name, chunks in model_chunks(parallel).items():
            for chunk in chunks:
                chunk.values.copy_(full[name][slices_of(chunk.offsets, chunk.values.shape)])


def copied_chunks(parallel: ParallelModel) -> dict[tuple, torch.Tensor]:
    """Return copies of the values of this rank's chunks, by name and offsets."""
    chunks = model_chunks(parallel)
    return {(name, chunk.offsets): chunk.values.clone() for name, each in chunks.items() for chunk in each}


def check_restored(make: Callable, parallel: ParallelModel, others: str, group, folder: Path) -> None:
    """Raise AssertionError if either way loses a bit, in the same layout or by way of another one."""
    expected, other, elsewhere = copied_chunks(parallel), make(others), folder / "elsewhere"
    load(other, save(parallel, folder / "checked", 1))
    for path in (elsewhere, folder / "checked.pt"):
        restored = make(str(parallel.layout))
        if path == elsewhere:
            load(restored, save(other, elsewhere, 1))
        else:
            torch_save(parallel, group, path, sync=False)
            dist.barrier()
            load(restored, folder / "checked" / "step-000000001")  # allocates the states
            with torch.no_grad():
                for chunks in model_chunks(restored).values():
                    for chunk in chunks:
                        chunk.values.zero_()
            torch_load(restored, path)
        actual = copied_chunks(restored)
        assert actual.keys() == expected.keys() and all(actual[key].equal(expected[key]) for key in actual), path


def host_peak_mib(run: Callable[[], None]) -> float | None:
    """Return the peak of this process's memory on the host, above its memory before, in MiB; None if not on Linux."""

    def kib(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that earlier runs have freed must not count as in use
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = kib("VmRSS")
    except (OSError, AttributeError):
        run()
        return None
    run()
    return (kib("VmHWM") - before) / 1024


def spread(times: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def alternate(runs: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of each run, in alternation, after one warmup each. A run ends when it has on all ranks."""
    times = {name: [] for name in runs}
    for _ in range(repetitions + 1):
        for name, run in runs.items():
            dist.barrier()
            times[name].append(measure.seconds(lambda run=run: (run(), dist.barrier())))
    return {name: each[1:] for name, each in times.items()}


def stalls(parallel: ParallelModel, step: Callable, count: int, folder: Path, group, repetitions: int) -> dict:
    """Measure training steps beside our save, beside torch.distributed.checkpoint's, and without a save."""
    ours, begun = Checkpoints(parallel, folder / "beside", keep=1), {"Checkpoints.save": [], "async_save": []}
    numbers = iter(range(1, 10**6))
    beside = {name: [] for name in ("quiet", *begun)}
    written = {name: [] for name in begun}

    def begin(name: str) -> Callable[[], object]:
        """Begin to save; return a function that waits for the end."""
        if name == "Checkpoints.save":
            ours.save(next(numbers))
            return ours.wait
        chunks = [(key, chunk) for key, each in ours.model_chunks().items() for chunk in each]
        assigned = [(key, chunk) for key, chunk in chunks if (key, chunk.offsets) in ours.assigned]
        flat = {f"{group.rank()} {key} {chunk.offsets}": chunk.values for key, chunk in assigned}
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
    figures = {"steps": count, "quiet": {"steps": spread(beside["quiet"][1:])}}
    for name in begun:
        extra = [steps - quiet for steps, quiet in zip(beside[name][1:], beside["quiet"][1:], strict=True)]
        figures[name] = {"stall": spread(begun[name][1:]), "steps": spread(beside[name][1:]), "extra": spread(extra)}
        figures[name]["until both are done"] = spread(written[name][1:])
    return figures


def compare(text: str, others: str, preset: str, folder: str, repetitions: int) -> dict:
    """Return, on a rank, all figures of a layout."""
    warnings.filterwarnings("ignore")
    folder, group = Path(folder), dist.new_group(backend="gloo")
    (folder / "beside").mkdir(exist_ok=True)
    on_gpu = dist.get_backend() != "gloo"
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")

    def make(layout: str) -> ParallelModel:
        layout = Layout.parse(layout)
        return parallelize(PRESETS[preset], layout, build_mesh(layout), lr=1e-3)

    parallel, other = make(text), make(others)
    tokens = torch.randint(PRESETS[preset].vocab, (2, 4 // parallel.layout.dp, SEQ)).to(device)

    def step() -> None:
        parallel.step(*tokens)
        synchronize_for_save(parallel)
        if on_gpu:
            torch.accelerator.synchronize()

    for _ in range(3):
        step()
    for name in ("checked", "elsewhere", "saved"):
        (folder / name).mkdir(exist_ok=True)
    check_restored(make, parallel, others, group, folder)
    last, file, numbers = [None], folder / "full.pt", iter(range(1, 10**6))

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
    times = alternate(runs, repetitions)
    figures = {"load elsewhere is": others} | {name: spread(each) for name, each in times.items()}
    for name in ("save", "torch.save"):
        peaks = []
        for _ in range(repetitions):
            dist.barrier()
            peaks.append(host_peak_mib(runs[name]))
        figures[name]["host_peak_mib"] = None if None in peaks else max(peaks)
    figures["save"]["bytes"] = sum(each.stat().st_size for each in last[0].iterdir())
    figures["torch.save"]["bytes"] = file.stat().st_size
    longest, one = [
        torch.tensor(each, device=device) for each in (times["save"], alternate({"step": step}, repetitions)["step"])
    ]
    count = torch.tensor(max(STEPS, math.ceil((longest.median() / one.median()).item()) + 1), device=device)
    dist.broadcast(count, 0)
    figures["beside training"] = stalls(parallel, step, count.item(), folder, group, repetitions)
    return figures


def main(repetitions: int = REPETITIONS, folder: str = ".") -> None:
    """Measure on this machine; print and write the figures."""
    gpus = torch.cuda.device_count()
    preset = "SmolLM-135M" if gpus else "small"
    figures = {"preset": preset, "sequences": 4, "seq": SEQ, "repetitions": repetitions}
    layouts = {text: other for text, other in ELSEWHERE.items() if not gpus or Layout.parse(text).ranks <= gpus}
    for text, other in (layouts or ONE_GPU).items():
        root = tempfile.mkdtemp(prefix="checkpoint-", dir=Path(folder).resolve())
        try:
            with Ranks(Layout.parse(text).ranks, timeout_s=1800) as ranks:
                figures[f"{text}, {ranks.backend}"] = ranks(compare, text, other, preset, root, repetitions)[0]
        finally:
            shutil.rmtree(root)
    measure.write("checkpoint", figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
