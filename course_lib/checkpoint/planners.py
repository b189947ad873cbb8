"""Chunks for torch.distributed.checkpoint: the plans of a rank's writes and reads."""

from __future__ import annotations

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from course_lib.checkpoint.chunks import Chunk, Chunks


def storage_metadata(chunk: Chunk) -> ChunkStorageMetadata:
    """Return a chunk as torch.distributed.checkpoint describes it."""
    return ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.values.shape)


class ChunkSavePlanner(DefaultSavePlanner):
    """Plan to write chunks: dcp.save({name: [Chunk, …]}, planner=ChunkSavePlanner()). No two ranks pass the same chunk.

    The chunks of all ranks must make up each full tensor: the coordinator checks it, and raises ValueError.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values: dict[tuple, torch.Tensor] = {}

    def set_up_planner(self, state_dict: dict, storage_meta=None, is_coordinator: bool = False) -> None:
        """Take the chunks. Called first."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.values = {(name, chunk.offsets): chunk.values for name, chunks in state_dict.items() for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        """Return a plan with one item per chunk."""
        items = []
        for name, chunks in self.state_dict.items():
            for chunk in chunks:
                properties = TensorProperties.create_from_tensor(chunk.values)
                data = TensorWriteData(storage_metadata(chunk), properties, torch.Size(chunk.full_shape))
                index = MetadataIndex(name, torch.Size(chunk.offsets))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of a chunk."""
        assert index.offset is not None
        return self.values[index.fqn, tuple(index.offset)]


class ChunkLoadPlanner(LoadPlanner):
    """Fill chunks from saved ones that overlap them: dcp.load({name: [Chunk, …]}, planner=ChunkLoadPlanner())."""

    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the chunks and the index. Called first."""
        assert metadata is not None
        self.chunks: Chunks = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Return which part of which saved chunk goes where. Raises ValueError if an element was never saved."""
        items: list[ReadItem] = []
        for name, chunks in self.chunks.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            reads = create_read_items_for_chunk_list(name, saved, [storage_metadata(chunk) for chunk in chunks])
            if sum(item.lengths.numel() for item in reads) != sum(chunk.values.numel() for chunk in chunks):
                raise ValueError(f"{name}: a part of it was never saved")
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the ranks' plans: each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value) -> None:
        """Raise ValueError: chunks are tensors, and anything else in a file is a pickle."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the view of a chunk's values into which an item is read."""
        number = read_item.dest_index.index
        assert number is not None
        target = self.chunks[read_item.dest_index.fqn][number].values
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: `tensor` is a view of the chunk's values."""


def read_into(chunks: Chunks, reader: FileSystemReader) -> None:
    """Fill chunks from a checkpoint. Every rank plans for itself. Raises the errors of the reader and the planner."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no group to plan with
        try:
            dcp.load(chunks, storage_reader=reader, planner=ChunkLoadPlanner(), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
