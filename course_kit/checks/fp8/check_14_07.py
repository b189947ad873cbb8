"""Check of exercise 14.7: a `DelayedQuantizer` takes the scale of its history, and records each step once."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from course_kit.checks.watchers import NoHostReads, two_more_ranks
from course_lib.fp8.delayed_scaling import DelayedQuantizer
from course_lib.fp8.operands import Cast, Split
from course_lib.fp8.quantization import dequantize

SIZES = [4.0, 8.0, 2.0, 2.0, 2.0, 2.0]  # of a matrix, by step
WANTED = [4, 4, 8, 8, 8, 2]  # the amax behind its scale, with a history of 3


def check() -> None:
    """Assert scales, records, a jump, the state, no reads on the host, and common scales."""
    quantizer, scales = DelayedQuantizer(Cast(history=3)), []
    for size in SIZES:
        x = torch.full((2, 2), size)
        first, again = quantizer(x), quantizer(x)  # the second time in recomputation
        quantizer(x / 2)  # the next micro-batch
        assert torch.equal(first.scale, again.scale), "forward's second run in a step has another scale"
        amax = cast(torch.Tensor, quantizer.amax)
        assert amax.item() == size, f"recorded {amax.item()}, the largest of this step is {size}"
        scales.append(round(448 * first.scale.item(), 3))
        quantizer.eval()(100 * x), quantizer.train()
        assert cast(torch.Tensor, quantizer.amax).item() == size, "evaluation uses the scale and records nothing"
        quantizer.update()
        assert cast(torch.Tensor, quantizer.amax).item() == 0, "after a step the record starts again"
    assert scales == WANTED, (
        f"amax behind the scales: {scales}; the first's own, then the largest of the last three: {WANTED}"
    )
    assert dequantize(quantizer(torch.tensor([[1.0, 1000.0]])))[0, 1] < 2.1, (
        "a jump saturates: the scale comes from the steps before"
    )
    quantizer.update()
    fresh = DelayedQuantizer(Cast(history=3))
    fresh.load_state_dict(quantizer.state_dict())
    assert fresh(x).scale == quantizer(x).scale, "the history is part of the state"
    with NoHostReads():
        quantizer(x), quantizer.update()
    split = DelayedQuantizer(Cast(history=3), (Split(0, cast(dist.ProcessGroup, "ranks")),))
    with two_more_ranks(448.0) as calls:
        assert split(x).scale == 1, "the first step's scale comes from all ranks' shards"
        split.update()
        before = len(calls)
        assert split(x).scale == 1 and len(calls) == before, (
            "after the first step, the ranks agree in update (the largest of all), and forward waits for none"
        )
