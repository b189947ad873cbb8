"""What is worked out once: a save's plan and index, for the saves that follow; the index of a load, for all ranks.

Both grow with the boxes of all ranks, hundreds of thousands at 1,000 of them, and rank 0 has to go through all of them
in Python, beside a training step that waits for the same interpreter.
"""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from course_lib.checkpoint.chunks import Chunk
from course_lib.checkpoint.files import CheckpointError, ChunkReader, ChunkWriter
from course_lib.checkpoint.groups import on_each, together
from course_lib.checkpoint.planners import ChunkSavePlanner


def described(boxes: dict[str, list[Chunk]]) -> list[tuple]:
    """All that a plan depends on, of each box: its name, place, sizes and dtype."""
    return [
        (name, box.offsets, box.full_shape, tuple(box.values.shape), box.values.dtype)
        for name, each in boxes.items()
        for box in each
    ]


class PlannedSaves:
    """Writes boxes to one folder after another, by the first one's plan and index while no rank's boxes change.

    A plan is one of all ranks: `fits` on each of them, or it is made again. None is left by a save that has failed.
    """

    def __init__(self):
        self.plan, self.boxes, self.places, self.index = None, [], [], b""

    def fits(self, boxes: dict[str, list[Chunk]]) -> bool:
        """Whether there is a plan, and these boxes are of this rank's part of it; their values may be others."""
        return self.plan is not None and self.boxes == described(boxes)

    def save(self, boxes: dict[str, list[Chunk]], folder: Path, group: dist.ProcessGroup, again: bool) -> None:
        """Write boxes and index to an empty folder. again: by the plan that is there. Collective.

        Raises, on all ranks, CheckpointError or torch.distributed.checkpoint's CheckpointException.
        """
        plan, self.plan = self.plan, None
        writer, planner = ChunkWriter(folder), ChunkSavePlanner()

        def write() -> None:
            planner.set_up_planner(boxes)
            writer.write_data(plan, planner)
            if writer.places != self.places:
                raise CheckpointError("the boxes are not where the index has them")
            if self.index:
                writer.write_index(self.index)

        if again:
            together(group, write)
        else:
            dcp.save(boxes, storage_writer=writer, planner=planner, process_group=group)
            plan, self.boxes, self.places, self.index = planner.plan, described(boxes), writer.places, writer.index
        self.plan = plan


def shared_index(reader: ChunkReader, group: dist.ProcessGroup) -> tuple[dict[str, TensorStorageMetadata], dict]:
    """What rank 0 reads of .metadata, on all ranks. Collective. Raises CheckpointError, on all ranks.

    Sent are two dicts. One has what is known of each tensor but its boxes: a few for each weight. The other has, for
    each tensor, its boxes and their places in files, pickled by themselves: of all boxes of the checkpoint, some 150
    bytes each. A rank unpickles those of its own tensors alone (`own_index`).
    """

    def read() -> tuple[dict, dict]:
        metadata, kinds, places = reader.read_metadata(), {}, {}
        for name, kind in metadata.state_dict_metadata.items():
            kinds[name] = dataclasses.replace(kind, chunks=[])
            there = [metadata.storage_data[MetadataIndex(name, box.offsets)] for box in kind.chunks]
            places[name] = pickle.dumps((kind.chunks, there))
        return kinds, places

    shared = [on_each(group, lambda: read() if group.rank() == 0 else None)]
    dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group)
    return shared[0]


def own_index(boxes: dict[str, list[Chunk]], kinds: dict[str, TensorStorageMetadata], places: dict) -> Metadata:
    """An index of the tensors of which a rank wants boxes, and of no others. kinds, places: see `shared_index`."""
    own = Metadata({name: kinds[name] for name in boxes}, storage_data={}, storage_meta=StorageMeta())
    for name in (name for name, wanted in boxes.items() if wanted):
        chunks, there = pickle.loads(places[name])
        own.state_dict_metadata[name] = dataclasses.replace(kinds[name], chunks=chunks)
        for box, place in zip(chunks, there, strict=True):
            own.storage_data[MetadataIndex(name, box.offsets)] = place
    return own
