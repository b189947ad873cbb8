"""ELU in C++ and CUDA C++ is F.elu: the C++ built and run, the CUDA kernels from their source on a CPU, and built for a
GPU where there is one. What is missing for a build is named. nvcc's report needs nvcc but no GPU.
"""

import ctypes
import os
import stat
import sysconfig
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils import cpp_extension

from course_kit.checks.guard_bands import GuardBands, guarded
from course_lib.kernels.cpp import (
    CPP_SOURCE,
    CUDA_KERNELS,
    CUDA_SOURCE,
    CannotBuild,
    build_elu,
    build_operators,
    nvcc_report,
    require_build_tools,
    require_cuda,
    require_torch_compile,
    scripts_on_path,
)
from cuda_on_cpu import check_with_nvcc, compiled, needs_gcc, needs_nvcc, pointer

PARAMETERS = "const float* x, float* out, float alpha, size_t n"
SPECIAL = [0.0, -0.0, 1e-30, -1e-30, -1e-8, -1e-4, -0.5, -1.0, 90.0, -90.0, float("inf"), -float("inf"), float("nan")]


def missing(require) -> str:
    """What `require` says is missing; empty where nothing is."""
    try:
        require()
    except CannotBuild as reason:
        return str(reason)
    return ""


needs_compiler = pytest.mark.skipif(bool(missing(require_build_tools)), reason=missing(require_build_tools))
DEVICES = ["cpu"] if missing(require_cuda) else ["cpu", "cuda"]


def numbers(n: int) -> torch.Tensor:
    return torch.cat([torch.tensor(SPECIAL), 4 * torch.randn(n, generator=torch.Generator().manual_seed(n))])[:n]


def assert_elu(found: torch.Tensor, x: torch.Tensor, alpha: float) -> None:
    """Within two roundings of the exact value: those of expm1 and of the product by alpha."""
    exact = F.elu(x.double(), alpha)
    torch.testing.assert_close(found.double(), exact, rtol=3 * 2**-24, atol=0.0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [0, 1, 3, 5, 256, 1023, 4097])
@pytest.mark.parametrize("start", [0, 1])  # 1: an address that 16 does not divide
def test_built_elu_is_elu(device, n, start):
    x = guarded(numbers(n + start).to(device))[start:]
    elu = build_elu()
    with torch.profiler.profile() as log:
        found = elu(x, 0.7)
    assert_elu(found, x, 0.7)
    assert "aten::elu" not in [event.name for event in log.events()]


@needs_compiler
def test_built_once():
    with mock.patch.object(cpp_extension, "load_inline", side_effect=AssertionError("built again")):
        build_elu()


@needs_compiler
def test_another_source_is_another_operator():
    edited = CPP_SOURCE.replace("from[i] < 0 ?", "from[i] < 1 ?")
    x = torch.tensor([0.5, -0.5])
    torch.testing.assert_close(build_operators(edited).elu(x, 1.0), torch.expm1(x))
    torch.testing.assert_close(build_elu()(x), F.elu(x))


@needs_compiler
def test_compilers_words_reach_the_author():
    with pytest.raises(RuntimeError, match="expm11"):
        build_operators(CPP_SOURCE.replace("std::expm1(", "std::expm11("))


@needs_compiler
def test_wrong_input_is_named():
    elu = build_elu()
    with pytest.raises(ValueError, match="float16"):
        elu(torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"strides \(1, 2\)"):
        elu(torch.ones(3, 2).t())
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="no backward"):
        elu(x)
    with torch.no_grad():
        assert elu(x).equal(x)


@pytest.fixture(scope="module")
def kernels_on_cpu(tmp_path_factory):
    launches = dict.fromkeys(["elu_one", "elu_four"], PARAMETERS)
    return compiled(CUDA_KERNELS, launches, tmp_path_factory.mktemp("elu"))


@needs_gcc
@pytest.mark.parametrize(("name", "elements"), [("elu_one", 256), ("elu_four", 1024)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 255, 1024, 1025, 2051])
def test_cuda_kernel_on_a_cpu(kernels_on_cpu, name, elements, n):
    x = guarded(numbers(n))
    with GuardBands() as bands:
        out = torch.empty_like(x)
        blocks = -(-n // elements)
        call = getattr(kernels_on_cpu, f"{name}_on_cpu")
        assert call(blocks, 1, 256, 1, pointer(x), pointer(out), ctypes.c_float(0.7), ctypes.c_size_t(n)) == 0
    bands.check()
    assert_elu(out, x, 0.7)


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvcc_report(arch):
    report = nvcc_report(arch=arch)
    assert sorted(report) == ["elu_four", "elu_one"]
    for found in report.values():
        assert found.spilled_bytes == found.shared_bytes == 0
        assert 2048 * found.registers <= 65_536  # all threads that a multiprocessor can hold have room


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) many(const float* x, float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x % 64] = x[threadIdx.x];
    __syncthreads();
    float held[96];
    for (int i = 0; i < 96; i++) held[i] = x[i * 1024 + threadIdx.x] * tile[(i + threadIdx.x) % 64];
    __syncthreads();
    for (int i = 0; i < 96; i++)
        for (int j = 0; j < 96; j++) out[(i * 96 + j) * 1024 + threadIdx.x] = held[i] * held[j];
}
"""


@needs_nvcc
def test_nvcc_report_sees_spills_and_shared_memory():
    found = nvcc_report(SPILLING)["many"]
    assert found.registers <= 64 and found.spilled_bytes > 0 and found.shared_bytes == 256


@needs_nvcc
def test_nvccs_words_reach_the_author():
    with pytest.raises(ValueError, match="nonsense"):
        nvcc_report('extern "C" __global__ void k(float* x) { x[nonsense] = 0; }')


@needs_nvcc
def test_nvcc_accepts_the_launcher(tmp_path):
    check_with_nvcc(CUDA_SOURCE, tmp_path)


def script(folder, name: str, prints: str) -> None:
    """A program of that name which prints one line."""
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{prints}'\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_missing_tools_are_named(tmp_path):
    bare = {"PATH": str(tmp_path), "CXX": ""}
    with mock.patch.dict(os.environ, bare), mock.patch.object(cpp_extension, "CUDA_HOME", None):
        os.environ.pop("CXX")
        for require in (require_build_tools, require_torch_compile):
            assert "there is no C++ compiler" in missing(require)
        assert "there is no nvcc" in missing(nvcc_report)
        script(tmp_path, cpp_extension.get_cxx_compiler(), "")
        with mock.patch.object(sysconfig, "get_path", lambda name: str(tmp_path / "nothing")):
            assert "pip install ninja" in missing(require_build_tools)
            assert "Python.h" in missing(require_torch_compile)


def test_ninja_beside_python_is_found(tmp_path):
    script(tmp_path, "ninja", "1.13.0")
    with mock.patch.dict(os.environ, PATH=""), mock.patch.object(sysconfig, "get_path", lambda name: str(tmp_path)):
        with scripts_on_path():
            assert cpp_extension.is_ninja_available()
        assert not cpp_extension.is_ninja_available()


def test_another_cudas_nvcc_is_named(tmp_path):
    script(tmp_path, "nvcc", "Cuda compilation tools, release 11.8, V11.8.89")
    gpu = mock.patch.object(torch.cuda, "is_available", lambda: True)
    with gpu, mock.patch.dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}"):
        with mock.patch.object(torch.version, "cuda", "13.0"):
            assert missing(require_cuda) == "nvcc is of CUDA 11, PyTorch of CUDA 13.0"
        with mock.patch.object(torch.version, "cuda", "11.8"):
            assert missing(require_cuda) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_named():
    assert "no NVIDIA GPU" in missing(require_cuda)
