"""Check of exercise 05.10: the traffic of a step of stage 3, on a model with eight units."""

from __future__ import annotations

from typing import cast

from torch import nn

from course_kit.labs.zero import EIGHT_UNITS
from course_lib.single_gpu.model import Transformer


def elements(*modules: nn.Module) -> int:
    """Return the number of parameters of some modules."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def check(gathers: int | None, times_data_parallel: float | None) -> None:
    """Assert the number of all-gathers, and the ratio of bytes within 3%."""
    model = Transformer(EIGHT_UNITS)
    units = 2 + len(model.blocks)
    assert gathers == 2 * units - 1, f"gathers is not {gathers}: all units in forward, and in backward all but one"
    last = elements(*(cast(nn.Module, module) for module in (model.norm, model.head) if module is not None))
    every = elements(model)
    ratio = (3 * every - last) / (2 * every)
    assert isinstance(times_data_parallel, (int, float)) and abs(times_data_parallel / ratio - 1) < 0.03, (
        f"times_data_parallel is not {times_data_parallel!r}: 3 Psi, less the last unit's second gather, over 2 Psi"
    )
