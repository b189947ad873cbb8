"""course_lib.fp8.casts: quantization by kernels gives what `quantize` gives, bit by bit, and moves the bytes it says.
Triton's interpreter (and its compiler, for the counts) on the CPU, or a GPU with FP8.
"""

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import record_launches
from course_kit.gpu.transactions import count_transactions
from course_lib.fp8 import casts as fp8_casts
from course_lib.fp8.casts import (
    FUSED_BLOCKS,
    amax_operator,
    block_amax_fused,
    quantize_both,
    quantize_delayed,
    quantize_fused,
    quantize_operator,
    transpose_tiles,
)
from course_lib.fp8.quantization import (
    ROW,
    SQUARE,
    TENSOR,
    TILE,
    Quantized,
    block_amax,
    blocks_of,
    dequantize,
    quantize,
    scale_of,
)
from kernel_traffic import count_accesses

interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts in Triton's interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SECTOR = 32
SIZES = {TILE: (35, 133), SQUARE: (130, 133), ROW: (9, 133), TENSOR: (35, 133)}  # of more than one piece, and ragged


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32, wide: float = 3.0) -> torch.Tensor:
    """Normal numbers times powers of e: some are 10,000 times as large as others."""
    generator = torch.Generator().manual_seed(rows * columns)
    x, exponents = torch.randn(2, rows, columns, generator=generator)
    return (x * torch.exp(wide * exponents)).to(DEVICE, dtype)


def assert_same(found: Quantized, expected: Quantized) -> None:
    """Bit by bit; NaNs count as one."""
    assert found.block == expected.block and found.values.dtype == expected.values.dtype
    assert found.values.shape == expected.values.shape and found.values.is_contiguous()
    nan = found.values.float().isnan() & expected.values.float().isnan()
    assert ((found.values.view(torch.uint8) == expected.values.view(torch.uint8)) | nan).all()
    assert torch.equal(found.scale, expected.scale)


def assert_quantizes(x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], power_of_two: bool = False) -> None:
    """As it lies, transposed, and both at once."""
    straight, turned = quantize(x, dtype, block, power_of_two), quantize(x.t(), dtype, block, power_of_two)
    assert_same(quantize_fused(x, dtype, block, power_of_two), straight)
    assert_same(quantize_fused(x, dtype, block, power_of_two, transposed=True), turned)
    for found, expected in zip(quantize_both(x, dtype, block, power_of_two), (straight, turned), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("block", FUSED_BLOCKS, ids=str)
@pytest.mark.parametrize(
    "dtype, source, power_of_two",
    [(E4M3, torch.bfloat16, False), (E4M3, torch.float32, True), (E5M2, torch.float16, False)],
)
def test_the_result_is_that_of_quantize(dtype, source, block, power_of_two):
    """Of matrices that blocks don't divide."""
    for rows, columns in ((1, 1), SIZES[block]):
        assert_quantizes(matrix(rows, columns, source, wide=1.0), dtype, block, power_of_two)


@pytest.mark.parametrize("block", FUSED_BLOCKS, ids=str)
@pytest.mark.parametrize(
    "dtype, source", [(E4M3, torch.float32), (E5M2, torch.float32), (E4M3, torch.bfloat16)], ids=str
)
def test_rows_of_whole_vectors(dtype, source, block):
    """Where a thread has several numbers in one register, straight and turned; and where it has them straight alone."""
    for rows, columns in ((128, 256), (68, 144)):
        assert_quantizes(matrix(rows, columns, source, wide=1.0), dtype, block)


@pytest.mark.parametrize("dtype, block", [(E4M3, TILE), (E5M2, SQUARE), (E5M2, ROW), (E4M3, TENSOR)], ids=str)
def test_numbers_that_are_none_and_blocks_of_zeros(dtype, block):
    """NaN and infinities become NaN and don't count in the scale; a block of zeros has the scale 1."""
    rows, columns = SIZES[block]
    x = matrix(rows, columns, wide=0.0)
    x[:128, :128] = 0
    x[5], x[:, 7] = float("nan"), float("inf")
    x[6, 131], x[-1, 0] = float("-inf"), -0.0
    assert_quantizes(x, dtype, block)
    assert quantize_fused(x[:2, :7], dtype, block).scale.eq(1).all()
    assert_quantizes(torch.full((3, 130), float("nan"), device=DEVICE), dtype, block)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("factor", [2.0**-140, 2.0**-118, 2.0**-60, 2.0**120])
def test_the_smallest_and_the_largest_numbers(factor, power_of_two):
    """Where amax / 448 is no normal number, the scale is the smallest one that is."""
    assert_quantizes(matrix(3, 200, wide=0.0) * factor, E4M3, TILE, power_of_two)


def test_ties_and_powers_of_two_as_scales():
    """Numbers in the middle of two codes, by scales of 1 and of 2^-3."""
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2]).to(DEVICE)
    x = torch.stack([x, -x, x / 8]).contiguous()
    assert quantize(x, E4M3, ROW).scale.flatten().tolist() == [1, 1, 1 / 8]
    assert_quantizes(x, E4M3, ROW)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's
@pytest.mark.parametrize("block", FUSED_BLOCKS, ids=str)
def test_a_scale_that_is_given(block):
    """Some of it so small that numbers lie beyond the largest one; a scale with any strides."""
    x = matrix(*SIZES[block], wide=1.0)
    for transposed, y in ((False, x), (True, x.t())):
        down, across, *_ = blocks_of(y.shape, block)
        scale = (0.02 * torch.rand(across, down, device=DEVICE) + 1e-3).t()
        found = quantize_fused(x, E4M3, block, scale=scale, transposed=transposed)
        assert_same(found, quantize(y, E4M3, block, scale=scale))
        assert found.scale is scale and (found.values.float().abs() == 448).any()
    infinite = torch.tensor([[1e38, 1.0]], device=DEVICE)
    small = torch.full((1, 1), 1e-3, device=DEVICE)
    assert_same(quantize_fused(infinite, scale=small), quantize(infinite, scale=small))  # 1e41 is NaN


class Seen(TorchDispatchMode):
    """`with Seen() as found:` lists the names of our operators inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [func._schema.name] * (func.namespace == "course")
        return func(*args, **(kwargs or {}))


def test_casts_are_operators_only_where_somebody_watches(monkeypatch):
    """A counter, a compiler; else the host is spared the operator, and results are the same."""
    x = matrix(35, 133)
    with Seen() as found:
        watched = quantize_both(x)
    assert found.names == ["course::block_amax", "course::quantize"]
    compiled = torch.compile(quantize_both, backend="eager", fullgraph=True)(x)
    assert quantize_both(x.to("meta"))[1].values.shape == (133, 35)
    monkeypatch.setattr(fp8_casts, "quantize_operator", None)
    monkeypatch.setattr(fp8_casts, "amax_operator", None)
    for plain, *others in zip(quantize_both(x), watched, compiled, strict=True):
        for other in others:
            assert_same(other, plain)


def test_delayed_scaling_gets_both_and_the_amax_from_one_look():
    x, scale = matrix(*SIZES[TENSOR], torch.bfloat16, wide=1.0), torch.full((1, 1), 0.01, device=DEVICE)
    x[3, 3] = float("inf")
    with record_launches() as launches:
        straight, turned, amax = quantize_delayed(x, scale, E5M2)
    assert [launch.name for launch in launches] == ["quantize_kernel"]
    assert_same(straight, quantize(x, E5M2, scale=scale))
    assert_same(turned, quantize(x.t(), E5M2, scale=scale))
    assert torch.equal(amax, block_amax(x, TENSOR))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_tiles_are_turned_from_their_8_bits_in_one_look(dtype, power_of_two):
    """To the bit `quantize` of what they stand for, NaN too; sizes that no tile divides, and rows with gaps."""
    for shape in ((5, 300), (130, 128), (257, 129), (1, 1)):
        x = matrix(*shape, torch.float32)
        x[0, 0] = float("nan")
        tiles = quantize(x, dtype, TILE, power_of_two)
        with record_launches() as launches:
            found = transpose_tiles(tiles, power_of_two)
        assert [launch.name for launch in launches] == ["quantize_kernel"]
        assert_same(found, quantize(dequantize(tiles).t(), dtype, TILE, power_of_two))
    gaps = quantize(matrix(40, 256), dtype, TILE)
    wide = torch.cat([gaps.values.view(torch.uint8)] * 2, 1).view(dtype)[:, :256]
    assert_same(transpose_tiles(Quantized(wide, gaps.scale, TILE)), transpose_tiles(gaps))
    with pytest.raises(ValueError, match=r"x is in blocks of \(-1, -1\): expected tiles, \(1, 128\)"):
        transpose_tiles(quantize(gaps.values.float()))


@interpreted_only
def test_turning_tiles_reads_a_byte_and_writes_one():
    x = quantize(matrix(128, 256, torch.bfloat16), E4M3, TILE)
    with count_accesses() as moved:
        transpose_tiles(x)
    n, halves = x.values.numel(), 2  # programs have half a tile's columns, and read its scales each
    assert moved["load"] == n + halves * x.scale.nbytes and moved["store"] == n + x.scale.nbytes


@pytest.mark.parametrize("block", FUSED_BLOCKS, ids=str)
def test_amax_and_scale(block):
    x = matrix(*SIZES[block], torch.bfloat16)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    assert torch.equal(block_amax_fused(x, block), block_amax(x, block))
    assert torch.equal(block_amax_fused(x, block, transposed=True), block_amax(x.t(), block))
    for power_of_two in (False, True):
        expected = scale_of(block_amax(x, block), E5M2, power_of_two)
        assert torch.equal(quantize_fused(x, E5M2, block, power_of_two).scale, expected)


def test_long_rows_take_two_passes(monkeypatch):
    monkeypatch.setattr(fp8_casts, "LONGEST_BLOCK", 256)
    with record_launches() as launches:
        assert_same(quantize_fused(matrix(5, 257), E4M3, ROW), quantize(matrix(5, 257), E4M3, ROW))
    assert [launch.name for launch in launches] == ["amax_kernel", "quantize_kernel"]


def test_rows_with_gaps_and_other_strides():
    x = matrix(20, 150)
    for view in (x[:, 13:148], x[::2, :150], x.t(), x[:1].expand(9, 150)):
        assert_quantizes(view, E4M3, TILE)
    assert_quantizes(x[::2, :13], E4M3, TENSOR)


def test_no_elements_and_no_gradient():
    for shape in ((0, 5), (5, 0), (0, 0)):
        for block in FUSED_BLOCKS:
            with record_launches() as launches:
                assert_quantizes(torch.zeros(shape, device=DEVICE), E4M3, block)
            assert not launches
    assert not quantize_fused(matrix(2, 2).requires_grad_()).values.requires_grad


@pytest.mark.parametrize("block", FUSED_BLOCKS, ids=str)
def test_nothing_outside_is_read_or_written(block):
    """And PyTorch does none of the work."""
    rows, columns = SIZES[block]
    x = guarded(matrix(rows, 150, torch.bfloat16)[:, :columns])
    expected = quantize(x, E4M3, block), quantize(x.t(), E4M3, block)
    with GuardBands() as guards:
        found = *quantize_both(x, E4M3, block), quantize_fused(x, E4M3, block, transposed=True)
    guards.check()
    for mine, theirs in zip(found, (*expected, expected[1]), strict=True):
        assert_same(mine, theirs)
    assert guards.operations == [] and guards.largest_bytes == x.numel()


@pytest.mark.parametrize(
    "x, dtype, block, words",
    [
        (torch.zeros(2, 3, dtype=torch.float64), E4M3, TILE, "x is torch.float64 in blocks of .1, 128."),
        (torch.zeros(2, 3), E4M3, (2, 2), "expected float32, bfloat16 or float16, and blocks of"),
        (torch.zeros(2, 3), torch.float16, TILE, "the 8-bit formats are"),
        (torch.zeros(2), E4M3, TILE, "takes a matrix"),
    ],
)
def test_bad_input_is_one_line(x, dtype, block, words):
    for run in (quantize_fused, quantize_both):
        with pytest.raises(ValueError, match=words) as raised:
            run(x, dtype, block)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="have .1, 1. scales, not .2, 1."):
        quantize_fused(torch.zeros(2, 3), scale=torch.ones(2, 1))
    with pytest.raises(ValueError, match="have .3, 1. scales, not .2, 1."):
        quantize_fused(torch.zeros(2, 3), block=TILE, scale=torch.ones(2, 1), transposed=True)


def test_opcheck():
    """Fake results have the real ones' shapes, types and strides."""
    x = matrix(5, 130)
    for block in (TILE, TENSOR):
        for transposed in (False, True):
            torch.library.opcheck(amax_operator, (x, *block, transposed))
    for straight, turned in ((True, False), (False, True), (True, True)):
        torch.library.opcheck(quantize_operator, (x, None, None, E4M3, *TILE, False, straight, turned, False))
    scale = torch.ones(1, 1, device=DEVICE)
    torch.library.opcheck(quantize_operator, (x, scale, None, E5M2, *TENSOR, False, True, True, True))


# Bytes.


def sectors(run) -> dict[str, list[int]]:
    """Bytes of the sectors that the kernels of `run` load and store, launch by launch."""
    with record_launches() as launches:
        run()
    traffic = [count_transactions(each.kernel, each.grid, *each.args, **each.meta) for each in launches]
    return {kind: [SECTOR * each.sectors(kind) for each in traffic] for kind in ("load", "store")}


@interpreted_only
def test_tiles_and_squares_are_read_once_and_written_once():
    """Sectors between threads and cache, by the compiler's layouts: not one more than the matrices and scales have."""
    x = matrix(128, 256, torch.bfloat16, wide=0.0)
    n, tiles, squares = x.numel(), 4 * x.numel() // 128, SECTOR * 2  # a program's single scale is a sector of its own
    read = [x.nbytes]
    assert sectors(lambda: quantize_fused(x, E4M3, TILE)) == {"load": read, "store": [n + tiles]}
    assert sectors(lambda: quantize_fused(x, E4M3, TILE, transposed=True)) == {"load": read, "store": [n + tiles]}
    assert sectors(lambda: quantize_both(x, E4M3, TILE)) == {"load": read, "store": [2 * n + 2 * tiles]}
    assert sectors(lambda: quantize_both(x, E4M3, SQUARE)) == {"load": read, "store": [2 * n + squares]}


@interpreted_only
def test_the_whole_matrix_is_read_twice_and_with_a_known_scale_once():
    """The second pass of the first is counted below: its scale, one number, the compiler loads in two places."""
    x = matrix(128, 256, torch.bfloat16, wide=0.0)
    assert sectors(lambda: block_amax_fused(x, TENSOR)) == {"load": [x.nbytes], "store": [0]}
    scale, n = torch.ones(1, 1), x.numel()
    warps_and_programs = 16 * 2
    found = sectors(lambda: quantize_delayed(x, scale, E4M3))
    assert found == {"load": [x.nbytes + SECTOR * warps_and_programs], "store": [2 * n]}


@interpreted_only
@pytest.mark.parametrize("block, looks", [(TILE, 1), (SQUARE, 1), (ROW, 1), (TENSOR, 2)], ids=str)
def test_bytes_of_all_blocks(block, looks):
    """As the interpreter makes the accesses, for sizes that no block divides."""
    x = matrix(*SIZES[block], torch.bfloat16)
    programs = -(-x.shape[0] // 32) * -(-x.shape[1] // 128)
    with count_accesses() as moved:
        scale = quantize_fused(x, E4M3, block).scale
    amax = 4 * programs if block == TENSOR else 0  # each reads the one
    assert moved["load"] == looks * x.nbytes + amax
    assert moved["store"] == x.numel() + scale.nbytes
