"""Check of exercise 04.8: `parallel_accumulate` weights every target token of all ranks equally, and sends once."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_kit.checks.data_parallel.comparing import TINY, Tensors, bucket_count, farthest, in_group
from course_kit.labs.data_parallel import batch_of
from course_kit.typed import grad_of
from course_lib.collectives.traffic import count_traffic
from course_lib.data_parallel import replicas
from course_lib.recompute.modes import IGNORED
from course_lib.single_gpu.model import Transformer

Lengths = tuple[tuple[int, ...], ...]  # target tokens by rank and micro-batch
# 281 and 273 target tokens in all, not exact in BF16; none; a single one.
OF_FOUR: tuple[Lengths, ...] = (((30, 0), (49, 62), (0, 0), (70, 70)),)
OF_TWO: tuple[Lengths, ...] = (((70, 63), (70, 70)),)
OF_THREE: tuple[Lengths, ...] = ((0,), (0,), (0,)), ((0,), (1,), (0,))


def uneven(lengths: Lengths, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of a rank, with lengths[rank] target tokens."""
    inputs, targets = batch_of(rank, TINY, batch=len(lengths[rank]), seq=70)
    for row, length in enumerate(lengths[rank]):
        targets[row, : 70 - length] = IGNORED
    return list(zip(inputs.split(1), targets.split(1), strict=True))


def summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropies in float32; logits: [b, s, v]; targets: [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED)


@functools.cache
def in_one_process(lengths: Lengths, dtype: torch.dtype) -> tuple[Tensors, torch.Tensor]:
    """Return the gradients by name, and the mean loss, of one process that has all ranks' micro-batches."""
    single, mean = Transformer(TINY), torch.zeros(())
    parts = [part for rank in range(len(lengths)) for part in uneven(lengths, rank)]
    tokens = max(1, sum(map(sum, lengths)))
    for inputs, targets in parts:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = single(inputs)
        part_loss = summed(logits, targets) / tokens
        part_loss.backward()
        mean += part_loss.detach()
    return {name: grad_of(p) for name, p in single.named_parameters()}, mean


def uneven_trial(group: dist.ProcessGroup | None, cases: tuple[Lengths, ...], dtype: torch.dtype) -> tuple:
    """Return gradients, loss and traffic of each case, the dtype of each forward, and each call of the loss."""
    dp = replicas.DataParallel(Transformer(TINY), group, bucket_mb=0.02)
    result, dtypes, asked = [], [], []

    def note(*_) -> None:
        dtypes.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)

    def local_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        asked.append(len(targets))
        return summed(logits, targets)

    dp.module.register_forward_pre_hook(note)
    for lengths in cases:
        dp.zero_grad()
        with count_traffic() as traffic:
            try:
                mean = replicas.parallel_accumulate(dp, uneven(lengths, dist.get_rank(group)), dtype, local_loss)
            except NotImplementedError:
                raise
            except RuntimeError as error:
                raise AssertionError(f"{error}; all micro-batches but the last belong into no_sync()") from error
        assert not dp.reducer.unfinished, "finish() is missing: gradients are still in flight when you return"
        result.append(({name: grad_of(p).clone() for name, p in dp.module.named_parameters()}, mean, traffic))
    return result, dtypes, asked


def check() -> None:
    """Assert gradients, loss, dtypes and traffic on 4, 2 and 3 ranks with uneven numbers of targets."""
    from course_kit.ranks import shared

    with shared(4).within(20):
        for cases, dtype in ((OF_FOUR, torch.float32), (OF_TWO, torch.bfloat16), (OF_THREE, torch.float32)):
            for rank, outcome in enumerate(in_group(len(cases[0]), uneven_trial, cases, dtype)):
                check_rank(rank, cases, dtype, *outcome)


def check_rank(
    rank: int, cases: tuple[Lengths, ...], dtype: torch.dtype, result: list, dtypes: list, asked: list
) -> None:
    """Assert one rank's results of the cases."""
    n, buckets = len(cases[0]), bucket_count(Transformer(TINY), 0.02e6)
    parts = sum(len(lengths[rank]) for lengths in cases)
    assert dtypes == [dtype] * parts, f"rank {rank}: {parts} micro-batches in {dtype}, and they ran in {dtypes}"
    assert asked == [1] * parts, f"rank {rank}: loss_of is called for {len(asked)} of {parts} micro-batches"
    for lengths, (got, mean_loss, traffic) in zip(cases, result, strict=True):
        expected, mean = in_one_process(lengths, dtype)
        where = f"targets {lengths}, {dtype}, rank {rank}"
        groups = {record.group for record in traffic.records}
        assert groups == {tuple(range(4 - n, 4))}, f"{where}: communicate within dp.group alone"
        assert isinstance(mean_loss, torch.Tensor), (
            f"{where}: you return {mean_loss!r}: return the loss, a float32 scalar tensor"
        )
        if mean == 0:
            zero = mean_loss == 0 and not any(g.any() for g in got.values())
            assert zero, f"{where}: no rank has a target: a loss and gradients of 0, not of 0 / 0: clamp"
        else:
            name, error = farthest(got, expected)
            near = 1e-4 if dtype == torch.float32 else 1e-2  # scaling later rounds differently
            assert error < near, f"{where}: {name}'s gradient is {error:.1%} off: weigh by all ranks' tokens"
        assert mean_loss.dtype == torch.float32, f"{where}: you return a loss in {mean_loss.dtype}"
        assert abs(mean_loss - mean) < 1e-4, (
            f"{where}: you return a loss of {mean_loss:.4f}; over all tokens it is {mean:.4f}"
        )
        large = sum(record.bytes > 64 for record in traffic.records)
        assert large == buckets, f"{where}: {large} large all-reduces, {buckets} are enough: no_sync()"
        assert traffic.calls <= buckets + 3, f"{where}: {traffic.calls - buckets} calls beside the buckets"
