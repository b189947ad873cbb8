"""Check of exercise 02.12: `plan`, the least recomputation and the largest micro-batch that fit."""

from __future__ import annotations

from collections.abc import Callable

from course_lib.single_gpu.memory import activation_bytes
from course_lib.single_gpu.model import PRESETS

GiB = 2**30


def check(plan: Callable[..., tuple[str, int] | None]) -> None:
    """Assert the answer for two models, several batches and memory sizes, and None if nothing fits."""
    llama, small_llama = PRESETS["llama3-8B"], PRESETS["llama3.2-1B"]
    large = [(16, 8192, 40), (16, 8192, 60), (16, 1024, 40), (12, 4096, 7), (6, 2048, 70), (8, 8192, 3)]
    cases = [(*case, llama) for case in large] + [(8, 4096, 10, small_llama), (9, 4096, 30, small_llama)]
    for batch, seq, room, config in cases:
        answer = plan(batch, seq, room, config)
        fitting = [
            (mode, micro)
            for mode in ("none", "matmuls", "full")
            for micro in range(1, batch + 1)
            if batch % micro == 0 and activation_bytes(config, micro, seq, recompute=mode) <= room * GiB
        ]
        if not fitting:
            assert answer is None, f"batch {batch}, {seq} tokens, {room} GiB: nothing fits, and you say {answer}"
            continue
        assert answer in fitting, f"batch {batch}, {seq} tokens, {room} GiB: {answer} does not fit, or does not divide"
        assert answer[0] == fitting[0][0], (
            f"{batch} x {seq}, {room} GiB: {fitting[0][0]} is enough, you recompute {answer[0]}"
        )
        largest = max(micro for mode, micro in fitting if mode == answer[0])
        assert answer[1] == largest, f"{batch} x {seq}, {room} GiB: a micro-batch of {largest} fits too"
