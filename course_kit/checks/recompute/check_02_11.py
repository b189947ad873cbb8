"""Check of exercise 02.11: `marked_training`, the slow loop's work without its three faults."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch

from course_kit.labs.recompute.loops import fresh_model, slow_training, text
from course_lib.recompute import profiling
from course_lib.recompute.profiling import Span, spans

MARKS = {"data", "forward", "backward", "clip", "optimizer"}


@functools.cache
def slow_steps() -> tuple[list[torch.Tensor], torch.nn.Module]:
    """Return the losses of four steps of the slow loop, and its model after them."""
    model = fresh_model()
    step = slow_training(model)
    return [step() for _ in range(4)], model


def inside(result: list[Span], phase: str) -> list[Span]:
    """Return the outermost operators that start in a phase."""
    marks = [span for span in result if span.lane == "phases" and span.name == phase]
    operators = [span for span in result if span.lane.startswith("CPU")]
    return [span for span in operators if any(m.start_ms <= span.start_ms < m.end_ms for m in marks)]


def check() -> None:
    """Assert losses and weights of four steps against the slow loop, the marks, new bytes, host reads and operators."""
    losses, slow_model = slow_steps()
    model = fresh_model()
    step = profiling.marked_training(model, text())
    for number, expected in enumerate(losses):
        got = step()
        assert abs(expected - got) < 1e-4, (
            f"the loss of step {number} is {got:.5f}, not {expected:.5f}: the same batches? clipping?"
        )
    for (name, weight), other in zip(slow_model.named_parameters(), model.parameters(), strict=True):
        error = ((weight - other).norm() / weight.norm()).item()
        assert error < 1e-4, f"after 4 steps {name} is {error:.0e} off: the same optimizer, momentum, clipping?"
    prof = profiling.profile_step(profiling.marked_training(fresh_model(), text()), wait=0, active=2)
    profiler: Any = prof.profiler
    events = len(profiler.kineto_results.events()) / 2  # thousands would take long to look through
    assert events < 3000, f"a step has {events:,.0f} operators and marks: take torch.optim, foreach=True"
    result = spans(prof)
    assert {span.name for span in result} >= MARKS, "keep the five marks"
    assert inside(result, "optimizer"), "the optimizer must run inside of its mark"
    assert inside(result, "data"), "the batch must be made inside of the mark data"
    check_memory(step)
    reads = sum(event.name == "aten::_local_scalar_dense" for event in prof.events()) / 2
    assert reads == 0, (
        f"{reads:.0f} values per step are read on the host: clip with PyTorch's function, "
        "and return the loss as a tensor"
    )
    operators = len(inside(result, "optimizer")) / 2
    assert operators <= 30, f"{operators:.0f} operators in the optimizer: take torch.optim, foreach=True"


def check_memory(step: Callable[[], torch.Tensor]) -> None:
    """Assert that a step makes fewer bytes of Python objects than the text has letters."""
    tracemalloc.start()
    step()
    made = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made < len(text()), (
        f"at one moment a step has {made:,} new bytes of Python objects, and the text has {len(text()):,} letters: "
        "what is the same in each step?"
    )
