"""What the compiler makes of the FP8 kernels for an H100: products on FP8 tensor cores that start from zero every 128
numbers and are promoted by one or two float32 instructions, tiles by TMA, no spills. Triton's compiler, on the CPU.
"""

import re
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from compiled_once import compile_launches
from course_kit.gpu.ablations import undone
from course_kit.gpu.compiled import Compiled
from course_kit.gpu.instructions import Instruction, find_jumps, kind_of, machine_code, parse
from course_kit.gpu.launches import Launch, record_launches
from course_lib.fp8.cast_kernels import quantize_kernel
from course_lib.fp8.casts import FUSED_BLOCKS, quantize_both
from course_lib.fp8.hopper import HOPPER_BLOCK_CONFIGURATIONS, hopper_block_matmul_kernel
from course_lib.fp8.quantization import ROW, SQUARE, TENSOR, TILE
from course_lib.kernels.gpus import GPUS, occupancy
from warp_groups import moved_twice

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="interpreted kernels are compiled apart")
E4M3, SIDE, PIECE = torch.float8_e4m3fn, 1024, 128
SERIALIZED = "C7515"  # NVIDIA's assembler: each product on the tensor cores waits for the one before
FP8_FLOPS_PER_CLOCK = 8192  # of an H100's SM: twice those of 16 bits
FORMS = {"forward": (TILE, SQUARE), "weight gradient": (TILE, TILE)}


class Use(NamedTuple):
    """A configuration in one of the products of a layer."""

    form: str
    number: int

    @property
    def meta(self) -> dict:
        return HOPPER_BLOCK_CONFIGURATIONS[self.number].all_kwargs()


def product(form: str, meta: dict) -> Launch:
    """Of square matrices, as `hopper_block_matmul` launches it."""
    values, scales = torch.zeros(SIDE, SIDE).to(E4M3), {}
    out = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16 if form == "forward" else torch.float32)
    for block in (TILE, SQUARE):
        scales[block] = torch.zeros(SIDE // PIECE, SIDE // block[0]).t()
    a, b = FORMS[form]
    args = SIDE, SIDE, SIDE, SIDE, SIDE, *scales[a].stride(), *scales[b].stride(), a[0], b[0], PIECE
    return Launch(hopper_block_matmul_kernel, (1,), (values, values, out, scales[a], scales[b], *args), meta)


def compiled(launches: dict, capability: int = 90) -> dict:
    return dict(zip(launches, compile_launches([*launches.values()], capability), strict=True))


def turn(made: Compiled) -> list[Instruction]:
    """The shortest loop with products: what each warp that multiplies executes for a piece of k."""
    instructions, labels = parse(machine_code(made))
    loops = [instructions[start : end + 1] for end, start in find_jumps(instructions, labels) if start < end]
    return min((loop for loop in loops if any(kind_of(each) == "matmuls" for each in loop)), key=len)


@pytest.fixture(scope="module")
def products() -> dict[Use, Compiled]:
    uses = [Use("forward", number) for number in range(len(HOPPER_BLOCK_CONFIGURATIONS))]
    uses += [Use("weight gradient", number) for number in (1, 2, 3)]
    return compiled({use: product(use.form, use.meta) for use in uses})


@pytest.fixture(scope="module")
def turns(products) -> dict[Use, list[Instruction]]:
    return {use: turn(made) for use, made in products.items()}


def test_table(products, turns):
    """Registers, shared memory, and the instructions of a turn; pytest -s prints it."""
    print(f"\n{'':<40}registers  shared blocks |  of a turn: products float32 all | tensor cores, issued")
    for use, made in products.items():
        loop, meta = turns[use], use.meta
        kinds = Counter(map(kind_of, loop))
        blocks = occupancy(GPUS["H100"], 32 * made.num_warps, made.registers, made.shared_bytes).blocks_per_sm
        shape = f"{meta['block_m']} x {meta['block_n']}, {'specialised' if meta['specialized'] else meta['num_warps']}"
        clocks = 2 * meta["block_m"] * meta["block_n"] * PIECE / FP8_FLOPS_PER_CLOCK
        issued = len(loop) * multiplying_warps(use) / GPUS["H100"].sub_partitions
        print(
            f"{use.form:<17}{shape:<23}{made.registers:>9} {made.shared_bytes:>7} {blocks:>6} |"
            f"{kinds['products']:>20} {kinds['float32']:>7} {len(loop):>3} |{clocks:>8.0f} {issued:>8.0f}"
        )


def multiplying_warps(use: Use) -> int:
    """Where one warp group of three only loads, the others are eight warps."""
    return 8 if use.meta["specialized"] else use.meta["num_warps"]


def test_nothing_spills_and_every_block_fits(products):
    for use, made in products.items():
        assert made.spilled_bytes == 0, use
        assert occupancy(GPUS["H100"], 32 * made.num_warps, made.registers, made.shared_bytes).blocks_per_sm > 0, use
        assert made.registers * 32 * made.num_warps <= GPUS["H100"].registers_per_sm


def test_a_piece_is_four_products_from_zero_on_fp8_tensor_cores(products, turns):
    """The first takes no sum (RZ), the others that of the one before; none waits for another."""
    for use, made in products.items():
        found = [each for each in turns[use] if kind_of(each) == "matmuls"]
        assert use.meta["block_m"] == 64 * multiplying_warps(use) // 4  # 64 rows for four warps together
        words = f".64x{use.meta['block_n']}x32.F32.E4M3.E4M3"
        assert [(each.operation, each.variant) for each in found] == [("QGMMA", words)] * (PIECE // 32), use
        assert ["RZ" in each.operands for each in found] == [True, False, False, False], use
        assert SERIALIZED not in made.report and "e4m3.e4m3" in made.ptx


def test_promotion_is_one_instruction_a_number_or_two(turns):
    """One where a row or a square has a single factor, two where rows and columns have theirs."""
    for use, loop in turns.items():
        of_a_thread = use.meta["block_m"] * use.meta["block_n"] // (32 * multiplying_warps(use))
        operations = Counter(each.operation for each in loop if kind_of(each) == "float32")
        assert operations["FFMA"] == of_a_thread, use
        assert operations["FMUL"] <= 2 if use.form == "forward" else operations["FMUL"] == of_a_thread, use


def test_tiles_come_by_tma_and_two_groups_of_warps_take_turns(products):
    """Three groups, of which two multiply: each has its half of the rows, and a loop of its own."""
    for use, made in products.items():
        assert "cp.async.bulk.tensor" in made.ptx, use
        specialized = use.meta["specialized"]
        assert made.ttgir.count("ttg.warp_specialize(") == specialized
        assert made.ttgir.count(" ttng.warp_group_dot ") == (2 if specialized else 1), use
        assert made.num_warps == (12 if specialized else use.meta["num_warps"])


def test_rows_of_the_second_group_move_once(products):
    """They moved twice on the first GPU: the compiler moves the number that the descriptors begin at, in place."""
    for use, made in products.items():
        assert not use.meta["specialized"] or not moved_twice(made), use
    kernel = undone(
        hopper_block_matmul_kernel, {"scale_row = (tile_m + 1) * block_m - block_m": "scale_row = first_row"}
    )
    launch = replace(product("forward", Use("forward", 1).meta), kernel=kernel)
    if tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6):  # 3.6 does not show it for this launch
        assert moved_twice(compiled({0: launch})[0]), "the control: when this fails Triton is mended"


def test_what_is_issued_fits_beside_the_products(turns):
    """So that, of the largest tile, the tensor cores are what a turn has to wait for."""
    for use, loop in turns.items():
        if use.meta["specialized"] and use.meta["block_n"] == 128:
            clocks = 2 * use.meta["block_m"] * use.meta["block_n"] * PIECE / FP8_FLOPS_PER_CLOCK
            issued = len(loop) * multiplying_warps(use) / GPUS["H100"].sub_partitions
            assert issued < (0.6 if use.form == "forward" else 0.9) * clocks


def test_a_tile_of_128_x_256_does_not_fit_the_registers():
    """The control: partial sums and sums would take all that an SM has."""
    sides = {"block_m": 128, "block_n": 256, "group": 8, "num_stages": 3}
    kinds = {"specialised": {"specialized": True, "num_warps": 4}, "plain": {"specialized": False, "num_warps": 8}}
    made = compiled({name: product("weight gradient", sides | kind) for name, kind in kinds.items()})
    assert all(each.spilled_bytes > 100 for each in made.values()), {name: m.spilled_bytes for name, m in made.items()}
    assert 2 * 4 * 128 * 256 == 4 * GPUS["H100"].registers_per_sm


@triton.jit
def one_scale_kernel(a, b, out, k, PROMOTE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row, column, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        left = tl.load(a + row * k + start + inner[None, :])
        right = tl.load(b + column * k + start + inner[:, None])
        total = tl.dot(left, right, total, max_num_imprecise_acc=PROMOTE)
    tl.store(out + row * N + column, total)


def test_triton_promotes_by_itself_only_where_it_is_asked_to():
    """max_num_imprecise_acc: after how many numbers of k a partial sum is added to the total; by default never."""
    values, out = torch.zeros(128, SIDE).to(E4M3), torch.zeros(128, 128)
    sizes = {"M": 128, "N": 128, "K": 128, "num_warps": 8}
    made = compiled(
        {
            promote: Launch(one_scale_kernel, (1,), (values, values, out, SIDE), {"PROMOTE": promote, **sizes})
            for promote in (None, 128)
        }
    )
    sums = {promote: Counter(each.operation for each in turn(loop))["FADD"] for promote, loop in made.items()}
    assert sums == {None: 0, 128: 128 * 128 // 256}


def test_ada_multiplies_in_fp8_without_any_of_it():
    made = compile_launches([product("forward", HOPPER_BLOCK_CONFIGURATIONS[-1].all_kwargs())], 89)[0]
    assert "mma.sync" in made.ptx and "e4m3.e4m3" in made.ptx and "wgmma" not in made.ptx
    assert made.spilled_bytes == 0


# Casts.


@pytest.fixture(scope="module")
def launched_casts() -> dict[tuple, Launch]:
    """By block, whether scales are powers of two, and number of the launch."""
    x, launches = torch.zeros(16, SIDE, dtype=torch.bfloat16), {}
    for power_of_two, blocks in ((False, FUSED_BLOCKS), (True, (TILE,))):
        for block in blocks:
            with record_launches() as made:
                quantize_both(x, E4M3, block, power_of_two)
            launches |= {(block, power_of_two, number): launch for number, launch in enumerate(made)}
    return launches


@pytest.fixture(scope="module")
def casts(launched_casts) -> dict[tuple, Compiled]:
    return compiled(launched_casts)


def test_casts_hold_all_in_registers_and_load_16_bytes_at_once(casts):
    for (block, _, number), made in casts.items():
        assert made.spilled_bytes == 0, (block, made.registers)
        pieces = [each for each in made.accesses if each.operation == "tt.load" and min(each.shape, default=1) > 1]
        assert {each.bytes_per_thread for each in pieces} == ({16} if (block, number) != (ROW, 0) else set()), block
        if (block, number) == (TENSOR, 1):  # quantized once, in one layout
            assert occupancy(GPUS["H100"], 32 * made.num_warps, made.registers, made.shared_bytes).blocks_per_sm >= 4


# Instructions a number at most, by block, powers of two, and number of the launch. (IEEE divisions: 29, 35, 72.)
PER_NUMBER = {(TENSOR, False, 0): 11, (TENSOR, False, 1): 24, (TILE, False, 0): 44.5, (TILE, True, 0): 42}
PER_NUMBER |= {(SQUARE, False, 0): 31}


def test_rounding_is_one_instruction_for_two_numbers_and_division_four_for_one(casts):
    """One division for each scale; no correction where scales are powers of two."""
    for (block, power_of_two, number), made in casts.items():
        if made.name == "quantize_kernel":
            assert "cvt.rn.satfinite.e4m3x2.f32" in made.ptx and "div.full" not in made.ptx
            numbers = 64 if block == TILE else 32 if block != ROW or number else 8
            if not power_of_two:
                assert made.ptx.count("fma.rn.f32") >= 2 * numbers, block
            assert made.ptx.count("div.rn.f32") <= numbers // 2 + 2, block


def test_casts_take_few_instructions(casts, launched_casts):
    for use, made in casts.items():
        meta = launched_casts[use].meta
        each = meta["ROWS"] * meta["COLUMNS"] / meta["num_warps"] / 32
        found = len(parse(machine_code(made))[0]) / each
        print(f"{use}: {found:.1f} instructions a number, {made.registers} registers")
        if use in PER_NUMBER:
            assert found <= PER_NUMBER[use] * (1.3 if triton.__version__ < "3.7" else 1), use


def shifted_halves(made: Compiled) -> set[str]:
    """Registers of 16 bits with two 8-bit numbers, of which a shift takes the upper one."""
    pairs = re.findall(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32\s+(%rs\d+)", made.ptx)
    return set(pairs) & set(re.findall(r"shr\.[us]16\s+%rs\d+, (%rs\d+), 8", made.ptx))


@pytest.mark.parametrize(
    "shape, dtype, block", [((256, 256), torch.float32, TENSOR), ((300, 400), torch.bfloat16, SQUARE)]
)
def test_no_byte_is_taken_from_half_a_word(shape, dtype, block):
    """On the first GPU every fourth number of a transpose was another: ptxas reads such a half before it is there."""
    with record_launches() as launches:
        quantize_both(torch.zeros(shape, dtype=dtype), E4M3, block)
    launch = launches[-1]
    control = replace(launch, kernel=undone(quantize_kernel, {"packed_by_four(x.to(dtype))": "x.to(dtype)"}))
    ours, without = compile_launches([launch, control])
    assert not shifted_halves(ours) and shifted_halves(without)


def test_blackwell_takes_the_casts_without_spills_too(launched_casts):
    assert not {use: made.spilled_bytes for use, made in compiled(launched_casts, 100).items() if made.spilled_bytes}
