"""Check of exercise 11.10: the part that each failed plan's sum forgot, and one change that makes the plan fit."""

from __future__ import annotations

import dataclasses

from course_kit.labs.best_config import FAILED
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import estimate
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.model import PRESETS

GIB = 2**30


def check(forgot: dict[str, str], fixed: dict[str, Layout]) -> None:
    """Assert that each plan would fit without the part, and that its change fits and is half as fast at least."""
    efa = CLUSTERS["H100, EFA"]
    assert set(forgot) == set(fixed) == set(FAILED), "an answer and a layout for A, B and C"
    if not any(forgot.values()):
        raise NotImplementedError  # as the cell begins
    for letter, (model, _, spec) in FAILED.items():
        config, plan = PRESETS[f"bench-{model}"], Layout.parse(spec)
        message = estimate(config, efa, plan, 256)
        flight = min(plan.pp, 256 / (plan.dp * plan.micro_batch))  # of 1F1B's first rank
        parts = {
            "in flight": message.memory["activations"] * (1 - 1 / flight),
            "logits": message.memory["logits"],
            "buffers": message.memory["buffers"],
        }
        assert forgot[letter] in parts, f"{letter}: one of {', '.join(parts)}"
        without = float(message.needed_bytes - parts[forgot[letter]]) / GIB
        assert without < message.usable_bytes / GIB, (
            f"{letter}: without its '{forgot[letter]}' it would still need {without:.0f} GiB, and has "
            f"{message.usable_bytes / GIB:.0f}; look for a larger part"
        )
        one = fixed[letter]
        assert isinstance(one, Layout), f"{letter}: {one!r} is no Layout; Layout.parse(...) makes one of words"
        changed = [f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(plan, f.name)]
        assert len(changed) == 1, f"{letter}: change one field, not {changed or 'none'}"
        try:
            check_layout(config, one, plan.ranks, 256, 4096)
        except ValueError as error:
            raise AssertionError(f"{letter}: {one}, on the same GPUs: {error}") from None
        new = estimate(config, efa, one, 256)
        assert new.fits, f"{letter}: {one} needs {new.needed_bytes / GIB:.0f} GiB"
        assert new.step_s < 2 * message.step_s, (
            f"{letter}: {one} fits, and takes {new.step_s / message.step_s:.1f} times as long"
        )
