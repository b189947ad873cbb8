"""course_lib.kernels.matmul: the product of any two matrices, and the order of its programs. Triton's interpreter, or a
GPU.
"""

import pytest
import torch
import triton
import triton.language as tl

from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import record_launches
from course_lib.kernels.matmul import matmul, strips_per_wave, tile_of, tile_of_program

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_product(a: torch.Tensor, b: torch.Tensor) -> None:
    """Against float64: float32's own rounding of a sum of k terms, and one rounding to a's dtype."""
    found, exact = matmul(a, b), a.double() @ b.double()
    assert found.dtype == a.dtype and found.is_contiguous() and found.shape == exact.shape
    size = a.double().abs() @ b.double().abs()
    rounding = torch.finfo(a.dtype).eps / 2 * exact.abs() if a.dtype != torch.float32 else 0
    assert ((found.double() - exact).abs() <= rounding + 2e-6 * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (65, 33, 130), (64, 64, 64), (3, 100, 7), (130, 5, 64)])
def test_products_of_any_size(m, k, n, dtype):
    assert_product(random(m, k, dtype=dtype), random(k, n, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_strides(dtype):
    a, b = random(40, 70, dtype=dtype), random(70, 50, dtype=dtype)
    for left in (a, a.T.contiguous().T, random(40, 140, dtype=dtype)[:, ::2], a[:1].expand(9, 70)):
        for right in (b, b.T.contiguous().T):
            assert_product(left, right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_is_read_or_written(dtype):
    a, b = guarded(random(67, 35, dtype=dtype)), guarded(random(35, 66, dtype=dtype))
    with GuardBands() as guards, record_launches() as launches:
        out = matmul(a, b)
    guards.check()
    assert guards.operations == [] and [launch.name for launch in launches] == ["matmul_kernel"]
    assert out.isfinite().all() and guards.largest_bytes == out.nbytes


def test_no_elements():
    """An empty result launches nothing; a sum of no terms is 0."""
    with record_launches() as launches:
        for m, k, n in ((0, 4, 5), (4, 5, 0)):
            assert matmul(random(m, k), random(k, n)).shape == (m, n)
    assert not launches
    assert torch.equal(matmul(random(3, 0), random(0, 2)), torch.zeros(3, 2, device=DEVICE))


@pytest.mark.parametrize(
    "a, b, words",
    [
        (torch.ones(2, 3), torch.ones(2, 3), r"\[2, 3\] torch.float32 cpu and \[2, 3\] torch.float32 cpu"),
        (torch.ones(3), torch.ones(3, 3), r"not \[3\] torch"),
        (torch.ones(2, 3), torch.ones(3, 2).half(), "torch.float16"),
        (torch.ones(2, 3), torch.ones(3, 2, device="meta"), "meta"),
    ],
)
def test_bad_input_is_one_line(a, b, words):
    with pytest.raises(ValueError, match=words) as raised:
        matmul(a, b)
    assert "\n" not in str(raised.value)


# The order of the programs.


@triton.jit
def tiles_kernel(out, tiles_m, tiles_n, group: tl.constexpr):
    program = tl.program_id(0)
    row, column = tile_of(program, tiles_m, tiles_n, group)
    tl.store(out + 2 * program, row)
    tl.store(out + 2 * program + 1, column)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_each_tile_has_one_program(group):
    """For sizes that a group divides and others; `tile_of_program` says the same."""
    for tiles_m in (1, 2, 3, 7, 8, 9, 17):
        for tiles_n in (1, 4, 5):
            found = [tile_of_program(program, tiles_m, tiles_n, group) for program in range(tiles_m * tiles_n)]
            assert sorted(found) == [(row, column) for row in range(tiles_m) for column in range(tiles_n)]
    for tiles_m, tiles_n in ((7, 4), (8, 5), (1, 3)):
        out = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32, device=DEVICE)
        tiles_kernel[(tiles_m * tiles_n,)](out, tiles_m, tiles_n, group=group)
        assert out.tolist() == [list(tile_of_program(p, tiles_m, tiles_n, group)) for p in range(tiles_m * tiles_n)]


def test_a_group_goes_down_its_rows_first():
    assert [tile_of_program(program, 5, 3, 2) for program in range(8)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0), (3, 0),
    ]  # fmt: skip
    assert [tile_of_program(program, 5, 3, 2) for program in range(12, 15)] == [(4, 0), (4, 1), (4, 2)]


def test_grouped_programs_want_fewer_strips():
    """Of 16 x 16 tiles, 16 at a time: a row of them wants 1 + 16, a square of four groups 4 + 4."""
    assert strips_per_wave(16, 16, 1, 16) == 17 and strips_per_wave(16, 16, 16, 16) == 17
    assert strips_per_wave(16, 16, 4, 16) == 8
    assert strips_per_wave(3, 3, 2, 100) == 6  # all at once: each strip once
