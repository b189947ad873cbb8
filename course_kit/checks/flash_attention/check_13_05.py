"""Check of exercise 13.5: `sequence_at` finds sequences of a plain and of a packed batch, and compiles for a GPU."""

from __future__ import annotations

import types

import torch
import triton
import triton.language as tl

from course_kit.checks.kernels import run_guarded
from course_kit.checks.kernels.compiled import assert_compiles, compiled_first
from course_kit.gpu.launches import record_launches
from course_kit.labs.flash_attention import device
from course_lib.flash_attention import forward


def write_indices(result, cu_seqlens, s_q, s_k):
    """Write the result of sequence_at to row `program` of found [sequences, 4]."""
    number = tl.program_id(0)
    batch, start, queries, keys = sequence_at(number, cu_seqlens, s_q, s_k)  # noqa: F821 (indices_kernel binds it)
    tl.store(result + 4 * number, batch)
    tl.store(result + 4 * number + 1, start)
    tl.store(result + 4 * number + 2, queries)
    tl.store(result + 4 * number + 3, keys)


def indices_kernel() -> triton.runtime.KernelInterface:
    """Return `write_indices` as a kernel that calls the library's `sequence_at` of this moment."""
    names = {**globals(), "sequence_at": forward.sequence_at}
    return triton.jit(types.FunctionType(write_indices.__code__, names, "write_indices"))


@compiled_first
def check() -> None:
    """Assert the places in a plain and in a packed batch, and compile the plain case for an H100."""
    kernel = indices_kernel()

    def positions(sequences: int, cu_seqlens: torch.Tensor | None, s_q: int, s_k: int) -> torch.Tensor:
        result = torch.full((sequences, 4), -1, dtype=torch.int32, device=device())
        kernel[(sequences,)](result, cu_seqlens, s_q, s_k)
        return result

    with record_launches() as launches:
        plain = run_guarded(kernel, positions, 3, None, 70, 50).tolist()
    wanted = [[number, 0, 70, 50] for number in range(3)]
    assert plain == wanted, (
        f"a plain batch of 3, each 70 queries and 50 keys: (row, start, queries, keys) should be {wanted}, yours are "
        f"{plain}"
    )
    packed = run_guarded(kernel, positions, 4, torch.tensor([0, 5, 5, 25, 32], dtype=torch.int32), 32, 32).tolist()
    wanted = [[0, 0, 5, 5], [0, 5, 0, 0], [0, 5, 20, 20], [0, 25, 7, 7]]
    assert packed == wanted, (
        f"sequences of 5, 0, 20 and 7 tokens in row 0: (row, start, queries, keys) should be {wanted}, yours are "
        f"{packed}"
    )
    assert_compiles(launches)  # the launch with None for cu_seqlens
