"""Check of exercise 06.11: the diagnosis of the lab's runs, of others with the same faults, and of made-up evidence."""

from __future__ import annotations

from collections.abc import Callable

from course_kit.labs.tensor_parallel.faults import FAULTS, RUNS, lab_run, lab_runs
from course_kit.labs.tensor_parallel.models import TINY, one_process
from course_kit.ranks import shared

MADE_UP = (
    (["blocks.0.attention_norm.weight", "blocks.1.mlp_norm.weight"], "f"),
    (["blocks.1.attention.v_proj.weight"], "copies"),
)


def check(diagnose: Callable[[float, float, list[str]], str]) -> None:
    """Judge diagnose(first_loss, expected, differing)."""
    with shared(4).within(20):
        expected = one_process(TINY).losses[0]
        for number, (fault, run) in enumerate(zip(RUNS, lab_runs(steps=1), strict=True)):
            answer = diagnose(run["losses"][0], expected, run["differing"])
            assert answer == fault, (
                f"run {number}: it is not {answer!r}. Look at its first loss and at the names once more"
            )
        for fault in FAULTS:
            run = lab_run(fault, 0, 1)
            answer = diagnose(run["losses"][0], expected, run["differing"])
            assert answer == fault, f"a run with the fault {fault!r} in block 0: your answer is {answer!r}"
    for names, fault in MADE_UP:
        answer = diagnose(4.6, 4.6, names)
        assert answer == fault, f"if {' and '.join(names)} differ, it is {fault!r}, not {answer!r}: which, not how many"
    assert diagnose(4.6000001, 4.6, []) == "right", "losses of 4.6000001 and 4.6 differ by rounding alone"
