"""Check of exercise 04.4: `overlap_gradients` starts an all-reduce for each gradient while backward runs."""

from __future__ import annotations

import time
import weakref

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.data_parallel.comparing import TINY, cause, check_traffic, farthest, in_group, one_process
from course_kit.checks.data_parallel.watched import Watched
from course_kit.labs.data_parallel import batch_of, sgd_step
from course_kit.typed import grad_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.data_parallel import naive
from course_lib.single_gpu.model import Transformer, loss

RELEASED_S = 5  # that a thread of gloo has to let go of a tensor; it takes milliseconds


def overlap_trial(group: dist.ProcessGroup | None, steps: int) -> tuple:
    """Return the first step's gradients, the weights after `steps`, and the last step's backward and finish()."""
    model, (inputs, targets) = Transformer(TINY), batch_of(dist.get_rank(group), TINY)
    named, first, changed = list(model.named_parameters()), None, []
    frozen, unused, old = model.unreached = nn.ParameterList(torch.zeros(3) for _ in range(3))
    frozen.requires_grad_(False)
    finish = naive.overlap_gradients(model, group)
    assert callable(finish), f"overlap_gradients returns {finish!r}: return the function finish"
    for _ in range(steps):
        model.zero_grad()
        old.grad = torch.ones(3)  # of an earlier backward
        before = [p.detach().clone() for _, p in named]
        watched = Watched().blocks(model)
        step_loss = loss(model(inputs), targets)
        with watched as traffic:
            step_loss.backward()
        early, after_backward = traffic.calls, Watched()
        with after_backward as late:
            finish()
        changed += [name for (name, p), was in zip(named, before, strict=True) if not torch.equal(p, was)]
        changed += [name for name, p in named if p.untyped_storage().data_ptr() in watched.in_flight]
        first = first or {name: grad_of(p).clone() for name, p in named}
        sgd_step(model)
    weights = {name: p.detach() for name, p in named}
    as_before = not frozen.requires_grad and unused.grad is None and old.grad.eq(1).all().item()
    groups, waits = {record.group for record in traffic.records}, after_backward.waits
    seen = watched.seen, watched.waits, watched.touched, watched.futures + after_backward.futures, changed, as_before
    return first, weights, seen, groups, early, late.calls, waits


def bf16_trial(group: dist.ProcessGroup | None) -> tuple[torch.Tensor, int, Traffic, bool]:
    """Return the averaged gradient of a BF16 weight, which was 1 more than the rank, its bytes, this rank's traffic,
    and whether the gradient is still alive after zero_grad().
    """
    layer = nn.Linear(64, 32, bias=False).bfloat16()
    finish = naive.overlap_gradients(layer, group)
    with count_traffic() as traffic:
        layer(torch.full((1, 64), dist.get_rank(group) + 1.0, dtype=torch.bfloat16)).sum().backward()
        finish()
    gradient = grad_of(layer.weight).clone()
    alive = weakref.ref(grad_of(layer.weight).untyped_storage())
    layer.zero_grad()
    end = time.monotonic() + RELEASED_S
    while alive() is not None and time.monotonic() < end:
        time.sleep(0.01)
    return gradient, gradient.nbytes, traffic, alive() is not None


def check_bf16() -> None:
    """Assert mean, dtype and bytes of a BF16 gradient on 4 ranks, and that nothing holds it after its step."""
    for rank, (gradient, nbytes, traffic, alive) in enumerate(in_group(4, bf16_trial)):
        assert gradient.dtype == torch.bfloat16 and torch.allclose(gradient.float(), torch.tensor(2.5), rtol=1e-2), (
            f"rank {rank}: the gradient of a BF16 weight is {gradient[0, 0]:.3f} in {gradient.dtype}, not 2.5 in BF16"
        )
        check_traffic(rank, traffic, (0, 1, 2, 3), [nbytes])
        assert not alive, (
            f"rank {rank}: after finish() and zero_grad() something still holds the gradient: empty the list of works"
        )


def check() -> None:
    """Assert gradients and weights of 4 and of 3 ranks against one process, when all-reduces start and end, and the
    bytes of BF16 gradients.
    """
    from course_kit.ranks import shared

    with shared(4).within(20):
        for n, steps in ((4, 1), (3, 2)):
            (grads, _), (_, weights) = one_process(n), one_process(n, steps)
            count = len(grads)
            outcomes = in_group(n, overlap_trial, steps)
            for rank, (first, after, watched, groups, early, late, waits) in enumerate(outcomes, start=4 - n):
                seen, early_waits, touched, futures, changed, as_before = watched
                assert early_waits == 0, (
                    f"rank {rank}: backward waits for {early_waits} all-reduces: async_op, wait in finish()"
                )
                assert touched == 0, (
                    f"rank {rank}: a hook changes a gradient that is in flight: divide before the all-reduce"
                )
                assert not changed, (
                    f"rank {rank}: backward changes {changed[0]}: the hook is given the parameter, reduce its .grad"
                )
                assert early == count, (
                    f"rank {rank}: {early} all-reduces start in backward, not {count}: one for each parameter"
                )
                assert late == 0, "finish() should only wait"
                assert waits <= early, "finish() waits for works of earlier steps: empty the list"
                assert waits + futures >= early, (
                    f"finish() waits for {waits} of {early} all-reduces: each work has to be waited for"
                )
                assert groups == {tuple(range(4 - n, 4))}, f"rank {rank}: an all-reduce is not over `group`"
                assert as_before, f"rank {rank}: a parameter that backward does not reach, or a frozen one, has changed"
                name, error = farthest(first, grads)
                assert error < 1e-4, (
                    f"{n} ranks, rank {rank}: the gradient of {name} {cause(first[name], grads[name], n)}"
                )
                name, error = farthest(after, weights)
                assert error < 1e-4, (
                    f"{n} ranks, rank {rank}: the first step is right, and after {steps} steps {name} is not one "
                    "process's: something of an earlier step is left"
                )
                assert max(seen) > 0, (
                    "no all-reduce starts before backward reaches the first block: start them in the hook"
                )
        check_bf16()
