"""Check of exercise 07.3: the diagnosis of the lab's runs, of the same faults on two ranks, and of rounding alone."""

from __future__ import annotations

from collections.abc import Callable

from course_kit.labs.sequence_parallel.drift import FAULTS, evidence
from course_kit.labs.sequence_parallel.models import one_process
from course_kit.labs.tensor_parallel.models import TINY
from course_kit.ranks import shared


def check(diagnose: Callable[[list[str], dict[str, float]], str]) -> None:
    """Judge diagnose(differing, ratios)."""
    with shared(4).within(20):
        for number, (fault, run) in enumerate(zip(FAULTS, evidence(4), strict=True)):
            answer = diagnose(*run)
            assert answer == fault, f"run {number}: it is not {answer!r}. Look at the names and the ratios once more"
        for fault, run in reversed(list(zip(FAULTS, evidence(2), strict=True))):
            answer = diagnose(*run)
            assert answer == fault, f"two ranks, fault {fault!r}: your answer is {answer!r}"
        almost = dict.fromkeys(one_process(TINY).gradients, 1.00005)
    norms = {f"blocks.{block}.attention_norm.weight": 0.5 for block in range(20)}
    matrices = {f"blocks.{block}.attention.q_proj.weight": 1.0 for block in range(20)}
    answer = diagnose([], norms | matrices)
    assert answer == "norms averaged", f"20 blocks, all norms and no matrix wrong: your answer is {answer!r}"
    answer = diagnose([], dict.fromkeys(norms, 1.0) | matrices | {"blocks.3.mlp.up_proj.weight": 0.7})
    assert answer == "g", f"20 blocks, one matrix wrong: your answer is {answer!r}"
    assert diagnose([], almost) == "right", "ratios of 1.00005 differ from 1 by rounding alone"
