"""course_kit.gpu.instructions: what machine code executes in its loops. Any machine: Triton's compiler and NVIDIA's
tools run on the CPU.
"""

import re
from collections import Counter
from unittest import mock

import pytest
import torch
import triton

from compiled_once import compile_launches
from course_kit.gpu import instructions
from course_kit.gpu.instructions import instruction_mix, instruction_table, loop_cycles, main_loop
from course_kit.gpu.launches import Launch
from course_lib.flash_attention.forward import flash_forward_kernel, head_sizes, strides_of
from course_lib.kernels.gpus import GPUS, WARP

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="interpreted kernels are compiled apart")
TILES = {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 8}
NESTED = """
.text.some_kernel:
        /*0000*/                   S2R R0, SR_CTAID.X ;
.L_x_0:
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/              @!P1 BRA `(.L_x_2) ;
        /*0040*/                   FSEL R4, R4, -INF , P2 ;
        /*0050*/                   FSEL R5, R5, -INF , P2 ;
.L_x_2:
        /*0060*/              @!P3 FMUL R5, R5, 0.5 ;
        /*0070*/                   MUFU.EX2 R5, R5 ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00a0*/               @P4 BRA `(.L_x_0) ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
"""


def forward(head_dim: int, stages: int) -> Launch:
    q = torch.zeros(1, 256, 2, head_dim, dtype=torch.bfloat16)
    lse = torch.zeros(1, 2, 256)
    args = (q, q, q, q, lse, None, 256, 256, 1, 0.1, *strides_of(q, q, q), True)
    return Launch(flash_forward_kernel.fn, (2, 2, 1), args, head_sizes(head_dim) | TILES | {"num_stages": stages})


@pytest.fixture(scope="module")
def kernels():
    """The attention kernel by capability and size of head."""
    found = {}
    for capability, stages in ((80, 2), (90, 3)):
        made = compile_launches([forward(head_dim, stages) for head_dim in (64, 128)], capability)
        found |= {(capability, head_dim): each for head_dim, each in zip((64, 128), made, strict=True)}
    return found


def test_each_instruction_counts_in_its_innermost_loop():
    with mock.patch.object(instructions, "machine_code", return_value=NESTED):
        outer, inner = instruction_mix(None)
    assert outer.always == Counter(other=2, memory=1) and not outer.sometimes and not outer.matmul_flops
    assert inner.always == Counter(matmuls=1, float32=1, special=1, other=2)
    assert inner.sometimes == Counter(choices=2)
    assert inner.matmul_flops == 2 * 16 * 8 * 16


def test_loops_that_cross_are_refused(kernels):
    crossed = NESTED.replace("@P4 BRA `(.L_x_0)", "@P4 BRA `(.L_x_2)")
    with mock.patch.object(instructions, "machine_code", return_value=crossed):
        with pytest.raises(ValueError, match="overlap"):
            instruction_mix(kernels[90, 64])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("capability", [80, 90])
def test_products_and_powers_are_those_of_a_tile(kernels, capability, head_dim):
    """A turn of attention's loop: 4 d FLOPs and a power of 2 for each score, and one more for each row a thread has."""
    mix = main_loop(kernels[capability, head_dim])
    scores = TILES["BLOCK_Q"] * TILES["BLOCK_K"]
    assert mix.matmul_flops * TILES["num_warps"] == 4 * head_dim * scores
    rows = 2 * TILES["num_warps"] * WARP  # two a thread: 4 threads share a row
    assert 0 <= mix.always["special"] * TILES["num_warps"] * WARP - scores - rows <= rows
    assert 1 <= mix.per_score("special", TILES["num_warps"], scores) <= 1.2
    assert mix.sometimes["choices"] >= scores / TILES["num_warps"] / WARP  # the mask, on the diagonal only


def test_counts_are_those_of_the_assembler_s_input(kernels):
    """By another way: this kernel has one loop, and all powers of 2 in its PTX are in there."""
    for kernel in kernels.values():
        assert main_loop(kernel).always["special"] == len(re.findall(r"\bex2\.", kernel.ptx))


def test_peaks_are_those_of_the_data_sheets():
    """FLOPs a clock and SM against the peak: A100 at its boost clock, H100 at the 1,830 MHz its tensor peak is for."""
    for name, clock in (("A100", 1.41e9), ("H100", 1.83e9)):
        gpu = GPUS[name]
        per_clock = instructions.TENSOR_FLOPS_PER_CLOCK[gpu.compute_capability]
        assert per_clock * gpu.sms * clock == pytest.approx(gpu.peak_flops["bfloat16"], rel=2e-3)


def test_clocks(kernels):
    """FlashAttention-3 §3.1: on an H100, with heads of 128, powers take half the clocks of products."""
    wide, narrow = (loop_cycles(main_loop(kernels[90, d]), GPUS["H100"], TILES["num_warps"]) for d in (128, 64))
    assert wide["tensor cores"] == 128 * 64 / 8 and narrow["tensor cores"] == 128 * 64 / 16
    assert 0.5 <= wide["special functions"] / wide["tensor cores"] < 0.6
    assert wide["any instruction"] >= wide["float32 units"]
    with pytest.raises(ValueError, match="tensor cores"):
        loop_cycles(main_loop(kernels[90, 64]), GPUS["B200"], 8)


def test_table_has_a_row_for_each_kernel(kernels):
    rows = instruction_table({"64": kernels[90, 64], "128": kernels[90, 128]}, GPUS["H100"]).splitlines()
    assert len(rows) == 4 and rows[3].split()[0] == "128"
    assert str(main_loop(kernels[90, 128]).always.total()) in rows[3].split()


def test_a_kernel_without_products_has_no_main_loop(kernels):
    with mock.patch.object(instructions, "machine_code", return_value=NESTED.replace("HMMA.16816", "FMUL")):
        with pytest.raises(ValueError, match="none of its loops"):
            main_loop(kernels[90, 64])
