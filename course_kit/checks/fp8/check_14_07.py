"""Check of exercise 14.7: a `DelayedQuantizer` takes the scale of its history, and records each step once."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from course_kit.checks.watchers import NoHostReads, two_more_ranks
from course_lib.fp8.delayed_scaling import DelayedQuantizer, update_scales
from course_lib.fp8.linear import LayerQuantizers
from course_lib.fp8.operands import Cast, Casts, Split
from course_lib.fp8.quantization import dequantize

SIZES = [4.0, 8.0, 2.0, 2.0, 2.0, 2.0]  # of a matrix, by step
WANTED = [4, 4, 8, 8, 8, 2]  # the amax behind its scale, with a history of 3


def scale_of_zeros(quantizer: DelayedQuantizer) -> float:
    """Return the scale by which the quantizer rounds, and let it record nothing above 0."""
    return quantizer(torch.zeros(2, 2)).scale.item()


def check_history(steps: int) -> None:
    """Assert a history of so many steps, a step without a matrix, and buffers in place; in E5M2, by powers of two."""
    quantizer = DelayedQuantizer(Cast(torch.float8_e5m2, power_of_two=True, history=steps))
    buffers = quantizer.amax, quantizer.history
    for number in range(steps + 1):  # a large step, then half as large ones
        for size in (3.0, 14.0, 7.0):  # micro-batches, the largest in the middle
            x = torch.full((2, 2), size * 4096 / (1 if number == 0 else 2))
            quantizer(x.bfloat16())
        quantizer.update()
        scale = scale_of_zeros(quantizer)
        expected = 1 if number < steps else 0.5
        assert scale == expected, (
            f"history={steps}, E5M2, powers of two: after step {number} the scale is {scale:g}, not "
            f"{expected}: the largest of a step's matrices joins the history, and step 0 leaves it {steps} later"
        )
    for _ in range(steps):
        quantizer.update()
    assert quantizer(torch.full((2, 2), 57344.0 * 8)).scale == 8, (
        f"history={steps}: after as many steps without a matrix the history has zeros alone, and a matrix its own scale"
    )
    same = quantizer.amax is buffers[0] and quantizer.history is buffers[1]
    assert same, "amax and history are buffers, on the model's device: change them in place"


def check_stored() -> None:
    """Assert that a weight that is stored in 8 bits keeps its scale, while its layer's input has a history."""
    layer = LayerQuantizers(Casts(*[Cast(history=2)] * 3))
    stored = layer.store_weight(torch.full((2, 2), 896.0))
    for size in (448.0, 1.0):
        layer.input(torch.full((2, 2), size))
        update_scales(layer)
    result = layer.weight(stored)
    assert result.scale == 2 and torch.equal(result.values.float(), stored.float()), (
        f"a weight that is stored in 8 bits is taken as it is, with its stored scale, 2, not {result.scale.item():g}"
    )
    newest = cast(DelayedQuantizer, layer.input).history.tolist()
    assert newest == [1, 448], f"the history has the newest step first: [1, 448], not {newest}"


def check() -> None:
    """Assert scales, records, a jump, the state, no reads on the host, and common scales."""
    for steps in (1, 5):
        check_history(steps)
    check_stored()
    quantizer, scales = DelayedQuantizer(Cast(history=3)), []
    for size in SIZES:
        x = torch.full((2, 2), size)
        first, again = quantizer(x), quantizer(x)  # the second time in recomputation
        quantizer(x / 2)  # the next micro-batch
        assert torch.equal(first.scale, again.scale), "forward's second run in a step has another scale"
        amax = cast(torch.Tensor, quantizer.amax)
        assert amax.item() == size, f"recorded {amax.item()}, the largest of this step is {size}"
        scales.append(round(448 * first.scale.item(), 3))
        evaluated = quantizer.eval()(100 * x).scale
        quantizer.train()
        assert len(scales) == 1 or torch.equal(evaluated, first.scale), (
            "evaluation uses the scale of the history, as training does, not the matrix's own"
        )
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
        again = split(x).scale
        assert len(calls) == before, (
            "after update() a matrix still asks the other ranks for their largest: update sets self.updated to True, "
            "and from then on the history, which they have in common, decides"
        )
        assert again == 1, f"after the first step the scale is the history's, 1, not {again.item():g}"
