"""Check of exercise 10.10: `GatherOncePerStep` gathers once per step, and frees the full weights after it."""

from __future__ import annotations

from typing import cast

from course_kit.labs.five_d.models import ADAMW, TINY, built, local_batch, one_process
from course_kit.ranks import shared
from course_lib.collectives.traffic import count_traffic
from course_lib.five_d.gather_once import GatherOncePerStep
from course_lib.five_d.layouts import Layout


def check_gather(saved: GatherOncePerStep) -> None:
    """Assert that gather() starts everything and waits for nothing, and that pre_forward() waits."""
    saved.gather()
    parts = [part for unit in saved.units for part in unit.flat_params]
    late = sum(part.buffer.work is None for part in parts)
    assert late == 0, f"after gather() {late} of {len(parts)} parts are not in flight: start all, and wait for none"
    waiting = sum(part.buffer.work is not None for part in saved.root.flat_params)
    assert waiting == 0, "gather() has not waited for the root, and no module will: pre_forward(self.root)"
    for part in [*parts, *saved.root.flat_params]:
        for full, positions in zip(part.unsharded_params, part.slots, strict=True):
            for path, module, name in positions:
                assert module._parameters[name] is full, f"after gather() {path} is not full in its module: register()"
    for number, unit in enumerate(saved.units):
        saved.pre_forward(unit)
        later = [part for other in saved.units[number + 1 :] for part in other.flat_params]
        early = sum(part.buffer.work is None for part in later)
        assert early == 0, f"pre_forward of a unit has waited for {early} parts of later units: wait for its own alone"
    late = sum(part.buffer.work is not None for part in parts)
    assert late == 0, f"pre_forward has not waited for {late} of {len(parts)} parts"
    saved.finish()


def gathers_trial(text: str) -> tuple[list[float], list[int], int, int]:
    """On a rank: losses of two steps, gathers and scatters of the second, bytes of weights left after it, parts."""
    layout, mesh, parallel = built(text, TINY, **ADAMW)
    sharding = cast(GatherOncePerStep, parallel.sharding)
    parallel.runner.before_step = sharding.gather
    check_gather(sharding)
    parallel.optimizer.zero_grad()
    inputs, targets = local_batch(layout, mesh)
    losses = [parallel.step(inputs, targets, max_norm=0.5)[0].item()]
    with count_traffic() as traffic:
        losses.append(parallel.step(inputs, targets, max_norm=0.5)[0].item())
    parts = [part for unit in [*sharding.units, sharding.root] for part in unit.flat_params]
    left = sum(part.buffer.values.untyped_storage().nbytes() for part in parts)
    calls = [traffic.select(name).calls for name in ("all_gather", "reduce_scatter")]
    return losses, calls, left, len(parts)


def check() -> None:
    """Assert two schedules on four ranks."""
    wanted = one_process(Layout.parse("dp2,pp2,mb2"), steps=1)[0][0][0]
    for text, m in (("dp2,pp2,zero3,keep,mb2", 2), ("dp2,pp2,zero3,keep,zb-v", 4)):
        with shared(4).within(40):
            of_ranks = shared(4)(gathers_trial, text)
        for rank, (losses, calls, left, parts) in enumerate(of_ranks):
            assert calls == [parts, parts], (
                f"{text}, m = {m}, rank {rank}: {calls[0]} all-gathers, {calls[1]} reduce-scatters for {parts} parts; "
                "each should be sent once per step, however many micro-batches there are"
            )
            assert left == 0, f"{text}, rank {rank}: {left} bytes of full weights are left after the step"
            off = abs(losses[0] - wanted) / wanted
            assert off < 1e-5, f"{text}, rank {rank}: loss {losses[0]}, and of one process {wanted}"
            assert losses[1] < losses[0], (
                f"{text}, rank {rank}: the same batch a second time: {losses}; weights do not move"
            )
