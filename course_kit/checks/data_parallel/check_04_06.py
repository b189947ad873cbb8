"""Check of exercise 04.6: `Bucket.launch` sends the buffer, with zeros and flags for missing gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.data_parallel.comparing import in_group
from course_kit.checks.data_parallel.watched import Watched
from course_lib.collectives.traffic import Traffic
from course_lib.data_parallel import buckets

VALUES = [101.0, 50.0, 20.0]  # their fifths, rounded to BF16, add up to something else
DTYPES = (torch.float32, None), (torch.bfloat16, torch.float32), (torch.float64, None)  # of gradients, of their sum


def bucket_trial(
    group: dist.ProcessGroup, dtype: torch.dtype, reduce_dtype: torch.dtype | None
) -> tuple[list[torch.Tensor | None], Traffic, torch.dtype, list[bool]]:
    """Return the gradients of a bucket of four parameters, the traffic, the dtype sent, and which are views of it.

    Rank r has no gradient for parameter r, and no rank has one for the last. The gradient of parameter 2 was computed
    by an earlier micro-batch.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 5), (7,), (2, 2), (4,))]
    bucket = buckets.Bucket(parameters, group, 1 / 5, reduce_dtype)
    bucket.flat.fill_(99)  # as an earlier step may have left it
    bucket.flags.fill_(0 if reduce_dtype else n)
    values = {i: VALUES[rank] + i for i in range(3) if i != rank}
    for i, value in values.items():
        parameters[i].grad = torch.full_like(parameters[i], value)
        if i != 2:
            bucket.store(parameters[i], bucket.scale)
            bucket.missing.remove(parameters[i])
        elif dtype != torch.float32:
            bucket.store(parameters[i], 1.0)
    watched = Watched()
    with watched as traffic:
        bucket.launch()
    assert bucket.work is not None, "launch() must start the all-reduce with async_op and put the work into self.work"
    assert watched.waits == 0, "launch() must not wait: finish() does"
    assert bucket.sent is not None, "keep the tensor that is sent in self.sent"
    sent_as = bucket.sent.dtype
    bucket.finish()
    inside = [
        p.grad is None or p.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        for p in parameters
    ]
    return [None if p.grad is None else p.grad.float() for p in parameters], traffic, sent_as, inside


def used_trial(group: dist.ProcessGroup) -> torch.Tensor | None:
    """Return the gradient of the second of two parameters. Only rank 0 has not used it; the others miss nothing."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    bucket = buckets.Bucket(parameters, group, 1.0)  # its flags are 0, as they are before the first step
    for parameter in parameters[: 1 if dist.get_rank(group) == 0 else 2]:
        parameter.grad = torch.ones(2)
        bucket.store(parameter, bucket.scale)
        bucket.missing.remove(parameter)
    bucket.launch()
    bucket.finish()
    return parameters[1].grad


def check() -> None:
    """Assert sums, flags, views, dtype and number of all-reduces on a group of three ranks."""
    from course_kit.ranks import shared

    with shared(4).within(20):
        outcomes = in_group(3, lambda group: [bucket_trial(group, *dtypes) for dtypes in DTYPES])
        used = in_group(3, used_trial)
    for rank, trials in enumerate(outcomes, start=1):
        for (dtype, reduce_dtype), (grads, traffic, sent_as, inside) in zip(DTYPES, trials, strict=True):
            assert traffic.calls == 1 and traffic.select("all_reduce").calls == 1, "one all-reduce for the whole bucket"
            assert traffic.records[0].group == (1, 2, 3), "reduce over self.group"
            assert sent_as == (reduce_dtype or dtype), (
                f"{dtype} gradients go out as {sent_as}, not as {reduce_dtype or dtype}"
            )
            for i in range(3):
                total = sum(VALUES[r] + i for r in range(3) if r != i) / 5
                expected = torch.tensor(total).to(dtype).float()
                assert grads[i] is not None, (
                    f"rank {rank}: parameter {i} has no gradient, and another rank had one: the flag?"
                )
                assert torch.allclose(grads[i], expected.expand_as(grads[i]), rtol=1e-6), (
                    f"rank {rank}: parameter {i} has {grads[i].flatten()[0]:.2f}, not {expected:.2f}: zeros where "
                    f"it is missing, else times self.scale, in {reduce_dtype or dtype}; earlier micro-batches count"
                )
            assert grads[3] is None, (
                "no rank has used the last parameter: its gradient must stay None: its flag should be 0"
            )
            assert all(inside), f"rank {rank}: a gradient is not a view of the buffer"
    for rank, gradient in enumerate(used, start=1):
        assert gradient is not None and gradient.tolist() == [2, 2], (
            f"rank {rank}: two ranks miss nothing, and the third, without a gradient of theirs, gets {gradient}, not "
            "their sum, 2: set every flag at each launch, also where no parameter is missing"
        )
