"""Work done once: a save's plan and index, reused by later saves; a load's index, read by one rank for all.

Plan and index grow with the chunks of all ranks, hundreds of thousands at 1,000 ranks. Rank 0 processes all of them
in Python, beside a training step that waits for the same interpreter.

DCP's own plan caching (`DefaultSavePlanner(enable_plan_caching=True)`, PyTorch 2.13) costs more: at every save it
gathers the location of every chunk and pickles the index. It also misses a change of dtype. For 2,000 tensors in 4
chunks each, on 4 ranks and gloo, a save after the first takes 9 collectives, which send 575 kB, and 0.44 to 0.52 s of
rank 0's CPU time; here it takes 4 collectives, 0.6 kB and 0.21 to 0.24 s.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from course_lib.checkpoint.chunks import Chunks
from course_lib.checkpoint.files import CheckpointError, ChunkReader, flush
from course_lib.checkpoint.groups import gather_or_raise, run_or_raise
from course_lib.checkpoint.planners import ChunkSavePlanner


def chunk_signature(chunks: Chunks) -> list[tuple]:
    """Return all that a plan depends on, per chunk: its name, offsets, the full shape, its own shape, and its dtype."""
    return [
        (name, chunk.offsets, chunk.full_shape, tuple(chunk.values.shape), chunk.values.dtype)
        for name, each in chunks.items()
        for chunk in each
    ]


class ChunkWriter(FileSystemWriter):
    """Writes chunks on the host to one new folder after another, and reuses plan and index while no rank's chunks
    change. A failed save drops the plan.

    plan: of this rank, for chunks of `signature`; results: the location of each chunk in this rank's file, as last
    written; index: on rank 0, the bytes of .metadata.
    """

    def __init__(self) -> None:
        super().__init__(Path(), overwrite=False, per_thread_copy_ahead=0)  # 0: no stream of the GPU in this thread
        self.plan: SavePlan | None = None
        self.signature: list[tuple] = []
        self.results: list[WriteResult] = []
        self.index = b""

    def matches(self, chunks: Chunks) -> bool:
        """Return whether there is a plan, made for such chunks; their values may differ."""
        return self.plan is not None and self.signature == chunk_signature(chunks)

    def save(self, chunks: Chunks, folder: Path, group: dist.ProcessGroup, reuse: bool) -> None:
        """Write chunks and index to an empty folder. reuse: the plan, which `matches` on all ranks. Collective.

        Raises, on all ranks, CheckpointError or torch.distributed.checkpoint's CheckpointException.
        """
        self.reset(folder)
        plan, self.plan = self.plan, None
        planner = ChunkSavePlanner()
        if plan is not None and reuse:
            gather_or_raise(group, functools.partial(self.write_again, chunks, plan, planner))
        else:
            dcp.save(chunks, storage_writer=self, planner=planner, process_group=group)
            plan, self.signature = planner.plan, chunk_signature(chunks)
        self.plan = plan

    def write_again(self, chunks: Chunks, plan: SavePlan, planner: ChunkSavePlanner) -> None:
        """Write chunks by a plan, and the last save's index. Raises CheckpointError if the index does not fit."""
        planner.set_up_planner(chunks)
        last = self.results
        self.write_data(plan, planner)
        if self.results != last:
            raise CheckpointError("the chunks are not where the index has them")
        if self.index:
            file = Path(self.path) / ".metadata"
            file.write_bytes(self.index)
            flush(file)

    def storage_meta(self) -> StorageMeta:
        """Return metadata without the folder, so that the index of one checkpoint serves for the next."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file. Raises OSError if the disk is full; torch.save's RuntimeError does not say so."""
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        self.results = written.value()
        return written

    def finish(self, metadata: Metadata, results: list) -> None:
        """Write the index, on rank 0, and empty `metadata`: dcp.save sends it to all ranks, which do not need it."""
        super().finish(metadata, results)
        self.index = (Path(self.path) / ".metadata").read_bytes()
        metadata.state_dict_metadata.clear()
        metadata.storage_data = None  # in PyTorch 2.11 it is None already: the writer fills a copy


Tensors = dict[str, TensorStorageMetadata]  # by name


def share_index(reader: ChunkReader, group: dist.ProcessGroup) -> tuple[Tensors, dict[str, bytes]]:
    """Return on all ranks the index that rank 0 reads from .metadata. Collective. Raises CheckpointError, on all ranks.

    Two dicts by tensor name. One describes each tensor without its chunks: a few entries per weight. The other has its
    chunks and their locations in files, pickled: some 150 bytes per chunk of the checkpoint. Each rank unpickles those
    of its own tensors only (`local_index`).
    """

    def read() -> tuple[Tensors, dict[str, bytes]]:
        metadata = reader.read_metadata()
        tensors, pickled_chunks = {}, {}
        for name, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            tensors[name] = dataclasses.replace(saved, chunks=[])
            locations = [metadata.storage_data[MetadataIndex(name, chunk.offsets)] for chunk in saved.chunks]
            pickled_chunks[name] = pickle.dumps((saved.chunks, locations))
        return tensors, pickled_chunks

    shared: list = [run_or_raise(group, lambda: read() if group.rank() == 0 else None)]
    dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group)
    return shared[0]


def local_index(chunks: Chunks, tensors: Tensors, pickled_chunks: dict[str, bytes]) -> Metadata:
    """Return an index of only the tensors of which a rank wants chunks. tensors, pickled_chunks: see `share_index`."""
    index = Metadata({name: tensors[name] for name in chunks}, storage_data={}, storage_meta=StorageMeta())
    for name in (name for name, wanted in chunks.items() if wanted):
        saved, locations = pickle.loads(pickled_chunks[name])
        index.state_dict_metadata[name] = dataclasses.replace(tensors[name], chunks=saved)
        for chunk, location in zip(saved, locations, strict=True):
            index.storage_data[MetadataIndex(name, chunk.offsets)] = location
    return index
