"""The CUDA C++ matmuls give a @ b, for odd shapes too: on a CPU from their own source, by fibers; on a GPU for real.

What nvcc says of them (registers, spills, shared memory) needs nvcc but no GPU.
"""

import subprocess

import pytest
import torch

from course_kit.checks import CheckFailed
from course_kit.checks.guard_bands import GuardBands, guarded
from course_lib.kernels import cuda_matmul
from course_lib.kernels.cpp import CannotBuild, nvcc_report, require_cuda
from course_lib.kernels.cuda_matmul import CUDA_LADDER, CudaKernel, build_matmul, check_matrices
from cuda_on_cpu import check_with_nvcc, compiled, needs_gcc, needs_nvcc, pointer

PARAMETERS = "const float* a, const float* b, float* c, int m, int n, int k"
SHAPES = [(1, 1, 1), (32, 32, 32), (33, 65, 31), (5, 130, 40), (129, 7, 9), (64, 1, 100), (3, 2, 0)]


def cuda_works() -> bool:
    try:
        require_cuda()
    except CannotBuild:
        return False
    return True


needs_cuda = pytest.mark.skipif(not cuda_works(), reason="needs a GPU and nvcc")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = "".join(kernel.source for kernel in CUDA_LADDER.values())
    return compiled(source, dict.fromkeys(CUDA_LADDER, PARAMETERS), tmp_path_factory.mktemp("matmul"))


def launch(library, name: str, a: torch.Tensor, b: torch.Tensor, kernel: CudaKernel) -> tuple[torch.Tensor, int]:
    """c and the launch's answer (1: some threads did not come to a barrier), by the kernel on the CPU."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n)
    blocks = [-(-side // kernel.tile) for side in (m, n)]
    function = getattr(library, f"{name}_on_cpu")
    return c, function(*blocks, *kernel.threads, pointer(a), pointer(b), pointer(c), m, n, k)


def assert_product(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Each element of c is off by at most k roundings of float32, and one, of the sum of its terms' sizes."""
    exact = a.double() @ b.double()
    bound = (a.shape[1] + 1) * 2**-24 * (a.double().abs() @ b.double().abs())
    assert ((c.double() - exact).abs() <= bound).all()


def matrices(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    return torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)


@needs_gcc
@pytest.mark.parametrize("name", CUDA_LADDER)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_gives_the_product_and_touches_nothing_else(library, name, shape):
    a, b = (guarded(x) for x in matrices(*shape))
    with GuardBands() as bands:
        c, unmet = launch(library, name, a, b, CUDA_LADDER[name])
    assert not unmet
    assert_product(c, a, b)
    bands.check()


MASKS = {"tiled": ("start + x < k", "start + y < k"), "coarsened": ("i < k", "j < k")}
EARLY = ("for (int start = 0;", "if (row >= m || column >= n) return;\n    for (int start = 0;")


def mutants() -> dict[str, tuple[str, str]]:
    """The kernel and its source with one thing gone, by what is gone."""
    found = {"tiled_returns_early": ("tiled", CUDA_LADDER["tiled"].source.replace(*EARLY))}
    for name, kernel in CUDA_LADDER.items():
        parts = kernel.source.split("__syncthreads();")
        for i in range(1, len(parts)):
            source = "__syncthreads();".join(parts[:i]) + "__syncthreads();".join(parts[i:])
            found[f"{name}_without_barrier_{i}"] = name, source
        for i, mask in enumerate(MASKS.get(name, ())):
            found[f"{name}_without_mask_{i}"] = name, kernel.source.replace(mask, "true")
        found[f"{name}_stores_all"] = name, kernel.source.replace("column < n)", "true)")
    assert all(source != CUDA_LADDER[name].source for name, source in found.values())
    return found


MUTANTS = mutants()


@pytest.fixture(scope="module")
def mutant_library(tmp_path_factory):
    """All mutants in one library, each in a namespace of its own."""
    sources = [
        f"namespace of_{mutant} {{ {source.replace(f'{name}(', f'{mutant}(')} }} using of_{mutant}::{mutant};"
        for mutant, (name, source) in MUTANTS.items()
    ]
    return compiled("\n".join(sources), dict.fromkeys(MUTANTS, PARAMETERS), tmp_path_factory.mktemp("mutants"))


def launch_mutant(library, mutant: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int]:
    return launch(library, mutant, a, b, kernel=CUDA_LADDER[MUTANTS[mutant][0]])


@needs_gcc
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if "barrier" in mutant])
def test_each_barrier_is_needed(mutant_library, mutant):
    a, b = matrices(33, 40, 70)
    c, _ = launch_mutant(mutant_library, mutant, a, b)
    with pytest.raises(AssertionError):
        assert_product(c, a, b)


@needs_gcc
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if "mask" in mutant])
def test_each_mask_of_a_load_is_needed(mutant_library, mutant):
    """Past the end of k stands NaN: the other side's zero does not hide it."""
    c, _ = launch_mutant(mutant_library, mutant, *(guarded(x) for x in matrices(1, 1, 33)))
    assert c.isnan().all()


@needs_gcc
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if "stores" in mutant])
def test_the_mask_of_the_store_is_needed(mutant_library, mutant):
    with GuardBands() as bands:
        launch_mutant(mutant_library, mutant, *matrices(1, 1, 3))
    with pytest.raises(CheckFailed):
        bands.check()


@needs_gcc
def test_returning_before_a_barrier_is_seen(mutant_library):
    assert launch_mutant(mutant_library, "tiled_returns_early", *matrices(33, 40, 70))[1] == 1
    assert launch_mutant(mutant_library, "tiled_returns_early", *matrices(32, 64, 70))[1] == 0


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvcc_compiles_the_ladder_without_spills(arch):
    report = nvcc_report("".join(kernel.source for kernel in CUDA_LADDER.values()), arch)
    assert sorted(report) == sorted(CUDA_LADDER)
    for name, kernel in CUDA_LADDER.items():
        threads = kernel.threads[0] * kernel.threads[1]
        assert report[name].spilled_bytes == 0
        assert report[name].registers * threads <= 65_536  # a multiprocessor's registers: or a block cannot start
    shared = {name: found.shared_bytes for name, found in report.items()}
    assert shared == {"naive": 0, "coalesced": 0, "tiled": 2 * 32 * 32 * 4, "coarsened": 8 * (132 + 128) * 4}


@needs_nvcc
def test_coarsened_reads_16_bytes_of_shared_memory_at_once(tmp_path):
    (tmp_path / "coarsened.cu").write_text(CUDA_LADDER["coarsened"].source)
    command = ["nvcc", "-ptx", "-arch=sm_90", "coarsened.cu", "-o", "coarsened.ptx"]
    subprocess.run(command, cwd=tmp_path, check=True)
    ptx = (tmp_path / "coarsened.ptx").read_text()
    assert "ld.shared.v4.f32" in ptx
    assert ptx.count("fma.rn.f32") == 16 * ptx.count("ld.shared.v4.f32") and "ld.shared.f32" not in ptx


@needs_nvcc
def test_nvcc_accepts_the_launcher(tmp_path):
    check_with_nvcc(cuda_matmul.MATMUL_CUDA_SOURCE, tmp_path)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", CUDA_LADDER)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 1100, 900)])
def test_kernel_on_a_gpu(name, shape):
    a, b = (guarded(x.cuda()) for x in matrices(*shape))
    with GuardBands() as bands:
        c = build_matmul()(name, a, b)
    assert_product(c, a, b)
    bands.check()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), r"not \[2, 3\] @ \[2, 3\]"),
        (torch.ones(2), torch.ones(2, 3), r"not \[2\] @"),
        (torch.ones(2, 3), torch.ones(3, 2), "on a GPU"),
        (torch.ones(2, 3), torch.ones(3, 2, requires_grad=True), "no backward"),
        (torch.empty(1, 2**20 + 1, device="meta"), torch.empty(2**20 + 1, 1, device="meta"), "at most 1048576"),
    ],
)
def test_wrong_matrices_are_named(a, b, message):
    with pytest.raises(ValueError, match=message):
        check_matrices(a, b)


@pytest.mark.skipif(cuda_works(), reason="here it can be built")
def test_what_is_missing_is_named():
    with pytest.raises(CannotBuild, match="GPU|nvcc"):
        build_matmul()
