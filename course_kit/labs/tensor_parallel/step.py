"""What a step of a split model sends and keeps: on a rank, by counting collectives and saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from course_kit.labs.tensor_parallel.models import batch_of, split_model
from course_lib import tensor_parallel
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.recompute.modes import apply_recompute, retained_bytes
from course_lib.single_gpu.model import ModelConfig
from course_lib.tensor_parallel.partitioned_checkpoints import apply_partitioned_recompute


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages of some tensors."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(found.values())


def sent_per_step(group: dist.ProcessGroup, config: ModelConfig, batch: int, seq: int) -> int:
    """Bytes that this rank sends in a forward and backward, without those of the loss."""
    model, (inputs, targets) = split_model(config, group), batch_of(config, batch, seq)
    with count_traffic() as traffic:
        logits = model(inputs)
    with count_traffic() as back:
        tensor_parallel.vocab_parallel_cross_entropy(logits, targets, group, config.vocab).backward()
    large = [record.bytes for record in (traffic.records + back.records) if record.bytes > 100 * inputs.numel()]
    return sum(large)


def saved_by_rank(group: dist.ProcessGroup, config: ModelConfig, batch: int = 4, seq: int = 128) -> tuple[int, int]:
    """Bytes of this rank's parameters, and of what its forward keeps for backward."""
    model, kept = split_model(config, group), {}
    inputs, targets = batch_of(config, batch, seq)
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(inputs)
        step_loss = tensor_parallel.vocab_parallel_cross_entropy(logits, targets, group, config.vocab)  # noqa: F841
    return storage_bytes(model.parameters()), sum(kept.values())


@contextlib.contextmanager
def summed_in(spare: torch.Tensor) -> Iterator[None]:
    """Inside, all_reduce sums in `spare`, a tensor from before: gloo's threads hold what they sum a while longer."""
    plain = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        plain(spare[: tensor.numel()].copy_(tensor.flatten()), *args, **kwargs)
        tensor.copy_(spare[: tensor.numel()].view_as(tensor))

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = plain


def checkpoint_trial(
    group: dist.ProcessGroup, how: str, config: ModelConfig, batch: int, seq: int
) -> tuple[int, Traffic, list[torch.Tensor]]:
    """Bytes kept for backward, the traffic of a step, and the gradients; how: a mode of apply_recompute, or "in
    parts".
    """
    model, (inputs, targets) = split_model(config, group), batch_of(config, batch, seq)
    if how == "in parts":
        apply_partitioned_recompute(model, group)
    else:
        apply_recompute(model, how)
    losses = []

    def forward() -> torch.Tensor:
        return tensor_parallel.vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab)

    with count_traffic() as traffic:
        with summed_in(torch.empty(batch * seq * config.hidden)):
            kept = retained_bytes(model, lambda: losses.append(forward()))
        losses[0].backward()
    return kept, traffic, [p.grad for p in model.parameters()]
