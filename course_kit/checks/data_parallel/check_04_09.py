"""Check of exercise 04.9: which replica drifts, and from which step on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from course_kit.labs.data_parallel import FAULTS, drift_runs


def answer_of(first_drift: Callable, norms: list[list[float]]) -> tuple[int, int] | None:
    """Return the result of an answer. Assert that it is a pair, or None."""
    answer = first_drift(norms)
    assert answer is None or isinstance(answer, tuple) and len(answer) == 2, (
        f"you return {answer!r}: return a tuple (step, rank), or None if no rank drifts"
    )
    return answer


def check(first_drift: Callable[[list[list[float]]], tuple[int, int] | None]) -> None:
    """Assert step and rank for the lab's runs at several scales, and for made-up norms of 3 to 5 ranks, 0 and NaN."""
    from course_kit.ranks import shared

    runs = drift_runs(shared(4))
    for (bad_rank, bad_step, _), scale in zip(FAULTS, (1, 1e-6, 1e-9), strict=True):
        norms = [[scale * norm for norm in run["probe"]] for run in runs[bad_rank, bad_step]]
        answer = answer_of(first_drift, norms)
        assert answer is not None, (
            f"rank {bad_rank} drifts after step {bad_step}, with norms about {norms[0][0]:.0e}, and you return None"
        )
        assert answer[::-1] != (bad_step + 1, bad_rank), "the step first, then the rank"
        assert answer[1] == bad_rank, (
            f"rank {bad_rank} made the mistake, you accuse rank {answer[1]}: compare with the majority"
        )
        assert answer[0] == bad_step + 1, f"the norms first differ in step {bad_step + 1}, you say {answer[0]}"
    for scale in (1, 1e4):  # before the fault, as if each rank added up in another order
        norms = [[scale * norm * (1 + 1e-6 * r) for norm in run["probe"][:6]] for r, run in enumerate(runs[2, 5])]
        answer = answer_of(first_drift, norms)
        assert answer is None, (
            f"no rank drifts, norms are about {norms[0][0]:.0e}, you say {answer}: they may differ in the last digits"
        )
    for factor in (0.5, 2):
        answer = answer_of(first_drift, [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0 * factor, 1.0], [3.0, 2.0, 1.0]])
        assert answer == (1, 2), f"rank 2's norm in step 1 is {factor} times the others', and you say {answer}"
    for ranks in (3, 5):
        for rank in range(ranks):
            norms = [[3.0, 2.5 if r == rank else 2.0] for r in range(ranks)]
            answer = answer_of(first_drift, norms)
            assert answer == (1, rank), f"{ranks} ranks, rank {rank}'s norm in step 1 is larger, and you say {answer}"
    with np.errstate(all="ignore"):
        answer = answer_of(first_drift, [[0.0, 0.0, 1e-3 if rank == 1 else 0.0] for rank in range(4)])
    assert answer == (2, 1), (
        f"norms are 0 but for rank 1's in step 2, and you say {answer}: compare without a division by 0"
    )
    nan = float("nan")
    for rank in range(4):
        norms = [[3.0, nan if r == rank else 2.0, nan] for r in range(4)]
        answer = answer_of(first_drift, norms)
        assert answer == (1, rank), f"rank {rank}'s norm is NaN in step 1, the others' are not, and you say {answer}"
    answer = answer_of(first_drift, [[3.0, nan, 2.0]] * 4)
    assert answer is None, f"all norms are NaN in step 1: that is no difference, and you say {answer}"
