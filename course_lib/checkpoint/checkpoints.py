"""Checkpoints of a model in any layout, for any other: written beside training, complete or not there at all.

    checkpoints = Checkpoints(parallel, Path("checkpoints"), keep=2)
    checkpoints.save(step, {"position": batches.position})     # copies this rank's chunks to the host, then returns
    checkpoints.wait()                                         # until the last save is on the disk, or has failed
    about = load(parallel, latest(Path("checkpoints")))        # into any layout, on any number of ranks

A save takes three steps: assign each chunk to a rank that writes it; copy the chunks to the host, while training
waits; write them with torch.distributed.checkpoint, in a thread with a process group of its own. The folder has a
temporary name until all of it is on the disk. All ranks must see the folder.
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

from course_lib.checkpoint.chunks import Chunks, state_chunks, weight_chunks, weight_names
from course_lib.checkpoint.files import (
    CheckpointError,
    ChunkReader,
    DamagedError,
    begin,
    check_written,
    commit,
    damaged,
    describe,
    digest,
    latest,
)
from course_lib.checkpoint.groups import first_or_raise, gather_or_raise, host_group, one_line, run_or_raise
from course_lib.checkpoint.planners import read_into
from course_lib.checkpoint.plans import ChunkWriter, Tensors, local_index, share_index
from course_lib.checkpoint.staging import HostStager, synchronize_for_save
from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.model import NOT_OF_WEIGHTS, ModelConfig

States = dict[torch.Tensor, dict[str, torch.Tensor]]  # an optimizer's, by the tensor that it updates


class Checkpoints(HostStager):
    """Saves to a folder that all ranks see, one checkpoint at a time, beside training. Its constructor is collective.

    keep: the number of complete checkpoints to keep; report(line): called on rank 0 for a failed save. failure: of the
    last save, or None. No other job may use the folder: SavedRun locks it.
    """

    def __init__(self, parallel: ParallelModel, root: Path, keep: int = 2, report: Callable[[str], object] = print):
        super().__init__(parallel)
        self.root, self.keep, self.report, self.coordinator = Path(root), keep, report, self.group.rank() == 0
        self.writer = ChunkWriter()
        self.thread: threading.Thread | None = None
        self.failure: str | None = None
        self.lost: Exception | None = None

    def save(self, step: int, about: dict | None = None) -> bool:
        """Begin to save the model. Return False if the copy to the host fails, or a value is not finite, which is never
        saved. about: data for JSON, which `load` returns. Collective.

        Waits for the previous save, and for the copy. A failure is reported and does not raise; a lost rank raises, as
        in any collective.
        """
        self.wait()
        self.failure = None
        model = {"config": dataclasses.asdict(self.parallel.config), "layout": str(self.parallel.layout)}
        if self.parallel.routing:  # to_hf needs top_k
            model["routing"] = dataclasses.asdict(self.parallel.routing)
        try:
            work = self.stage(), step, (about or {}) | model | {"step": step}
        except CheckpointError as error:
            self.report_failure(step, error)
            return False
        self.thread = threading.Thread(target=self.write, args=work, daemon=True)
        self.thread.start()
        return True

    def write(self, chunks: Chunks, step: int, about: dict) -> None:
        """Write a complete checkpoint. Runs in a thread, on all ranks."""
        saving: Path | None = None
        try:
            match = self.writer.matches(chunks)
            folders = gather_or_raise(self.group, lambda: (self.begin(step), match))
            saving = folders[0][0]
            assert saving is not None
            self.writer.save(chunks, saving, self.group, reuse=all(match for _, match in folders))
            self.commit(chunks, saving, about)
        except (CheckpointError, CheckpointException) as error:  # of one rank, and known to all
            if self.coordinator and saving:
                shutil.rmtree(saving, ignore_errors=True)
            self.report_failure(step, error)
        except Exception as error:  # a rank is lost: destroying the group tells the others
            self.lost = error.with_traceback(None)  # a traceback would keep the group alive, with its connections
            dist.destroy_process_group(self.group)
            del self.group

    def begin(self, step: int) -> Path | None:
        """Make the folder to save in, on rank 0."""
        return begin(self.root, step) if self.coordinator else None

    def commit(self, chunks: Chunks, saving: Path, about: dict) -> None:
        """Complete the checkpoint with the checksums of all ranks' files. Collective."""
        names = [f"__{self.group.rank()}_0.distcp"] * bool(chunks) + [".metadata"] * self.coordinator
        by_rank = gather_or_raise(self.group, lambda: {name: digest(saving / name) for name in names})
        files = {name: each[name] for each in by_rank for name in each}

        def finish() -> None:
            if self.coordinator:
                check_written(saving, files)
                commit(saving, about | {"files": files}, self.keep)

        gather_or_raise(self.group, finish)

    def report_failure(self, step: int, error: BaseException) -> None:
        """Record a failed save, and report it on rank 0."""
        self.failure = one_line(error, self.group.rank())
        if self.coordinator:
            last = latest(self.root)
            good = f"the last good one is {last.name}" if last else "there is no earlier one"
            self.report(f"checkpoint of step {step} failed: {self.failure}; {good}")

    def wait(self) -> None:
        """Wait until the last save is complete or has failed. Raises the group's error if a rank is lost."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.lost:
            raise self.lost

    def close(self) -> None:
        """Wait for the last save, and destroy the group. Collective."""
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


def check_names(local: Chunks, tensors: Tensors, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError if the model's tensors and a checkpoint's differ in name or shape. Collective."""
    shapes = {name: tuple(each.size) for name, each in tensors.items() if "/" not in name}

    def local_names() -> set[str]:
        for name, chunks in local.items():
            if name not in shapes:
                raise CheckpointError(f"another model: the checkpoint has no {name}")
            if chunks and chunks[0].full_shape != shapes[name]:
                saved, local_shape = list(shapes[name]), list(chunks[0].full_shape)
                raise CheckpointError(f"another model: {name} is {saved} in the checkpoint, {local_shape} here")
        return set(local)

    if extra := sorted(shapes.keys() - set().union(*gather_or_raise(group, local_names))):
        raise CheckpointError(f"another model: the checkpoint has {extra[0]}, which this model lacks")


def empty_states(parallel: ParallelModel, tensors: Tensors) -> States:
    """Return buffers on the host for the states in a checkpoint of the tensors that this rank's optimizer updates."""
    names = weight_names(parallel)
    saved: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
    for key, each in tensors.items():
        name, slash, state = key.partition("/")
        if slash:
            saved.setdefault(name, {})[state] = each.size, each.properties.dtype
    states = {}
    for tensor, weights, _ in parallel.sharding.updated_tensors():
        by_weight = [saved.get(names[weight], {}) for weight in weights if tensor.numel()]
        kinds = {state: kind for each in by_weight for state, kind in each.items()}  # an unused weight has none
        states[tensor] = {
            state: torch.zeros(tensor.shape if size else (), dtype=dtype, device="cpu")
            for state, (size, dtype) in kinds.items()
        }
    return states


def check_config(config: ModelConfig, saved_config: dict) -> None:
    """Raise CheckpointError if a checkpoint is of a model of other sizes. saved_config: from checkpoint.json."""
    saved = dataclasses.asdict(ModelConfig(**saved_config))
    for name, value in dataclasses.asdict(config).items():
        if name not in NOT_OF_WEIGHTS and saved[name] != value:
            raise CheckpointError(f"another model: {name} is {saved[name]} in the checkpoint, {value} here")


def check_files(folder: Path, files: dict[str, list]) -> None:
    """Raise DamagedError if one of these files is not as it was written."""
    if damage := damaged(folder, files):
        raise DamagedError(f"{folder} is damaged: {damage}")


def read_chunks(
    parallel: ParallelModel, folder: Path | None, group: dist.ProcessGroup
) -> tuple[dict, Chunks, Chunks, States]:
    """Return the contents of checkpoint.json, the model's chunks, the same chunks read from the checkpoint to buffers
    on the host, and the optimizer's states.
    """
    about = first_or_raise(group, lambda: describe(folder))
    assert folder is not None  # describe has raised
    check_config(parallel.config, about["config"])
    local_files = {name: about["files"][name] for name in sorted(about["files"])[group.rank() :: group.size()]}
    gather_or_raise(group, lambda: check_files(folder, local_files))
    tensors, pickled_chunks = share_index(ChunkReader(folder), group)

    def inspect() -> Chunks:
        synchronize_for_save(parallel)
        return weight_chunks(parallel)

    def read() -> tuple[Chunks, States]:
        buffers = {
            name: [chunk._replace(values=torch.empty_like(chunk.values, device="cpu")) for chunk in chunks]
            for name, chunks in targets.items()
        }
        states = empty_states(parallel, tensors)
        saved_states = {name: each for name, each in state_chunks(parallel, states).items() if name in tensors}
        wanted = buffers | saved_states
        read_into(wanted, ChunkReader(folder, local_index(wanted, tensors, pickled_chunks)))
        return buffers, states

    targets = run_or_raise(group, inspect)
    check_names(targets, tensors, group)
    return about, targets, *run_or_raise(group, read)


@torch.no_grad()
def load(parallel: ParallelModel, folder: Path | None) -> dict:
    """Load weights and optimizer states from a checkpoint that any layout has written. Collective.

    Returns the `about` of `save`, with "step", "layout" (of the run that wrote it) and "config". The model changes only
    once all ranks have read their chunks to the host: 12 bytes per parameter of the rank. Raises CheckpointError, on
    all ranks, if the checkpoint is of another model, format or version, or other users could have written it;
    DamagedError if its files are not as they were written.
    """
    group = host_group()
    try:
        about, targets, buffers, states = read_chunks(parallel, folder and Path(folder), group)
    finally:
        dist.destroy_process_group(group)
    for name, chunks in targets.items():
        for target, buffer in zip(chunks, buffers[name], strict=True):
            target.values.copy_(buffer.values)
    parallel.sharding.all_gather_params()
    optimizer = synchronize_for_save(parallel)
    counters_on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    for tensor, saved in states.items():
        optimizer.state.pop(tensor, None)
        for state, value in saved.items():
            on_device = value.dim() or counters_on_device
            optimizer.state[tensor][state] = value.to(tensor.device) if on_device else value
    return {key: value for key, value in about.items() if key not in ("files", "format", "version")}
