"""course_lib.five_d.plan against PyTorch's schedulers, and what holds for every plan. Plain numbers, any machine."""

import itertools

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from course_lib.five_d.plan import batch_at, learning_rate


def pytorch_rates(peak: float, warmup: int, steps: int, least: float) -> list[float]:
    """Of steps 1, 2, … from LinearLR, then CosineAnnealingLR; they start a step later than ours."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    rise = LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    fall = CosineAnnealingLR(optimizer, steps - warmup, eta_min=least * peak)
    plan, rates = SequentialLR(optimizer, [rise, fall], [warmup - 1]), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plan.step()
    return rates


@pytest.mark.filterwarnings("ignore")  # SequentialLR's own
@pytest.mark.parametrize("warmup, steps, least", [(2, 10, 0.1), (5, 50, 0.1), (7, 20, 0.0), (10, 11, 0.5)])
def test_learning_rate_is_that_of_pytorch(warmup, steps, least):
    ours = [learning_rate(step, 3e-3, warmup, steps, least) for step in range(1, steps + 1)]
    assert ours == pytest.approx(pytorch_rates(3e-3, warmup, steps, least))


@pytest.mark.parametrize("warmup, steps", [(0, 1), (0, 10), (1, 1), (1, 10), (10, 10), (10, 4), (3, 100)])
def test_learning_rate_rises_then_falls_to_a_tenth(warmup, steps):
    rates = [learning_rate(step, 2.0, warmup, steps) for step in range(1, steps + 1)]
    rising, falling = rates[:warmup], rates[max(0, warmup - 1) :]
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rising == pytest.approx([2.0 * step / warmup for step in range(1, len(rising) + 1)])
    assert all(before > after for before, after in itertools.pairwise(falling))
    if warmup <= steps:
        assert learning_rate(warmup, 2.0, warmup, steps) == pytest.approx(2.0)
    if warmup < steps:
        assert rates[-1] == pytest.approx(0.2) and learning_rate(2 * steps, 2.0, warmup, steps) == pytest.approx(0.2)


@pytest.mark.parametrize("start, full, ramp", [(4, 64, 10), (8, 8, 5), (2, 30, 7), (6, 600, 100)])
def test_batch_grows_evenly_in_multiples(start, full, ramp):
    sizes = [batch_at(step, start, full, ramp) for step in range(1, ramp + 5)]
    assert sizes[0] == start and sizes[ramp:] == [full] * 4
    assert all(size % start == 0 and start <= size <= full for size in sizes)
    growth = [after - before for before, after in itertools.pairwise(sizes)]
    assert all(0 <= each <= (full - start) / ramp + start for each in growth)
    line = [start + (full - start) * done / ramp for done in range(ramp)]
    assert all(size <= exact < size + start for size, exact in zip(sizes, line, strict=False))


def test_no_ramp_is_the_full_batch():
    assert [batch_at(step, 4, 64, 0) for step in (1, 2, 100)] == [64, 64, 64]
    assert [batch_at(step, 4, 64, 1) for step in (1, 2, 3)] == [4, 64, 64]
