"""Boxes for torch.distributed.checkpoint: what a rank writes of a checkpoint, and what it reads."""

from __future__ import annotations

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
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

from course_lib.checkpoint.chunks import Chunk


def chunk(box: Chunk) -> ChunkStorageMetadata:
    """A box as torch.distributed.checkpoint describes it."""
    return ChunkStorageMetadata(torch.Size(box.offsets), box.values.shape)


class ChunkSavePlanner(DefaultSavePlanner):
    """Writes boxes: dcp.save({name: [Chunk, …]}, planner=ChunkSavePlanner()). No two ranks come with the same box.

    All ranks' boxes of a name have to make up the whole tensor: the coordinator checks it, and raises ValueError.
    """

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict, storage_meta=None, is_coordinator: bool = False) -> None:
        """Called first."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.values = {(name, box.offsets): box.values for name, boxes in state_dict.items() for box in boxes}

    def create_local_plan(self) -> SavePlan:
        """An item for each box."""
        items = []
        for name, boxes in self.state_dict.items():
            for box in boxes:
                kind = TensorProperties.create_from_tensor(box.values)
                about = TensorWriteData(chunk(box), kind, torch.Size(box.full_shape))
                index = MetadataIndex(name, torch.Size(box.offsets))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The values of a box."""
        return self.values[index.fqn, tuple(index.offset)]


class ChunkLoadPlanner(LoadPlanner):
    """Fills boxes from those that overlap them: dcp.load({name: [Chunk, …]}, planner=ChunkLoadPlanner())."""

    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Called first."""
        self.boxes, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        """Which part of which saved box goes where. Raises ValueError where some of a box was never saved."""
        items = []
        for name, boxes in self.boxes.items():
            saved = self.metadata.state_dict_metadata[name]
            found = create_read_items_for_chunk_list(name, saved, [chunk(box) for box in boxes])
            if sum(item.lengths.numel() for item in found) != sum(box.values.numel() for box in boxes):
                raise ValueError(f"{name}: a part of it was never saved")
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing is left to do."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value) -> None:
        """Boxes are tensors. Raises ValueError: what is no tensor is a pickle."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where to put what has been read."""
        target = self.boxes[read_item.dest_index.fqn][read_item.dest_index.index].values
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do."""


def read_into(boxes: dict[str, list[Chunk]], reader: FileSystemReader) -> None:
    """Fill boxes from a checkpoint; each rank plans for itself. Raises what reading them has raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no group to plan with
        try:
            dcp.load(boxes, storage_reader=reader, planner=ChunkLoadPlanner(), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
