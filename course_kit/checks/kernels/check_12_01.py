"""Check of exercise 12.1: `occupancy` counts the blocks on an SM as CUDA does, and refuses impossible kernels."""

from __future__ import annotations

import dataclasses

from course_lib.kernels import gpus

# threads, registers, shared bytes -> blocks on an SM of an H100, and all that ran out
CASES = {
    (256, 64, 0): (4, {"registers"}),
    (256, 32, 0): (8, {"warps", "registers"}),
    (32, 32, 0): (32, {"blocks"}),
    (200, 16, 0): (9, {"warps"}),
    (96, 65, 0): (9, {"registers"}),
    (128, 32, 50_000): (4, {"shared memory"}),
    (128, 32, 58_000): (3, {"shared memory"}),
    (128, 32, 45_600): (4, {"shared memory"}),
    (1024, 65, 0): (0, {"registers"}),
}
IMPOSSIBLE = ((2048, 32, 0), (128, 300, 0), (128, 32, 10**6), (128, 32, -2000), (0, 32, 0), (128, 0, 0))


def check() -> None:
    """Assert blocks, warps and limits of kernels on an H100 and an A100, and a ValueError for impossible ones."""
    h100 = gpus.GPUS["H100"]
    for (threads, registers, shared), (blocks, limits) in CASES.items():
        result = gpus.occupancy(h100, threads, registers, shared)
        case = f"{threads} threads, {registers} registers, {shared:,} bytes"
        assert result.blocks_per_sm == blocks, (
            f"{case}: {blocks} blocks fit on an SM, yours says {result.blocks_per_sm}"
        )
        assert set(result.limited_by) == limits, (
            f"{case}: {' and '.join(sorted(limits))} ran out, yours says {result.limited_by}"
        )
        warps = blocks * -(-threads // 32)
        assert result.warps_per_sm == warps, f"{case}: {blocks} blocks are {warps} warps, not {result.warps_per_sm}"
        assert result.fraction == warps / 64, (
            f"{case}: that is {warps}/64 of an SM's warps, yours says {result.fraction}"
        )
    small = gpus.occupancy(gpus.GPUS["A100"], 128, 32, 50_000)
    assert small.blocks_per_sm == 3, f"an A100 has less shared memory: 3 blocks, yours says {small.blocks_per_sm}"
    narrow = dataclasses.replace(h100, warps_per_sm=48, threads_per_block=512)
    half = gpus.occupancy(narrow, 512, 16)
    assert (half.blocks_per_sm, half.fraction) == (3, 1.0), (
        f"a GPU whose SMs have 48 warps: 3 blocks of 512 threads fill it, yours says {half.blocks_per_sm}, a fraction "
        f"of {half.fraction}"
    )
    few = gpus.occupancy(dataclasses.replace(h100, blocks_per_sm=16), 32, 32)
    assert few.blocks_per_sm == 16, f"a GPU with 16 blocks on an SM: 16 fit, yours says {few.blocks_per_sm}"
    for impossible in IMPOSSIBLE:
        try:
            refusal: object = gpus.occupancy(h100, *impossible)
        except (ValueError, ZeroDivisionError) as error:
            refusal = error
        assert isinstance(refusal, ValueError), (
            f"{impossible}: no kernel can have these: raise ValueError, not {refusal!r}"
        )
