"""Checkpoints of a model in any layout, for any other: written beside training, complete or not there.

    checkpoints = Checkpoints(parallel, Path("checkpoints"), keep=2)
    checkpoints.save(step, {"position": batches.position})     # copies this rank's share to the host, writes it beside
    checkpoints.wait()                                         # until the last one is on the disk, or has failed
    about = load(parallel, latest(Path("checkpoints")))        # the layout, and the number of ranks, may be others

A save takes three steps: which rank writes which boxes; a copy of these on the host, for which training stands still;
and, in a thread with a process group of its own, torch.distributed.checkpoint writes them. The folder has another name
until all of it is on the disk. It is one that all ranks see.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from course_lib.checkpoint.chunks import Chunk, state_chunks, weight_chunks, weight_names
from course_lib.checkpoint.files import (
    CheckpointError,
    ChunkReader,
    DamagedError,
    begin,
    check_there,
    commit,
    damaged,
    describe,
    digest,
    latest,
)
from course_lib.checkpoint.groups import host_group, on_each, one_line, together
from course_lib.checkpoint.planners import read_into
from course_lib.checkpoint.plans import PlannedSaves, own_index, shared_index
from course_lib.checkpoint.staging import HostStager, synchronize_for_save
from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.model import NOT_OF_WEIGHTS, ModelConfig


class Checkpoints(HostStager):
    """Saves to a folder that all ranks see, one checkpoint at a time, beside training. Its constructor is collective.

    keep: how many complete ones stay; report(line): on rank 0, of what has failed. failure: of the last save, or None.
    The folder must be this job's alone: SavedRun locks it.
    """

    def __init__(self, parallel: ParallelModel, root: Path, keep: int = 2, report: Callable[[str], None] = print):
        super().__init__(parallel)
        self.root, self.keep, self.report, self.first = Path(root), keep, report, self.group.rank() == 0
        self.plans, self.thread = PlannedSaves(), None
        self.failure: str | None = None
        self.lost: Exception | None = None

    def save(self, step: int, about: dict | None = None) -> bool:
        """Begin to save what the model is now; False: it could not, or has a value that is not finite, which no save
        may have. about: what JSON can hold; `load` returns it. Collective.

        Waits for the save before this one, and for the copy. What fails is reported, and ends nothing; a rank that is
        lost is raised, as by any collective.
        """
        self.wait()
        self.failure = None
        model = {"config": dataclasses.asdict(self.parallel.config), "layout": str(self.parallel.layout)}
        if self.parallel.routing:  # to_hf needs top_k
            model["routing"] = dataclasses.asdict(self.parallel.routing)
        try:
            work = self.stage(), step, (about or {}) | model | {"step": step}
        except CheckpointError as error:
            self.failed(step, error)
            return False
        self.thread = threading.Thread(target=self.write, args=work, daemon=True)
        self.thread.start()
        return True

    def write(self, boxes: dict[str, list[Chunk]], step: int, about: dict) -> None:
        """In the thread, on all ranks: from an empty folder to a complete checkpoint."""
        saving = None
        try:
            fits = self.plans.fits(boxes)
            of_all = together(self.group, lambda: (begin(self.root, step) if self.first else None, fits))
            saving = of_all[0][0]
            self.plans.save(boxes, saving, self.group, again=all(fits for _, fits in of_all))
            names = [f"__{self.group.rank()}_0.distcp"] * bool(boxes) + [".metadata"] * self.first
            of_all = together(self.group, lambda: {name: digest(saving / name) for name in names})
            files = {name: each[name] for each in of_all for name in each}

            def finish() -> None:
                if self.first:
                    check_there(saving, files)
                    commit(saving, about | {"files": files}, self.keep)

            together(self.group, finish)
        except (CheckpointError, CheckpointException) as error:  # of one rank, and all know it
            if self.first and saving:
                shutil.rmtree(saving, ignore_errors=True)
            self.failed(step, error)
        except Exception as error:  # of the group: a rank is lost, and this one tells no other but by giving it up
            self.lost = error.with_traceback(None)  # which would keep the group alive, with its connections
            dist.destroy_process_group(self.group)
            self.group = None

    def failed(self, step: int, error: BaseException) -> None:
        """Remember it, and report it on rank 0."""
        self.failure = one_line(error, self.group.rank())
        if self.first:
            last = latest(self.root)
            good = f"the last good one is {last.name}" if last else "there is no earlier one"
            self.report(f"checkpoint of step {step} failed: {self.failure}; {good}")

    def wait(self) -> None:
        """Until the last save is done or has failed. Raises what the group raised, where a rank is lost."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.lost:
            raise self.lost

    def close(self) -> None:
        """Wait, and give the group back. Collective."""
        self.wait()
        dist.destroy_process_group(self.group)


def save(parallel: ParallelModel, root: Path, step: int, about: dict | None = None, keep: int = 2) -> Path:
    """Save now, and return the checkpoint's folder. Collective. Raises CheckpointError, on all ranks, if the save fails
    or the folder `root` does not exist.
    """
    checkpoints = Checkpoints(parallel, root, keep, report=lambda line: None)
    checkpoints.save(step, about)
    checkpoints.close()
    if checkpoints.failure:
        raise CheckpointError(checkpoints.failure)
    return Path(root) / f"step-{step:09d}"


def check_names(own: dict[str, list[Chunk]], kinds: dict[str, TensorStorageMetadata], group: dist.ProcessGroup) -> None:
    """Raise CheckpointError where the model's tensors and a checkpoint's differ in name or size. Collective."""
    sizes = {name: tuple(each.size) for name, each in kinds.items() if "/" not in name}

    def names() -> set[str]:
        for name, boxes in own.items():
            if name not in sizes:
                raise CheckpointError(f"another model: the checkpoint has no {name}")
            if boxes and boxes[0].full_shape != sizes[name]:
                raise CheckpointError(
                    f"another model: {name} is {list(sizes[name])} in the checkpoint, {list(boxes[0].full_shape)} here"
                )
        return set(own)

    if more := sorted(sizes.keys() - set().union(*together(group, names))):
        raise CheckpointError(f"another model: the checkpoint has {more[0]}, which this model lacks")


def empty_states(parallel: ParallelModel, kinds: dict[str, TensorStorageMetadata]) -> dict[torch.Tensor, dict]:
    """Room on the host for the states that a checkpoint has, by the tensors that this rank's optimizer updates."""
    names, saved = weight_names(parallel), {}
    for key, each in kinds.items():
        name, slash, state = key.partition("/")
        if slash:
            saved.setdefault(name, {})[state] = each.size, each.properties.dtype
    states = {}
    for tensor, weights, _ in parallel.sharding.updated_tensors():
        of_all = [saved.get(names[weight], {}) for weight in weights if tensor.numel()]
        found = {state: like for each in of_all for state, like in each.items()}  # an unused weight has none
        states[tensor] = {
            state: torch.zeros(tensor.shape if size else (), dtype=dtype, device="cpu")
            for state, (size, dtype) in found.items()
        }
    return states


def read_boxes(parallel: ParallelModel, folder: Path, group: dist.ProcessGroup) -> tuple:
    """What checkpoint.json says; the model's boxes, and beside these the same from the checkpoint; the states."""
    about = together(group, lambda: describe(folder) if group.rank() == 0 else None)[0]
    saved = dataclasses.asdict(ModelConfig(**about["config"]))
    for name, value in dataclasses.asdict(parallel.config).items():
        found = saved[name]
        if name not in NOT_OF_WEIGHTS and found != value:
            raise CheckpointError(f"another model: {name} is {found} in the checkpoint, {value} here")
    own_files = {name: about["files"][name] for name in sorted(about["files"])[group.rank() :: group.size()]}

    def verify() -> None:
        if wrong := damaged(folder, own_files):
            raise DamagedError(f"{folder} is damaged: {wrong}")

    together(group, verify)
    kinds, places = shared_index(ChunkReader(folder), group)

    def look() -> dict[str, list[Chunk]]:
        synchronize_for_save(parallel)
        return weight_chunks(parallel)

    def read() -> tuple[dict[str, list[Chunk]], dict[torch.Tensor, dict]]:
        rooms = {
            name: [box._replace(values=torch.empty_like(box.values, device="cpu")) for box in boxes]
            for name, boxes in targets.items()
        }
        states = empty_states(parallel, kinds)
        wanted = rooms | {name: boxes for name, boxes in state_chunks(parallel, states).items() if name in kinds}
        read_into(wanted, ChunkReader(folder, own_index(wanted, kinds, places)))
        return rooms, states

    targets = on_each(group, look)
    check_names(targets, kinds, group)
    return about, targets, *on_each(group, read)


@torch.no_grad()
def load(parallel: ParallelModel, folder: Path) -> dict:
    """Take over weights and optimizer states of a checkpoint, whatever layout wrote it. Collective.

    Returns what `save` was told, with "step", "layout" (that of the run that wrote it) and "config". Nothing changes
    before all ranks have read, to the host, what is theirs: 12 bytes for each of a rank's parameters. Raises
    CheckpointError, on all ranks, where the checkpoint is of another model, format or version, or could have been
    written by others; DamagedError where its files are not those that were written.
    """
    group = host_group()
    try:
        about, targets, rooms, states = read_boxes(parallel, folder and Path(folder), group)
    finally:
        dist.destroy_process_group(group)
    for name, boxes in targets.items():
        for target, found in zip(boxes, rooms[name], strict=True):
            target.values.copy_(found.values)
    parallel.sharding.all_gather_params()
    optimizer = synchronize_for_save(parallel)
    counts_there = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")  # where the weights are
    for tensor, found in states.items():
        optimizer.state.pop(tensor, None)
        for state, value in found.items():
            there = value.dim() or counts_there
            optimizer.state[tensor][state] = value.to(tensor.device) if there else value
    return {key: value for key, value in about.items() if key not in ("files", "format", "version")}
