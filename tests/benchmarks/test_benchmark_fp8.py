"""benchmarks/fp8.py: what it compares and reports, interpreted at tiny sizes on a CPU; its figures need a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from course_kit.gpu.launches import record_launches
from course_lib.fp8.quantization import TENSOR, TILE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
PRODUCTS = ("product, tensor", "product, row", "product, 1 x 128, 128 x 128", "product, 1 x 128, 1 x 128")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here kernels are compiled: run the benchmark itself")


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def fp8(on_path):
    return __import__("fp8")


@pytest.fixture
def fp8_cases(on_path):
    return __import__("fp8_cases")


@pytest.fixture
def kernel_runs(on_path):
    return __import__("kernel_runs")


def test_ours_are_kernels_and_rivals_are_not(fp8_cases, kernel_runs):
    """One scale a matrix or a row is a library's product; of blocks, and of casts, ours launch kernels."""
    for case in (*fp8_cases.matmul_cases(CPU, "cpu"), *fp8_cases.cast_cases(CPU, "cpu")):
        for column, method in case.methods.items():
            inputs = kernel_runs.Method(None, case.make).inputs
            if column == "blockwise":
                continue
            with record_launches() as launches:
                method(*inputs)
            is_ours = column in ("ours", "plain") and case.kernel not in PRODUCTS[:2]
            assert bool(launches) == is_ours, (case.kernel, column)


def test_work_of_casts_is_what_is_read_and_written(fp8_cases):
    """A scale that two results share counts once; one that is there already is read."""
    for case in fp8_cases.cast_cases(CPU, "cpu"):
        given = case.make()
        written = {each.untyped_storage().data_ptr(): each.nbytes for each in case.methods["ours"](*given)}
        assert case.work["forward"] == sum(x.nbytes for x in given) + sum(written.values()), case.kernel


def test_a_kernel_that_is_wrong_is_not_timed(fp8, fp8_cases, kernel_runs):
    case = list(fp8_cases.matmul_cases(CPU, "cpu"))[2]
    wrong = replace(case, methods=case.methods | {"ours": lambda *inputs: case.methods["plain"](*inputs) * 1.01})
    with pytest.raises(ValueError, match="128 x 128 32 x 48 x 160, ours: our results are off"):
        kernel_runs.working(wrong, CPU, fp8.MATMULS)


def test_scales_of_tiles_lie_as_cublas_reads_them(fp8_cases):
    scale = fp8_cases.operands(torch.randn(20, 300), torch.randn(4, 300), (TILE, TENSOR))[1]
    assert scale.shape == (20, 3) and scale.stride() == (1, 20)


def row_of(kernel: str, against: dict[str, float], **changes) -> dict:
    """A row as `measure` makes it; against: our time by theirs."""
    row = {"kernel": kernel, "size": "x", "pass": "forward and backward", "m": 8192, "n": 8192, "k": 8192}
    return row | {"ours_against": against} | changes


def test_what_misses_the_aims_is_said(fp8):
    slow = {"scaled_mm": 1.25}
    found = {
        "products": [row_of(PRODUCTS[0], {"scaled_mm": 1.0}), row_of(PRODUCTS[2], slow)],
        "layers": [row_of("linear", {"BF16": 0.7, "torchao": 0.99}), row_of("linear", {"BF16": 0.9}, m=4096)],
    }
    assert fp8.missed(found) == []
    found = {
        "products": [row_of(PRODUCTS[0], slow), row_of(PRODUCTS[1], slow), row_of(PRODUCTS[2], {"scaled_mm": 2.0})],
        "layers": [row_of("linear", {"BF16": 0.8, "torchao": 1.25}), {"pass": "peak"}],
    }
    assert fp8.missed(found) == [
        "product, tensor x: 0.80 of scaled_mm, the aim is 0.95",
        "product, row x: 0.80 of scaled_mm, the aim is 0.95",
        "product, 1 x 128, 128 x 128 x: 0.50 of scaled_mm, the aim is 0.7",
        "linear x: 1.25 of BF16, the aim is 1.3",
        "linear x: 0.80 of torchao, the aim is 1.0",
    ]
