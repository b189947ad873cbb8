"""Copies on the host of what a rank saves of a model, between steps."""

from __future__ import annotations

import torch

from course_lib.checkpoint.chunks import Chunk, own_share, split_large, state_chunks, weight_chunks
from course_lib.checkpoint.files import CheckpointError
from course_lib.checkpoint.groups import host_group, on_each, told_and_kept
from course_lib.checkpoint.plans import described
from course_lib.five_d.model import ParallelModel


def synchronize_for_save(parallel: ParallelModel) -> torch.optim.Optimizer:
    """Wait for all values, free gathered parameters, and return the optimizer that has the states. Between steps."""
    parallel.sharding.wait()
    return parallel.inner_optimizer


def not_finite(boxes: dict[str, list[Chunk]]) -> str | None:
    """Return the name of the first tensor with an inf or NaN, or None. The host synchronizes once per device."""
    flags: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, each in boxes.items():
        for value in (box.values for box in each if box.values.is_floating_point()):
            of_device = flags.setdefault(value.device, {})
            of_device[name] = of_device.get(name, True) & value.isfinite().all()
    for each in flags.values():
        good = torch.stack([*each.values()]).tolist()
        if not all(good):
            return [*each][good.index(False)]
    return None


class HostStager:
    """Copies on the host of the boxes that this rank writes; their memory is reused. The constructor is collective."""

    def __init__(self, parallel: ParallelModel):
        self.parallel, self.group = parallel, host_group()
        self.known, self.own, self.copies = None, set(), {}  # of all boxes; this rank's to write; their memory

    def all_boxes(self) -> dict[str, list[Chunk]]:
        """Return all boxes that this rank has: views of the model's memory, none larger than one read."""
        states = synchronize_for_save(self.parallel).state
        boxes = weight_chunks(self.parallel) | state_chunks(self.parallel, states)
        return {name: [part for box in each for part in split_large(box)] for name, each in boxes.items()}

    def copied(self, boxes: dict[str, list[Chunk]]) -> dict[str, list[Chunk]]:
        """Copy this rank's share to the host. The next copy uses its memory again."""
        staged = {}
        for name, box in ((name, box) for name, each in boxes.items() for box in each):
            if (key := (name, box.offsets)) in self.own:
                if key not in self.copies:
                    like, pinned = box.values, box.values.is_cuda
                    self.copies[key] = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
                self.copies[key].copy_(box.values, non_blocking=True)
                staged.setdefault(name, []).append(box._replace(values=self.copies[key]))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return staged

    def look(self) -> tuple[tuple, tuple]:
        """Return what all ranks are told, and what this rank keeps.

        Told: whether this rank knows which rank writes which box, and the first tensor that is not finite, or None.
        Kept: all boxes, and the copy of its share, if it knows.
        """
        boxes = self.all_boxes()
        known = self.known == described(boxes)
        return (known, not_finite(boxes)), (boxes, self.copied(boxes) if known else None)

    def stage(self) -> dict[str, list[Chunk]]:
        """Copy the boxes that this rank writes to the host. Collective: one exchange, once shares are known.

        Raises CheckpointError, on all ranks, if a weight or a state of any of them is not finite.
        """
        of_all, (boxes, staged) = told_and_kept(self.group, self.look)
        if bad := next((name for _, name in of_all if name), None):
            raise CheckpointError(f"{bad} is not finite")
        if not all(known for known, _ in of_all):  # there are no states before the first step
            share = own_share(boxes, self.group)
            self.known, self.copies, staged = described(boxes), {}, None  # the last copy goes before there is a new one
            self.own = {(name, box.offsets) for name, each in share.items() for box in each}
            staged = on_each(self.group, lambda: self.copied(boxes))
        return staged
