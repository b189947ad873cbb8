"""Bytes that a step of a split model sends and saves on a rank, counted by collectives and saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from unittest import mock

import torch
import torch.distributed as dist

from course_kit.labs.tensor_parallel.models import batch_of, split_model
from course_kit.typed import grad_of
from course_lib import tensor_parallel
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.recompute.modes import apply_recompute, retained_bytes
from course_lib.single_gpu.model import ModelConfig
from course_lib.tensor_parallel.partitioned_checkpoints import apply_partitioned_recompute


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the distinct storages of some tensors."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values())


def sent_per_step(group: dist.ProcessGroup, config: ModelConfig, batch: int, seq: int) -> int:
    """Return the bytes that this rank sends in a forward and backward, without the loss."""
    model, (inputs, targets) = split_model(config, group), batch_of(config, batch, seq)
    with count_traffic() as traffic:
        logits = model(inputs)
    with count_traffic() as back:
        tensor_parallel.vocab_parallel_cross_entropy(logits, targets, group, config.vocab).backward()
    large = [record.bytes for record in (traffic.records + back.records) if record.bytes > 100 * inputs.numel()]
    return sum(large)


def saved_by_rank(group: dist.ProcessGroup, config: ModelConfig, batch: int = 4, seq: int = 128) -> tuple[int, int]:
    """Return the bytes of the local parameters, and the bytes that the forward saves for backward."""
    model = split_model(config, group)
    storages: dict[int, int] = {}
    inputs, targets = batch_of(config, batch, seq)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(inputs)
        step_loss = tensor_parallel.vocab_parallel_cross_entropy(logits, targets, group, config.vocab)  # noqa: F841
    return storage_bytes(model.parameters()), sum(storages.values())


@contextlib.contextmanager
def reduced_in(spare: torch.Tensor) -> Iterator[None]:
    """Have all_reduce sum in `spare`, an existing tensor, since gloo's threads hold summed tensors a while longer."""
    plain = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args, **kwargs) -> None:
        plain(spare[: tensor.numel()].copy_(tensor.flatten()), *args, **kwargs)
        tensor.copy_(spare[: tensor.numel()].view_as(tensor))

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


def checkpoint_trial(
    group: dist.ProcessGroup, how: str, config: ModelConfig, batch: int, seq: int
) -> tuple[int, Traffic, list[torch.Tensor]]:
    """Return the bytes saved for backward, the traffic of a step, and the gradients; how: a mode of apply_recompute, or
    "in parts".
    """
    model, (inputs, targets) = split_model(config, group), batch_of(config, batch, seq)
    if how == "in parts":
        apply_partitioned_recompute(model, group)
    else:
        apply_recompute(model, how)
    losses: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        return tensor_parallel.vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab)

    with count_traffic() as traffic:
        with reduced_in(torch.empty(batch * seq * config.hidden)):
            saved = retained_bytes(model, lambda: losses.append(forward()))
        losses[0].backward()
    return saved, traffic, [grad_of(p) for p in model.parameters()]
