"""Check of exercise 04.7: `Reducer.add` stores gradients, and launches the buckets that are complete, in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.data_parallel.comparing import TINY, bucket_count, cause, farthest, in_group, one_process
from course_kit.checks.data_parallel.watched import Watched
from course_kit.labs.data_parallel import batch_of, sgd_step
from course_kit.typed import grad_of, override
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.data_parallel import buckets, replicas
from course_lib.single_gpu.model import Transformer, loss


class Four:
    """The part of a group that a Reducer uses before it launches."""

    def size(self) -> int:
        """Return the number of ranks."""
        return 4


class Launched:
    """The work of an all-reduce; waiting for it is an error."""

    def wait(self) -> None:
        """Raise AssertionError."""
        raise AssertionError("add() waits for an all-reduce: finish() does that")


def launch_order(
    arrivals: Sequence[int], mode: str = "overlap", reduce_dtype: torch.dtype | None = None
) -> list[list[int]]:
    """Return the buckets (of one parameter each) that have been launched after each gradient; 0: the last parameter's.

    arrivals: the order in which the gradients come, by bucket.
    """
    parameters, result = [nn.Parameter(torch.zeros(3)) for _ in arrivals], []
    launched: list[int] = []
    names = {p: f"parameter {i}" for i, p in enumerate(parameters)}
    reducer = buckets.Reducer(names, cast(dist.ProcessGroup, Four()), mode, 1, reduce_dtype)
    for number, bucket in enumerate(reducer.buckets):
        override(bucket, launch=functools.partial(launched.append, number), work=Launched())
    for number in arrivals:
        bucket = cast(buckets.Bucket, reducer.buckets[number])
        (parameter,) = bucket.parameters
        parameter.grad = torch.ones(3)
        reducer.add(parameter, True)
        assert parameter.grad is bucket.views[parameter], "store the gradient in its bucket: .grad is a view of it then"
        factor = parameter.grad[0].item()
        assert factor == bucket.scale, (
            f"reduce_dtype {reduce_dtype}: the final gradient is scaled by {factor}; bucket.scale is {bucket.scale}"
        )
        assert parameter not in bucket.missing, (
            f"mode {mode}: the gradient is final, its parameter is still in bucket.missing: take it out, in every mode"
        )
        result.append(list(launched))
    return result


def dp_trial(
    group: dist.ProcessGroup | None, mode: str, micro_batches: int, bucket_mb: float = 0.02, steps: int = 2
) -> tuple:
    """Train with DataParallel. Return the first step's gradients, the weights, the all-reduces before each block's
    backward, the traffic of the last backward, of finish() and inside no_sync(), and the number of buffers.
    """
    rank = dist.get_rank(group)
    dp = replicas.DataParallel(Transformer(TINY, seed=rank), group, mode, bucket_mb)  # other weights on each, at first
    dp.load_state_dict({f"module.{name}": value for name, value in Transformer(TINY).state_dict().items()})
    inputs, targets = batch_of(rank, TINY)
    parts, first = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)), None
    for _ in range(steps):
        dp.zero_grad()
        quiet = Traffic()
        for part_inputs, part_targets in parts[:-1]:
            with dp.no_sync(), count_traffic() as traffic:
                (loss(dp(part_inputs), part_targets) / micro_batches).backward()
            quiet += traffic
            in_buckets = [p.grad is cast(buckets.Bucket, dp.reducer.bucket_of[p]).views[p] for p in dp.parameters()]
            assert all(in_buckets), (
                "store the gradients of all micro-batches in their buckets, not of the last one only"
            )
            assert all(p in dp.reducer.bucket_of[p].missing for p in dp.parameters()), (
                "a parameter leaves bucket.missing with its final gradient only, not with an earlier micro-batch's"
            )
        watched = Watched().blocks(dp.module)
        step_loss = loss(dp(parts[-1][0]), parts[-1][1]) / micro_batches
        with watched as early:
            step_loss.backward()
        with count_traffic() as late:
            dp.finish()
        first = first or {name: grad_of(p).clone() for name, p in dp.module.named_parameters()}
        sgd_step(dp)
    named = list(dp.module.named_parameters())
    storages = {grad_of(p).untyped_storage().data_ptr() for _, p in named}
    return first, {name: p.detach() for name, p in named}, watched.seen, early, late, quiet, len(storages)


def check_order() -> None:
    """Assert which buckets start after each gradient, without any rank."""
    for arrivals in ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)):
        for count, launched in enumerate(launch_order(arrivals), start=1):
            present = arrivals[:count]
            expected = [k for k in range(4) if set(range(k + 1)) <= set(present)]
            assert launched == expected, (
                f"buckets complete, in order: {present}; to be launched by then: {expected}, not {launched}: "
                "each after all before it, and all that can"
            )
    assert launch_order((0, 1, 2, 3), "naive", torch.float64)[-1] == [], "naive starts nothing during backward"


def check() -> None:
    """Assert the order, then two steps of DataParallel in each mode on 4 ranks against one process."""
    from course_kit.ranks import shared

    check_order()
    (grads, _), (_, weights) = one_process(4), one_process(4, steps=2)
    elements = sum(g.numel() for g in grads.values()) + len(grads)
    with shared(4).within(20):
        for mode, micro_batches in (("bucket", 2), ("overlap", 1), ("naive", 1)):
            outcomes = in_group(4, dp_trial, mode, micro_batches)
            for rank, (got, after, seen, early, late, quiet, storages) in enumerate(outcomes):
                where = f"{mode}, {micro_batches} micro-batches, rank {rank}"
                assert quiet.calls == 0, f"{where}: {quiet.calls} all-reduces inside of no_sync()"
                name, error = farthest(got, grads)
                earlier = ", earlier micro-batches' with 1" if micro_batches > 1 else ""
                assert error < 1e-4, (
                    f"{where}: the gradient of {name} {cause(got[name], grads[name], 4)} "
                    f"(the final gradient is stored with bucket.scale{earlier})"
                )
                name, error = farthest(after, weights)
                assert error < 1e-4, (
                    f"{where}: the first step is right, and after 2 steps {name} is not one process's: is a gradient "
                    "of an earlier step left?"
                )
                expected = bucket_count(Transformer(TINY), 0.02e6 if mode == "bucket" else 0)
                assert early.calls + late.calls == expected, (
                    f"{where}: {early.calls + late.calls} all-reduces, not {expected}"
                )
                bytes_sent = 2 * 3 * 4 * elements // 4
                assert abs(early.bytes + late.bytes - bytes_sent) <= 2 * expected, (
                    f"{where}: {early.bytes + late.bytes:,} bytes, not {bytes_sent:,}"
                )
                if mode == "naive":
                    assert early.calls == 0, f"{where}: naive starts nothing during backward"
                else:
                    assert late.calls == 0, (
                        f"{where}: {late.calls} buckets are launched by finish() only: none is missing here"
                    )
                    assert max(seen) > 0, (
                        f"{where}: nothing has been launched when backward reaches the first block: no overlap"
                    )
                assert storages == expected, f"{where}: the gradients should be views of {expected} buffers"
