"""Copies on the host of the chunks that a rank saves, made between steps."""

from __future__ import annotations

import torch

from course_lib.checkpoint.chunks import Chunks, split_large, state_chunks, weight_chunks, write_assignment
from course_lib.checkpoint.files import CheckpointError
from course_lib.checkpoint.groups import gather_or_raise, host_group, run_or_raise
from course_lib.checkpoint.plans import chunk_signature
from course_lib.five_d.model import ParallelModel


def synchronize_for_save(parallel: ParallelModel) -> torch.optim.Optimizer:
    """Wait for all values, free gathered parameters, and return the optimizer that has the states. Between steps."""
    parallel.sharding.wait()
    return parallel.inner_optimizer


def first_not_finite(chunks: Chunks) -> str | None:
    """Return the name of the first tensor with an inf or NaN, or None. The host synchronizes once per device."""
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, each in chunks.items():
        for value in (chunk.values for chunk in each if chunk.values.is_floating_point()):
            flags = by_device.setdefault(value.device, {})
            finite = value.isfinite().all()
            flags[name] = flags[name] & finite if name in flags else finite
    for flags in by_device.values():
        finite_tensors = torch.stack([*flags.values()]).tolist()
        if not all(finite_tensors):
            return [*flags][finite_tensors.index(False)]
    return None


class HostStager:
    """Copies the chunks that this rank writes to the host, into memory that it reuses. Its constructor is collective.

    signature: `chunk_signature` of this rank's chunks when writers were assigned; assigned: (name, offsets) of the
    chunks that this rank writes; copies: their memory on the host.
    """

    def __init__(self, parallel: ParallelModel):
        self.parallel, self.group = parallel, host_group()
        self.signature: list[tuple] | None = None
        self.assigned: set[tuple] = set()
        self.copies: dict[tuple, torch.Tensor] = {}

    def model_chunks(self) -> Chunks:
        """Return all chunks that this rank has: views of the model's memory, none larger than one read."""
        states = synchronize_for_save(self.parallel).state
        chunks = weight_chunks(self.parallel) | state_chunks(self.parallel, states)
        return {name: [smaller for chunk in each for smaller in split_large(chunk)] for name, each in chunks.items()}

    def copy_to_host(self, chunks: Chunks) -> Chunks:
        """Return copies on the host of the chunks that this rank writes. The next call reuses their memory."""
        staged: Chunks = {}
        for name, chunk in ((name, chunk) for name, each in chunks.items() for chunk in each):
            if (key := (name, chunk.offsets)) in self.assigned:
                if key not in self.copies:
                    like, pinned = chunk.values, chunk.values.is_cuda
                    self.copies[key] = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
                self.copies[key].copy_(chunk.values, non_blocking=True)
                staged.setdefault(name, []).append(chunk._replace(values=self.copies[key]))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return staged

    def stage(self) -> Chunks:
        """Return copies on the host of the chunks that this rank writes. Collective: one exchange, once writers are
        assigned.

        Raises CheckpointError, on all ranks, if a weight or a state of any of them is not finite.
        """
        chunks: Chunks = {}
        staged: Chunks = {}

        def inspect() -> tuple[bool, str | None]:
            """Return whether the writers of this rank's chunks are assigned, and the first tensor that is not finite.
            Copies if they are.
            """
            chunks.update(self.model_chunks())
            not_finite = first_not_finite(chunks)
            if assigned := self.signature == chunk_signature(chunks):
                staged.update(self.copy_to_host(chunks))
            return assigned, not_finite

        by_rank = gather_or_raise(self.group, inspect)
        if name := next((name for _, name in by_rank if name), None):
            raise CheckpointError(f"{name} is not finite")
        if all(assigned for assigned, _ in by_rank):
            return staged
        local_writes = write_assignment(chunks, self.group)  # there are no states before the first step
        staged.clear()
        self.signature, self.copies = chunk_signature(chunks), {}  # frees the last copy before there is a new one
        self.assigned = {(name, chunk.offsets) for name, each in local_writes.items() for chunk in each}
        return run_or_raise(self.group, lambda: self.copy_to_host(chunks))
