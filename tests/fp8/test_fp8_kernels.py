"""course_lib.fp8.kernels: the product with scales by blocks is float64's, within its tensors, and it compiles to FP8
instructions, four and one wait a turn on an H100. Interpreted, or GPU; and Triton's compiler, on the CPU.
"""

import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder

from compiled_once import compile_launches
from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.checks.kernels import run_guarded
from course_kit.gpu.compiled import Compiled, compile_kernel
from course_kit.gpu.launches import Launch, record_launches
from course_lib.fp8.kernels import (
    BLOCK_MATMUL_CONFIGURATIONS,
    block_matmul,
    block_matmul_kernel,
    block_matmul_op,
    same_k_blocks,
)
from course_lib.fp8.quantization import FULL, ROW, SQUARE, TENSOR, TILE, Quantized, quantize
from eight_bits import DEVICE, E4M3, E5M2, TENSOR_CORE, any_codes, stands_for

interpreted_only = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="interpreted kernels are compiled apart"
)
needs_fp8 = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no e4m3"
)
# float32's rounding of sums in the interpreter. On an H100 a piece of 128 is summed with some 14 bits.
OF_A_SUM = 32 * 2.0**-24 if DEVICE == "cpu" else TENSOR_CORE  # 128 numbers one after the other, then the pieces
MIXES = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]
SHAPES = [(1, 128, 1), (7, 5, 3), (70, 300, 65)]  # m, k, n


def assert_product(found: torch.Tensor, a: Quantized, b: Quantized) -> None:
    """Of float64's, within float32's rounding by the terms' magnitudes, and one to the dtype of `found`."""
    left, right = stands_for(a).cpu(), stands_for(b).cpu().t()
    exact, terms = left @ right, left.abs() @ right.abs()
    last_bit = torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float32 else 0
    bound = OF_A_SUM * terms + last_bit * exact.abs()
    assert found.shape == exact.shape and found.is_contiguous()
    assert ((found.cpu().double() - exact).abs() <= bound).all(), (a.block, b.block, found.shape)


# The numbers.


@needs_fp8
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mix", MIXES, ids=["e4m3 e4m3", "e5m2 e4m3", "e4m3 e5m2", "e5m2 e5m2"])
def test_against_float64_with_ragged_ends(mix, out_dtype):
    """All finite codes, subnormals too, and all scales their own. Tiles for both is what Wgrad has, squares for one
    what the others have.
    """
    for seed, (m, k, n) in enumerate(SHAPES):
        block_b = TILE if out_dtype == torch.float32 else SQUARE
        a, b = any_codes(m, k, mix[0], TILE, seed), any_codes(n, k, mix[1], block_b, seed + 100)
        found = block_matmul(a, b, out_dtype)
        assert found.dtype == out_dtype
        assert_product(found, a, b)


@needs_fp8
@pytest.mark.parametrize("block_k", [32, 64, 128])
def test_blocks_of_k_and_rows_that_share_a_scale(block_k):
    for rows_a, rows_b in ((1, 1), (1, 128), (FULL, 1), (16, 48), (FULL, FULL)):
        a, b = any_codes(70, 150, E4M3, (rows_a, block_k)), any_codes(50, 150, E4M3, (rows_b, block_k), seed=1)
        assert_product(block_matmul(a, b), a, b)


@needs_fp8
def test_transposed_operands():
    """Scales of a transposed matrix lie column by column."""
    a, b = any_codes(150, 70, E4M3, (128, 1)).t(), any_codes(150, 140, E5M2, SQUARE, seed=1).t()
    assert not a.scale.is_contiguous() and not b.scale.is_contiguous()
    assert_product(block_matmul(a, b), a, b)


@needs_fp8
@pytest.mark.parametrize("configuration", BLOCK_MATMUL_CONFIGURATIONS, ids=str)
def test_every_configuration_that_the_autotuner_may_choose(configuration, monkeypatch):
    monkeypatch.setattr(block_matmul_kernel, "configs", [configuration])
    a, b = any_codes(133, 140, E4M3, TILE), any_codes(131, 140, E4M3, SQUARE, seed=1)
    assert_product(block_matmul(a, b), a, b)


@needs_fp8
def test_more_tiles_than_a_group_of_rows():
    """The order in which programs take tiles leaves none out."""
    a, b = any_codes(64 * 9 + 1, 32, E4M3, (1, 32)), any_codes(130, 32, E4M3, (1, 32), seed=1)
    assert_product(block_matmul(a, b), a, b)


@needs_fp8
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, in the interpreter, of infinity times 0
def test_nan_and_infinity_reach_their_row_or_column():
    a, b = any_codes(5, 140, E5M2, TILE), any_codes(4, 140, E4M3, TILE, seed=1)
    a.values.view(torch.uint8)[2, 139] = 0x7C  # infinity
    b.values.view(torch.uint8)[3, 0] = 0x7F  # NaN
    found = block_matmul(a, b)
    assert found[:, 3].isnan().all() and not found[2, :3].isfinite().any()
    assert found[[0, 1, 3, 4], :3].isfinite().all()


@needs_fp8
@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 3, 0), (5, 0, 3)])
def test_empty_matrices(shape):
    m, k, n = shape
    a, b = (quantize(torch.empty(rows, k, device=DEVICE), block=TILE) for rows in (m, n))
    found = block_matmul(a, b, torch.bfloat16)
    assert found.shape == (m, n) and (found == 0).all()


# Within its tensors, by one kernel.


def bytes_of_bands(monkeypatch) -> list[int]:
    """How many 0xFF each load of one-byte numbers brings, from now on: the bands of `guarded` are made of them."""
    load, found = InterpreterBuilder.create_masked_load, []

    def watching(self, pointers, mask, *rest, **options):
        loaded = load(self, pointers, mask, *rest, **options)
        if loaded.data.itemsize == 1:
            found.append(int(((loaded.data.view("u1") == 0xFF) & mask.data).sum()))
        return loaded

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watching)
    return found


@needs_fp8
@pytest.mark.parametrize("blocks", [(TILE, SQUARE), ((FULL, 32), (1, 32))], ids=str)
def test_nothing_outside_of_the_tensors_is_read_or_written(blocks, monkeypatch):
    """Also where it would be of no consequence: rows past the end."""

    def run(left, right, scale_a, scale_b):
        return block_matmul(Quantized(left, scale_a, blocks[0]), Quantized(right, scale_b, blocks[1]), torch.bfloat16)

    a, b = any_codes(70, 200, E4M3, blocks[0]), any_codes(65, 200, E5M2, blocks[1], seed=1)
    strays = bytes_of_bands(monkeypatch)
    assert_product(run_guarded(block_matmul_kernel, run, a.values, b.values, a.scale, b.scale), a, b)
    assert not any(strays) and (strays or DEVICE == "cuda")


@needs_fp8
def test_one_launch_and_no_other_memory_than_the_result():
    a, b = any_codes(70, 200, E4M3, TILE), any_codes(65, 200, E4M3, SQUARE, seed=1)
    a, b = (Quantized(guarded(q.values), guarded(q.scale), q.block) for q in (a, b))
    with record_launches() as launches, GuardBands() as guards:
        found = block_matmul(a, b)
    guards.check()
    assert_product(found, a, b)
    assert guards.operations == [] and guards.largest_bytes == found.nbytes and len(guards.bands) == 1
    assert DEVICE == "cuda" or [launch.name for launch in launches] == ["block_matmul_kernel"]


@needs_fp8
def test_the_operator_is_proper():
    a, b = any_codes(7, 40, E4M3, (1, 32)), any_codes(5, 40, E5M2, (4, 32), seed=1)
    before = [x.clone() for q in (a, b) for x in q[:2]]
    for out_dtype in (torch.float32, torch.bfloat16):
        arguments = (a.values, b.values, a.scale, b.scale, 1, 4, 32, out_dtype)
        checks = "test_autograd_registration", "test_faketensor"  # PyTorch can't compare 8 bits in the others
        torch.library.opcheck(block_matmul_op, arguments, test_utils=checks)
    for x, y in zip(before, [*a[:2], *b[:2]], strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), "inputs are left alone"


def test_on_the_meta_device():
    a, b = (quantize(torch.empty(rows, 256, device="meta"), block=TILE) for rows in (5, 7))
    found = block_matmul(a, b, torch.bfloat16)
    assert found.is_meta and found.shape == (5, 7) and found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("block_a", "block_b", "fit"),
    [
        (TILE, TILE, True),
        (TILE, SQUARE, True),
        ((FULL, 64), (1, 64), True),
        ((1, 32), (1, 32), True),
        ((1, 64), (1, 32), False),
        (TILE, ROW, False),
        (TENSOR, TENSOR, False),
        ((1, 16), (1, 16), False),
        ((1, 256), (1, 256), False),
    ],
    ids=str,
)
def test_which_scales_it_takes(block_a, block_b, fit):
    a, b = any_codes(3, 128, E4M3, block_a), any_codes(2, 128, E4M3, block_b)
    assert same_k_blocks(a, b) == fit
    if not fit:
        with pytest.raises(ValueError, match=r"both must change after the same 32, 64 or 128 elements of k"):
            block_matmul(a, b)


def test_k_must_agree():
    with pytest.raises(ValueError, match=r"k is last in both and must agree: \[3, 128\] and \[2, 64\]"):
        block_matmul(any_codes(3, 128, E4M3, TILE), any_codes(2, 64, E4M3, TILE))


# Compiled.


class Use(NamedTuple):
    """What the product is compiled for; configurations: how many of them, from the first one."""

    capability: int
    blocks: tuple[tuple[int, int], tuple[int, int]]
    dtypes: tuple[torch.dtype, torch.dtype]
    configurations: int = 3


FPROP, WGRAD = (TILE, SQUARE), (TILE, TILE)
ALL = len(BLOCK_MATMUL_CONFIGURATIONS)
USES = [Use(90, FPROP, (E4M3, E4M3), ALL), Use(90, WGRAD, (E5M2, E4M3)), Use(89, WGRAD, (E4M3, E4M3))]
SERIALIZED = "C7515"  # NVIDIA's assembler: each product on the tensor cores waits for the one before
# Known exceptions, bytes a thread at most, by GPU and (block_m, block_n, warps): 64 numbers of a sum, 64 of a total,
# and addresses fill 255 registers.
SPILLED = {
    (90, (128, 128, 8)): 32,
    (89, (128, 128, 8)): 8,
}


def launches_of(use: Use) -> list[Launch]:
    """Sizes that 16 divides, as a model's."""
    size = 8192
    a, b = (
        Quantized(torch.zeros(256, 256, dtype=dtype), torch.zeros(256 // block[0], 2), block)
        for dtype, block in zip(use.dtypes, use.blocks, strict=True)
    )
    out = torch.zeros(256, 256, dtype=torch.bfloat16)
    strides = (size // 128, 1, size // 128, 1)  # of the scales, at that size
    args = a.values, b.values, out, a.scale, b.scale, size, size, size, *strides
    constants = {"rows_a": a.block[0], "rows_b": b.block[0], "block_k": a.block[1]}
    configurations = [each.all_kwargs() for each in BLOCK_MATMUL_CONFIGURATIONS[: use.configurations]]
    return [Launch(block_matmul_kernel.fn, (1,), args, constants | each) for each in configurations]


@pytest.fixture(scope="module")
def compiled() -> list[tuple[Use, dict, Compiled]]:
    """Use, constants of the configuration, and what the compiler made of it."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("interpreted kernels are compiled apart")
    rows = []
    for capability in (90, 89):
        launches = [(use, launch) for use in USES if use.capability == capability for launch in launches_of(use)]
        made = compile_launches([launch for _, launch in launches], capability)
        rows += [(use, launch.meta, each) for (use, launch), each in zip(launches, made, strict=True)]
    assert len(rows) == sum(use.configurations for use in USES)
    return rows


def sizes(meta: dict) -> tuple[int, int, int]:
    return meta["block_m"], meta["block_n"], meta["num_warps"]


def test_table(compiled):
    """Registers and spilled bytes of a thread, shared bytes of a block: pytest -s."""
    for use, meta, made in compiled:
        product = "Fprop" if use.blocks == FPROP else "Wgrad"
        print(
            f"sm_{use.capability} {product} {str(use.dtypes[0])[13:]:<8}{sizes(meta)!s:<16}stages {meta['num_stages']} "
            f"{made.registers:>4} registers {made.spilled_bytes:>3} spilled {made.shared_bytes:>7} shared"
        )


def test_no_spills_but_the_known_ones(compiled):
    for use, meta, made in compiled:
        most = SPILLED.get((use.capability, sizes(meta)), 0)
        assert made.spilled_bytes <= most, (use, sizes(meta), made.spilled_bytes)
    first = BLOCK_MATMUL_CONFIGURATIONS[0].all_kwargs()
    assert (90, sizes(first)) not in SPILLED and (89, sizes(first)) not in SPILLED


def test_shared_memory_fits(compiled):
    for use, meta, made in compiled:
        assert made.shared_bytes <= {90: 227 * 1024, 89: 99 * 1024}[use.capability], (use, sizes(meta))


def test_products_are_those_of_8_bit_tensor_cores(compiled):
    """On an H100 by warp groups: four of 32 numbers for a piece of 128, and one wait for the four. On Ada by warps. In
    neither case is a number made wider on the way.
    """
    for use, meta, made in compiled:
        kinds = ".".join("e4m3" if dtype == E4M3 else "e5m2" for dtype in use.dtypes)
        block_m, block_n, warps = sizes(meta)
        if use.capability == 90:
            found = Counter(re.findall(r"wgmma\.mma_async\.sync\.aligned\S+", made.ptx))
            rows_at_once = 16 * warps  # a warp group of four has 64
            name = f"wgmma.mma_async.sync.aligned.m64n{block_n}k32.f32.{kinds}"
            assert found == {name: 4 * block_m // rows_at_once}, (use, sizes(meta))
            assert made.ptx.count("wgmma.wait_group") == 1 and SERIALIZED not in made.report, (use, sizes(meta))
        else:
            found = Counter(re.findall(r"mma\.sync\.aligned\S+", made.ptx))
            count = 4 * block_m * block_n // (16 * 8 * warps)
            assert found == {f"mma.sync.aligned.m16n8k32.row.col.f32.{kinds}.f32": count}, (use, sizes(meta))
        assert not re.search(r"cvt\S*\.(f16|bf16|f32)\S*\.e[45]m[32]", made.ptx), (use, "a cast to something wider")


def test_totals_are_kept_in_float32_outside_of_the_tensor_cores(compiled):
    """A multiplication and a fused addition a number and turn: each thread has block_m block_n / threads of them."""
    for use, meta, made in compiled:
        block_m, block_n, warps = sizes(meta)
        each = block_m * block_n // (32 * warps)
        assert (made.ptx.count("mul.f32"), made.ptx.count("fma.rn.f32")) == (each, each), (use, sizes(meta))


def test_tiles_are_loaded_16_bytes_at_a_time(compiled):
    for use, meta, made in compiled:
        tiles = [access for access in made.accesses if len(access.shape) == 2]
        assert len(tiles) == 3 and {access.bytes_per_thread for access in tiles} == {16}, (use, sizes(meta))


def test_offsets_have_64_bits(compiled):
    """Rows times their stride pass 2^31 in a matrix of 2 GB: none of those products has 32 bits."""
    for use, _meta, made in compiled:
        by_type = Counter(re.findall(r"arith\.muli .*: tensor<[\dx]+x(i\d+),", made.ttgir))
        assert by_type["i64"] >= 5 and not by_type["i32"], (use, by_type)


@interpreted_only
def test_an_a100_has_no_e4m3():
    """It doesn't compile there, and `fp8_matmul` doesn't try: `has_scaled_mm` is False, and the product emulated."""
    launch = launches_of(USES[0])[0]
    with pytest.raises(ValueError, match="type fp8e4nv not supported in this architecture"):
        compile_kernel(launch.kernel, *launch.args, capability=80, **launch.meta)
