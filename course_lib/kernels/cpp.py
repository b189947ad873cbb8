"""The last rung of the ladder: the same operator in CUDA C++, and in C++ for a machine without a GPU.

    eager            write nothing        one kernel for each operation, each through global memory
    torch.compile    write nothing        the operations fused; the compiler decides which kernels
    Triton           write the blocks     the compiler places elements on threads and fills shared memory
    CUDA C++         write the threads    you control all: threads, shared memory, barriers, widths of loads

In CUDA C++ a kernel is what *one thread* does. The host launches a grid of blocks of threads: as many blocks as cover
the elements, rounded up (ceiling division), and threads past the end do nothing (the bounds check, Triton's mask). A
launch names the stream that it is queued on, which must be PyTorch's current stream, and reports no error: the host
asks for errors afterwards.

`torch.utils.cpp_extension.load_inline` takes both sources as strings, compiles them, and loads the library, whose
`STABLE_TORCH_LIBRARY` blocks register an operator with the dispatcher: one name, a kernel for each kind of device. It
needs a compiler and ninja (`pip install ninja`), and for a GPU nvcc. Compile time depends on the headers: with the
usual `torch/extension.h` this file's C++ takes some 25 s to compile, with the headers of the stable ABI less than 2 s.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import cpp_extension


class CannotBuild(RuntimeError):
    """Raised if a tool that a build needs is missing on this machine; the message names it."""


def require_compiler() -> None:
    """Raise CannotBuild if there is no C++ compiler (g++, or the one that CXX names, possibly with options)."""
    compiler = cpp_extension.get_cxx_compiler()
    if not shutil.which(compiler.split()[0]):
        raise CannotBuild(f"there is no C++ compiler: {compiler} is not on the path")


def require_build_tools() -> None:
    """Raise CannotBuild if C++ cannot be compiled and linked here: no compiler, or no ninja."""
    require_compiler()
    with scripts_on_path():
        if not cpp_extension.is_ninja_available():
            raise CannotBuild("there is no ninja: pip install ninja")


def require_torch_compile() -> None:
    """Raise CannotBuild if torch.compile cannot build its kernels here: no compiler, or no Python headers."""
    require_compiler()
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise CannotBuild("there is no Python.h: install the headers of this Python (python3-dev on Debian)")


CUDA_KERNELS = r"""
__device__ float elu_of(float x, float alpha) {
    return x < 0 ? alpha * expm1f(x) : x;
}

// One element a thread: thread i of the grid has element i, so that a warp's 32 loads are 128 adjacent bytes.
extern "C" __global__ void elu_one(const float* x, float* out, float alpha, size_t n) {
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n)  // the last block reaches past the end
        out[i] = elu_of(x[i], alpha);
}

// Four elements a thread, loaded as one: four times the bytes under way while a warp waits for memory. The addresses
// of x and out must be multiples of 16.
extern "C" __global__ void elu_four(const float* x, float* out, float alpha, size_t n) {
    size_t i = 4 * (size_t(blockIdx.x) * blockDim.x + threadIdx.x);
    if (i + 3 < n) {
        float4 four = *reinterpret_cast<const float4*>(x + i);
        four.x = elu_of(four.x, alpha);
        four.y = elu_of(four.y, alpha);
        four.z = elu_of(four.z, alpha);
        four.w = elu_of(four.w, alpha);
        *reinterpret_cast<float4*>(out + i) = four;
    } else {
        for (; i < n; i++)  // of the whole grid, one thread comes here with 1 to 3 elements left
            out[i] = elu_of(x[i], alpha);
    }
}
"""

STABLE_HEADERS = r"""
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
"""
CUDA_HEADERS = (
    r"""
#define USE_CUDA  // or the headers leave out what is CUDA's
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
"""
    + STABLE_HEADERS
    + r"""
cudaStream_t current_stream(const Tensor& x) {  // the queue that PyTorch's own kernels are in
    void* stream;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
    return static_cast<cudaStream_t>(stream);
}
"""
)

CUDA_SOURCE = (
    CUDA_HEADERS
    + CUDA_KERNELS
    + r"""
Tensor elu_cuda(const Tensor& x, double alpha) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Tensor out = torch::stable::empty_like(x);
    const size_t n = x.numel();
    if (n == 0)  // a grid of no blocks is an error
        return out;
    const float* from = x.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();  // PyTorch's allocator gives multiples of 512; x may be a slice
    const bool wide = reinterpret_cast<uintptr_t>(from) % 16 == 0;
    const size_t threads = 256, elements = wide ? 4 * threads : threads;
    const unsigned blocks = (n + elements - 1) / elements;  // rounded up
    auto kernel = wide ? elu_four : elu_one;
    kernel<<<blocks, threads, 0, current_stream(x)>>>(from, to, alpha, n);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
    library.impl("elu", TORCH_BOX(&elu_cuda));
}
"""
)

CPP_SOURCE = (
    "#include <cmath>"
    + STABLE_HEADERS
    + r"""
Tensor elu_cpu(const Tensor& x, double alpha) {
    Tensor out = torch::stable::empty_like(x);
    const float* from = x.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    const int64_t n = x.numel();
    for (int64_t i = 0; i < n; i++)
        to[i] = from[i] < 0 ? float(alpha) * std::expm1(from[i]) : from[i];
    return out;
}

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, library) {
    library.def("elu(Tensor x, float alpha) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
    library.impl("elu", TORCH_BOX(&elu_cpu));
}
"""
)


def find_nvcc() -> str:
    """Return the path of nvcc, the compiler of CUDA C++. Raises CannotBuild if there is none."""
    nvcc = shutil.which("nvcc") or (cpp_extension.CUDA_HOME and shutil.which(f"{cpp_extension.CUDA_HOME}/bin/nvcc"))
    if not nvcc:
        raise CannotBuild("there is no nvcc: install NVIDIA's CUDA toolkit")
    return nvcc


def require_cuda() -> None:
    """Raise CannotBuild if CUDA C++ cannot be built for PyTorch and run: no GPU, no nvcc, or an nvcc of another CUDA
    version.
    """
    if not (torch.cuda.is_available() and torch.version.cuda):
        raise CannotBuild("there is no NVIDIA GPU, or PyTorch is a build without CUDA")
    about = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"release (\d+)", about)
    release = version[1] if version else "unknown"
    if release != torch.version.cuda.split(".")[0]:
        raise CannotBuild(f"nvcc is of CUDA {release}, PyTorch of CUDA {torch.version.cuda}")


@contextlib.contextmanager
def scripts_on_path() -> Iterator[None]:
    """Put the folder of programs that pip installs with this Python (ninja) on PATH, inside the block."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = os.pathsep.join([os.defpath if before is None else before, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


@functools.cache
def build_operators(cpp_source: str, cuda_source: str | None = None):
    """Return the operators that these sources register under TORCH_EXTENSION_NAME:
    `build_operators(...).NAME(tensors)`.

    Each pair of sources is built once per process, in a temporary folder: an interrupted build leaves no lock behind.
    Raises CannotBuild if a tool is missing, RuntimeError with the compiler's message if a source is wrong.
    """
    require_build_tools()
    if cuda_source is not None:
        require_cuda()
    digest = hashlib.sha256(f"{cpp_source}{cuda_source}".encode()).hexdigest()[:12]
    with tempfile.TemporaryDirectory() as folder, scripts_on_path():
        library = cpp_extension.load_inline(
            name=f"course_{digest}",  # the namespace of its operators: an edited source gets another one
            cpp_sources=[cpp_source],
            cuda_sources=None if cuda_source is None else [cuda_source],
            extra_cflags=["-O2"],
            no_implicit_headers=True,  # torch/extension.h would take ten times as long as the rest
            is_python_module=False,
            build_directory=folder,
        )
    return getattr(torch.ops, Path(library).stem)


def build_elu() -> Callable[..., torch.Tensor]:
    """Return `elu(x, alpha=1.0)` in C++, and in CUDA C++ if there is a GPU with its nvcc. Raises CannotBuild.

    x: any shape, float32, contiguous. Forward only: to train with it, give it a backward as `elu_kernels` does.
    """
    try:
        require_cuda()
        operators = build_operators(CPP_SOURCE, CUDA_SOURCE)
    except CannotBuild:
        operators = build_operators(CPP_SOURCE)

    def elu(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
        """Return F.elu(x, alpha). Raises ValueError for tensors that the kernel would misread, and for an x that
        requires a gradient.
        """
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"this elu takes contiguous float32, not {x.dtype} with strides {x.stride()}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("this elu has no backward: x must not require a gradient")
        return operators.elu(x, alpha)

    return elu


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel, as nvcc's assembler reports them. Spills are bytes stored to memory for lack of
    registers.
    """

    registers: int  # per thread
    spilled_bytes: int  # per thread, of stores
    shared_bytes: int  # per block


def nvcc_report(source: str = CUDA_KERNELS, arch: str = "sm_90") -> dict[str, Resources]:
    """Return the resources of each `extern "C" __global__` kernel of `source` on GPUs of `arch`, by name. Needs nvcc,
    but no GPU.

    Raises CannotBuild without nvcc, ValueError with nvcc's message if it rejects the source.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernels.cu")
        file.write_text(source)
        command = [find_nvcc(), "-cubin", f"-arch={arch}", "--resource-usage", file.name, "-o", "kernels.cubin"]
        compiler = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    report = compiler.stdout + compiler.stderr
    if compiler.returncode:
        raise ValueError(f"nvcc: {report.strip()}")

    def number(pattern: str, text: str) -> int:
        match = re.search(pattern, text)
        return int(match[1]) if match else 0

    resources = {}
    for part in report.split("Compiling entry function ")[1:]:
        patterns = r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem"
        resources[part.split("'")[1]] = Resources(*(number(pattern, part) for pattern in patterns))
    return resources
