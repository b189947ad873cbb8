"""Check of exercise 09.3: `StagePass` cuts the graph at both ends, and keeps it without the output."""

from __future__ import annotations

import os
import weakref
from typing import Any, cast

import torch
from torch import nn

from course_kit.labs.pipeline.models import TINY, batch_of, one_process
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.typed import transformer_blocks
from course_lib.pipeline import stages
from course_lib.single_gpu.model import Transformer, loss
from course_lib.single_gpu.profile import MemoryProfile


class Marker:
    """A hook that does nothing: it is alive as long as the graph."""

    def __call__(self, gradient: torch.Tensor) -> None:
        return None


def marked(out: torch.Tensor, marks: list) -> torch.Tensor:
    """`out`, with a Marker at its graph; a weak reference to it is added to `marks`."""
    marker = Marker()
    if out.requires_grad:
        out.register_hook(marker)
    marks.append(weakref.ref(marker))
    return out


def check() -> None:
    """Assert loss and gradients of three stages, one after the other, and what passes keep."""
    check_three_stages()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler writes no log lines between our outputs
    with MemoryProfile(nn.Linear(1, 1)) as profile:
        many = [stages.StagePass(nn.Identity(), torch.randn(500, 1000), lambda out: out + 1.0) for _ in range(4)]
        for each in many:
            each.out = None  # sent
        profile.mark("sent")
    check_for_split_passes()
    check_dtypes()
    saved = profile.peak("sent")["activations"] + profile.peak("sent")["temporary"]
    assert saved < 4 * 3e6, (
        f"after their outputs are sent, four passes keep {saved / 2**20:.0f} MiB: keep the graph, not the output"
    )


class Doubled(stages.StagePass):
    """A pass with a `run` of its own, as SplitPass has."""

    def run(self, stage: nn.Module, *args) -> torch.Tensor:
        return 2 * super().run(stage, *args)


def check_for_split_passes() -> None:
    """Assert what SplitPass of section 8, which inherits from StagePass, counts on: `run`, `args` and `edge`."""
    stage: Any = lambda x, y: x * y  # noqa: E731  # a pass calls its stage, whatever it is
    passed = Doubled(stage, torch.full((3,), 5.0), lambda out: out + 1, torch.full((3,), 7.0))
    assert passed.out.tolist() == [71.0] * 3, (
        "output_fn is given what self.run(stage, *args) returns: SplitPass has a `run` of its own"
    )
    assert getattr(passed, "edge", None) is not None, "keep the edge of the output's graph in self.edge"
    frozen = stages.StagePass(nn.Identity(), torch.ones(2, dtype=torch.int64), lambda out: out)
    assert frozen.edge is None, "self.edge is None where the output needs no gradient"
    try:
        result = frozen.backward(torch.ones(2))
    except Exception as error:
        raise AssertionError(f"where edge is None backward has nothing to do, and fails: {error}") from None
    assert result is None, f"where edge is None there is no gradient to return: {result}"


def check_dtypes() -> None:
    """Assert that a hidden state in BF16 has an output and a gradient in BF16: what is sent has its dtype."""
    try:
        passed = stages.StagePass(nn.Linear(8, 8).bfloat16(), torch.randn(2, 3, 8).bfloat16(), lambda out: out)
        out = passed.out
        gradient = passed.backward(torch.ones(2, 3, 8, dtype=torch.bfloat16))
    except RuntimeError as error:
        raise AssertionError(f"a hidden state and a stage in BF16: do not cast x; {error}") from None
    for name, each in (("self.x", passed.x), ("self.out", out), ("the gradient of x", gradient)):
        dtype = getattr(each, "dtype", None)
        assert dtype == torch.bfloat16, f"a hidden state and a stage in BF16: {name} is {dtype}, do not cast it"


def check_three_stages() -> None:
    """Assert what three passes pass on, forward and backward, against one process."""
    model, (tokens, targets) = Transformer(TINY), batch_of()
    expected_loss, expected = one_process()
    first, middle, last = stages.split_stages(model, 3)
    calls: list[int] = []
    marks: list = []
    next(iter(transformer_blocks(middle))).register_forward_hook(lambda *_: calls.append(1))
    a = stages.StagePass(first, tokens, lambda out: marked(out, marks))
    b = stages.StagePass(middle, a.out, lambda out: marked(out, marks))
    c = stages.StagePass(last, b.out, lambda out: loss(out, targets))
    for each, name in ((a, "first"), (b, "second")):
        assert not each.out.requires_grad, (
            f"{name} stage: `out` needs gradients: it has its graph, or is the next stage's leaf (detach both)"
        )
        assert each.x.grad is None, f"{name} stage: x has a gradient before any backward"
    assert abs(c.out.item() - expected_loss) < 1e-5, (
        f"the loss is {c.out.item():.4f}, in one process {expected_loss:.4f}"
    )
    gradient = torch.ones(())
    for each, before, name in ((c, b, "last"), (b, a, "second")):
        returned = each.backward(gradient)
        assert returned is not None and returned.shape == before.out.shape, (
            f"backward of the {name} stage should return the gradient of x: it is what the stage before gets"
        )
        assert getattr(each.x, "grad", None) is None, (
            f"after backward the {name} stage's pass still has the gradient that it returned: forget self.x.grad"
        )
        gradient = returned
    assert a.x.grad is None and cast(nn.Embedding, first.embedding).weight.grad is not None, (
        "the first stage's own backward has begun too early: cut the graph"
    )
    assert a.backward(gradient) is None, "tokens have no gradient"
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected[name]) < 1e-5, f"gradient of {name} is not one process's"
    assert len(calls) == 1, f"a layer of the second stage ran {len(calls)} times: backward needs no second forward"
    assert all(mark() is None for mark in marks), "after backward a pass still has its graph: forget the edge"
