"""Check of exercise 05.1: the GB of a rank in each stage, and the most that stage 2 can save."""

from __future__ import annotations

from course_lib.single_gpu.memory import state_bytes


def check(gb_of_stage: dict[int, float | None], best_of_stage_2: float | None) -> None:
    """Assert the GB of 7 billion parameters on 8 ranks, and the factor, within 2%."""
    for stage in range(4):
        expected = sum(state_bytes(7_000_000_000, "bf16", stage, 8).values()) / 1e9
        answer = gb_of_stage.get(stage)
        assert isinstance(answer, (int, float)), f"stage {stage}: write a number of GB, not {answer!r}"
        assert abs(answer / expected - 1) < 0.02, (
            f"stage {stage}: it is not {answer} GB: which of the 2 + 2 + 12 bytes are divided by 8?"
        )
    limit = 112e9 / sum(state_bytes(7_000_000_000, "bf16", 2, 10**9).values())
    assert isinstance(best_of_stage_2, (int, float)) and abs(best_of_stage_2 / limit - 1) < 0.02, (
        f"best_of_stage_2 is not {best_of_stage_2!r}: with very many ranks only 2 bytes per parameter are left of 16"
    )
