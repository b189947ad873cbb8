"""course_lib.kernels.gpus: occupancy against CUDA's own calculator, compiled from its header; on a GPU, against the
runtime.

The header (cuda_occupancy.h) comes with Triton and with the CUDA toolkit; it is host code, so any C++ compiler will do.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import course_lib  # noqa: F401  (before Triton)
from course_lib.kernels.gpus import (
    GPUS,
    WARP,
    bytes_in_flight,
    load_gpus,
    loads_per_thread,
    occupancy,
    waves,
)
from course_lib.single_gpu.devices import model_of, read_table

CALCULATOR = """
#include "cuda_occupancy.h"
extern "C" int blocks(int major, int minor, int warps, int registers_per_sm, size_t shared_per_sm, size_t shared_optin,
                      size_t reserved, int sms, int threads, int registers, size_t shared, unsigned *limited_by) {
    cudaOccDeviceProp device;
    device.computeMajor = major; device.computeMinor = minor; device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = 32 * warps; device.regsPerBlock = registers_per_sm;
    device.regsPerMultiprocessor = registers_per_sm; device.warpSize = 32; device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = shared_per_sm; device.numSms = sms;
    device.sharedMemPerBlockOptin = shared_optin; device.reservedSharedMemPerBlock = reserved;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers; kernel.numBlockBarriers = 1;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN; kernel.maxDynamicSharedSizeBytes = shared;
    cudaOccDeviceState state;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared)) return -1;
    *limited_by = result.limitingFactors;
    return result.activeBlocksPerMultiprocessor;
}
"""
FACTORS = {"warps": 1, "registers": 2, "shared memory": 4, "blocks": 8}


def calculator_header() -> Path | None:
    """The folder of cuda_occupancy.h: Triton's or the toolkit's, where it is new enough for compute capability 10."""
    triton = pytest.importorskip("triton")
    folders = [Path(triton.__file__).parent / "backends/nvidia/include"]
    folders += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    return next((folder for folder in folders if (folder / "cuda_occupancy.h").exists()), None)


@pytest.fixture(scope="module")
def cuda_blocks(tmp_path_factory):
    """CUDA's own answer: (gpu, threads, registers, shared bytes) -> blocks on an SM, what limits them."""
    compiler, header = shutil.which("c++") or shutil.which("g++"), calculator_header()
    if compiler is None or header is None:
        pytest.skip("CUDA's calculator needs a C++ compiler and cuda_occupancy.h")
    folder = tmp_path_factory.mktemp("calculator")
    (folder / "calculator.cpp").write_text(CALCULATOR)
    library = folder / "calculator.so"
    build = [compiler, "-w", "-shared", "-fPIC", f"-I{header}", str(folder / "calculator.cpp"), "-o", str(library)]
    subprocess.run(build, check=True, timeout=300)
    call = ctypes.CDLL(str(library)).blocks
    call.argtypes = [ctypes.c_int] * 4 + [ctypes.c_size_t] * 3 + [ctypes.c_int] * 3 + [ctypes.c_size_t, ctypes.c_void_p]

    def blocks(gpu, threads, registers, shared):
        limited_by = ctypes.c_uint()
        memory = gpu.shared_bytes_per_sm, gpu.shared_bytes_per_block, gpu.reserved_shared_bytes
        device = *gpu.compute_capability, gpu.warps_per_sm, gpu.registers_per_sm, *memory, gpu.sms
        found = call(*device, threads, registers, shared, ctypes.byref(limited_by))
        assert found >= 0, f"the calculator refuses {threads} threads, {registers} registers, {shared} bytes"
        return found, {name for name, bit in FACTORS.items() if limited_by.value & bit}

    return blocks


@pytest.mark.parametrize("name", GPUS)
def test_occupancy_is_that_of_cudas_calculator(name, cuda_blocks):
    gpu = GPUS[name]
    threads = [1, 31, 32, 33, 64, 96, 100, 128, 160, 192, 224, 256, 288, 384, 512, 576, 640, 768, 896, 1000, 1024]
    registers = [1, 8, 16, 24, 31, 32, 33, 40, 41, 48, 56, 64, 65, 72, 80, 96, 104, 128, 129, 168, 200, 240, 255]
    shared = [0, 1, 127, 128, 1024, 6144, 6272, 16384, 33000, 48 * 1024, 48 * 1024 + 1, 99 * 1024, 100000]
    shared += [gpu.shared_bytes_per_sm // 2 - 1024, gpu.shared_bytes_per_block - 1, gpu.shared_bytes_per_block]
    for each in itertools.product(threads, registers, shared):
        ours = occupancy(gpu, *each)
        assert (ours.blocks_per_sm, set(ours.limited_by)) == cuda_blocks(gpu, *each), each


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared", "blocks", "limited_by"),
    [
        # 8 warps of 64 on the SM; 32 x 32 registers a warp, 16 of these in a quarter's 16,384: 64 warps. Both: 8.
        ("A100", 256, 32, 0, 8, ("warps", "registers")),
        # 33 registers are 1,056 a warp, given as 1,280: 12 warps in a quarter, 48 on the SM, 6 blocks.
        ("A100", 256, 33, 0, 6, ("registers",)),
        # A block of one warp: 64 warps would fit, 32 blocks may.
        ("H100", 32, 32, 0, 32, ("blocks",)),
        # 100 KiB + 1 KiB of 228: 2 blocks on an H100, of 164: 1 on an A100.
        ("H100", 128, 32, 100 * 1024, 2, ("shared memory",)),
        ("A100", 128, 32, 100 * 1024, 1, ("shared memory",)),
        # 168 registers: 5,376 a warp, 3 in a quarter, 12 on the SM: 3 blocks of 4 warps (FlashAttention-3's budget).
        ("H100", 128, 168, 0, 3, ("registers",)),
        # 1,024 threads of 65 registers: 2,304 x 32 warps are more than 65,536: it doesn't start.
        ("H100", 1024, 65, 0, 0, ("registers",)),
    ],
)
def test_occupancy_by_hand(gpu, threads, registers, shared, blocks, limited_by):
    found = occupancy(GPUS[gpu], threads, registers, shared)
    assert (found.blocks_per_sm, found.limited_by) == (blocks, limited_by)
    assert found.warps_per_sm == blocks * -(-threads // WARP) and found.fraction == found.warps_per_sm / 64


@pytest.mark.gpu
def test_occupancy_is_that_of_the_runtime():
    """PyTorch compiles a kernel (NVRTC); the driver says how many registers it has and how many blocks live at once."""
    major, minor = torch.cuda.get_device_capability()
    gpu = next((gpu for gpu in GPUS.values() if gpu.compute_capability == (major, minor)), None)
    if gpu is None:
        pytest.skip(f"no GPU of compute capability {major}.{minor} in gpu_resources.csv")
    code = 'extern "C" __global__ void fill(float* x) { extern __shared__ float s[]; s[threadIdx.x] = x[threadIdx.x];'
    code += " __syncthreads(); x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x]; }"
    kernel = torch.cuda._compile_kernel(code, "fill")
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    assert driver.cuFuncGetAttribute(ctypes.byref(found), 4, kernel.func) == 0  # CU_FUNC_ATTRIBUTE_NUM_REGS
    registers = found.value
    assert driver.cuFuncSetAttribute(kernel.func, 8, gpu.shared_bytes_per_block) == 0  # MAX_DYNAMIC_SHARED_SIZE_BYTES
    ask = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    for threads, shared in itertools.product((32, 96, 256, 1024), (0, 8192, 50000, gpu.shared_bytes_per_block)):
        assert ask(ctypes.byref(found), kernel.func, threads, ctypes.c_size_t(shared)) == 0
        assert occupancy(gpu, threads, registers, shared).blocks_per_sm == found.value, (threads, shared)


@pytest.mark.gpu
def test_the_table_is_that_of_this_gpu():
    properties = torch.cuda.get_device_properties()
    gpu = next((gpu for gpu in GPUS.values() if model_of(gpu.name) == model_of(properties.name)), None)
    if gpu is None:
        pytest.skip(f"{properties.name} is not in gpu_resources.csv")
    assert properties.multi_processor_count == gpu.sms
    assert properties.max_threads_per_multi_processor == gpu.warps_per_sm * WARP
    assert properties.regs_per_multiprocessor == gpu.registers_per_sm
    assert properties.shared_memory_per_multiprocessor == gpu.shared_bytes_per_sm
    assert properties.shared_memory_per_block_optin == gpu.shared_bytes_per_block
    assert abs(properties.L2_cache_size - gpu.l2_bytes) < 2**20


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ((0, 32, 0), "threads of a block"),
        ((1025, 32, 0), "threads of a block"),
        ((128, 0, 0), "registers of a thread"),
        ((128, 256, 0), "registers of a thread"),
        ((128, 32, -1), "bytes of shared memory"),
        ((128, 32, 227 * 1024 + 1), "bytes of shared memory"),
    ],
)
def test_a_kernel_that_cannot_be_is_refused(figures, words):
    with pytest.raises(ValueError, match=words):
        occupancy(GPUS["H100"], *figures)


def test_waves_and_their_tail():
    gpu = GPUS["H100"]
    full = waves(gpu, 132 * 4, 4)
    assert (full.count, full.tail, full.efficiency) == (1, 1.0, 1.0)
    one_more = waves(gpu, 132 * 4 + 1, 4)
    assert one_more.count == 2 and one_more.tail == pytest.approx(1 / 528) and one_more.efficiency < 0.51
    for blocks in (1, 131, 133, 5000):
        found = waves(gpu, blocks, 3)
        assert 0 < found.tail <= 1
        assert (found.count - 1 + found.tail) * 132 * 3 == pytest.approx(blocks)
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="1 or more"):
            waves(gpu, *wrong)


def test_littles_law():
    gpu = GPUS["H100"]
    assert bytes_in_flight(gpu, 600e-9) == pytest.approx(3.35e12 * 600e-9)
    # 132 SMs x 2,048 threads, half of them there, 4 bytes each: 0.54 MB a round, and 2.01 MB are needed.
    assert loads_per_thread(gpu, 600e-9, 0.5, 4) == pytest.approx(2.01e6 / (132 * 1024 * 4), rel=1e-3)
    assert loads_per_thread(gpu, 600e-9, 0.5, 16) < 1 < loads_per_thread(gpu, 600e-9, 0.5, 4)
    for wrong in ((0, 0.5, 4), (1e-7, 0, 4), (1e-7, 1.1, 4), (1e-7, 0.5, 3)):
        with pytest.raises(ValueError):
            loads_per_thread(gpu, *wrong)


def test_every_figure_has_a_source_and_agrees_with_the_data_sheets():
    rows = read_table("gpu_resources.csv")
    assert all(row["source"] for row in rows)
    assert len({(row["of"], row["quantity"]) for row in rows}) == len(rows)
    assert load_gpus() == GPUS
    for name, tflops in {"A100": 19.5, "H100": 67, "H200": 67, "B200": 75}.items():  # FP32, on the data sheets
        assert GPUS[name].peak_flops["float32"] / 1e12 == pytest.approx(tflops, rel=0.01)
    assert GPUS["A100"].bytes_per_s == pytest.approx(2.039e12)
    assert GPUS["H100"].sms * GPUS["H100"].cores_per_sm == 16896
    assert all(gpu.shared_bytes_per_sm - gpu.shared_bytes_per_block == 1024 for gpu in GPUS.values())
