"""Matrix multiplication in CUDA C++, four times: each step removes the bottleneck of the previous one.

    c = a @ b,  a: [m, k], b: [k, n], c: [m, n], row-major float32       (after Boehm, siboehm.com/articles/22/CUDA-MMM)

    naive      thread.x walks down the rows. The 32 threads of a warp read 32 rows of one column of a: addresses k
               floats apart, one sector of 32 bytes each, of which 4 are used. The same for stores of c.
    coalesced  the same loop; row = thread / 32, column = thread % 32. A warp has 32 adjacent elements of a row of c: it
               loads 128 adjacent bytes of b, and one number of a for all. The arithmetic is the same.
    tiled      32x32 threads first copy a tile of a and a tile of b to shared memory, each number read from global
               memory once by one thread and used by 32: 32 times fewer bytes. Two barriers: no thread may multiply
               before all have loaded, nor load the next tile before all have multiplied.
    coarsened  tiled reads two numbers of shared memory for one multiply-add, and waits for that ("stall MIO
               throttle"). Here a thread computes 8x8 outputs in registers: 16 numbers, in four 16-byte loads, are 64
               multiply-adds; a block of 256 threads computes 128x128.

Bytes of global memory, each number 4 bytes: 2 m n k without tiles, if caches hold nothing, 2 m n k / 32 with tiles of
32, 2 m n k / 128 with tiles of 128. cuBLAS adds tensor cores, copies that run ahead of the arithmetic, and a choice of
tiles for each shape. Edges: a thread outside c still loads (zeros) and meets the barriers, since a barrier waits for
all threads of the block; only its store is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from course_lib.kernels.cpp import CUDA_HEADERS, STABLE_HEADERS, build_operators

NAIVE = r"""
extern "C" __global__ void naive(const float* a, const float* b, float* c, int m, int n, int k) {
    const int row = blockIdx.x * 32 + threadIdx.x;  // neighboring threads, neighboring rows: far apart in memory
    const int column = blockIdx.y * 32 + threadIdx.y;
    if (row < m && column < n) {
        float sum = 0;
        for (int i = 0; i < k; i++)
            sum += a[size_t(row) * k + i] * b[size_t(i) * n + column];
        c[size_t(row) * n + column] = sum;
    }
}
"""
COALESCED = r"""
extern "C" __global__ void coalesced(const float* a, const float* b, float* c, int m, int n, int k) {
    const int row = blockIdx.x * 32 + threadIdx.x / 32;
    const int column = blockIdx.y * 32 + threadIdx.x % 32;  // neighboring threads, neighboring columns
    if (row < m && column < n) {
        float sum = 0;
        for (int i = 0; i < k; i++)
            sum += a[size_t(row) * k + i] * b[size_t(i) * n + column];
        c[size_t(row) * n + column] = sum;
    }
}
"""

TILED = r"""
extern "C" __global__ void tiled(const float* a, const float* b, float* c, int m, int n, int k) {
    __shared__ float a_tile[32][32], b_tile[32][32];
    const int y = threadIdx.x / 32, x = threadIdx.x % 32;
    const int row = blockIdx.x * 32 + y, column = blockIdx.y * 32 + x;
    float sum = 0;
    for (int start = 0; start < k; start += 32) {
        a_tile[y][x] = row < m && start + x < k ? a[size_t(row) * k + start + x] : 0;
        b_tile[y][x] = start + y < k && column < n ? b[size_t(start + y) * n + column] : 0;
        __syncthreads();  // both tiles are there
        for (int i = 0; i < 32; i++)
            sum += a_tile[y][i] * b_tile[i][x];
        __syncthreads();  // no thread needs them any more
    }
    if (row < m && column < n)
        c[size_t(row) * n + column] = sum;
}
"""

COARSENED = r"""
// Where output i, of 8, of thread `place`, of 16, lies among 128: in two groups of 4 neighbors, so that a group is one
// load of 16 bytes, and the groups of neighboring threads lie side by side, in different banks.
__device__ int offset(int place, int i) {
    return i / 4 * 64 + place * 4 + i % 4;
}

extern "C" __global__ void __launch_bounds__(256)
coarsened(const float* a, const float* b, float* c, int m, int n, int k) {
    // a's tile is stored transposed, for wide reads; 4 floats of padding put the 8 columns that a warp writes at once
    // in different banks.
    __shared__ __align__(16) float a_tile[8][128 + 4];
    __shared__ __align__(16) float b_tile[8][128];
    const int top = blockIdx.x * 128, left = blockIdx.y * 128;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
    float sums[8][8] = {};
    for (int start = 0; start < k; start += 8) {
        for (int e = threadIdx.x; e < 8 * 128; e += 256) {  // 4 numbers of each tile a thread
            const int row = top + e / 8, i = start + e % 8;
            a_tile[e % 8][e / 8] = row < m && i < k ? a[size_t(row) * k + i] : 0;
            const int j = start + e / 128, column = left + e % 128;
            b_tile[e / 128][e % 128] = j < k && column < n ? b[size_t(j) * n + column] : 0;
        }
        __syncthreads();
        for (int step = 0; step < 8; step++) {
            float a_part[8], b_part[8];  // 16 numbers from shared memory for 64 multiply-adds
            for (int i = 0; i < 8; i++) {
                a_part[i] = a_tile[step][offset(y, i)];
                b_part[i] = b_tile[step][offset(x, i)];
            }
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++)
                    sums[i][j] += a_part[i] * b_part[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            const int row = top + offset(y, i), column = left + offset(x, j);
            if (row < m && column < n)
                c[size_t(row) * n + column] = sums[i][j];
        }
}
"""


@dataclass(frozen=True)
class CudaKernel:
    """A kernel: its source, the threads of a block (x, y), and the rows and columns of c that a block computes."""

    source: str
    threads: tuple[int, int]
    tile: int


CUDA_LADDER = {
    "naive": CudaKernel(NAIVE, (32, 32), 32),
    "coalesced": CudaKernel(COALESCED, (1024, 1), 32),
    "tiled": CudaKernel(TILED, (1024, 1), 32),
    "coarsened": CudaKernel(COARSENED, (256, 1), 128),
}

MATMUL_CUDA_SOURCE = (
    CUDA_HEADERS
    + "".join(kernel.source for kernel in CUDA_LADDER.values())
    + r"""
struct Rung {
    void (*kernel)(const float*, const float*, float*, int, int, int);
    dim3 threads;
    unsigned tile;
};
const Rung ladder[] = {
"""
    + "".join(f"    {{{name}, dim3{kernel.threads}, {kernel.tile}}},\n" for name, kernel in CUDA_LADDER.items())
    + r"""};

Tensor matmul_cuda(const Tensor& a, const Tensor& b, int64_t rung) {
    torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
    const unsigned m = a.size(0), k = a.size(1), n = b.size(1);
    Tensor c = torch::stable::new_empty(a, {m, n});
    const auto [kernel, threads, tile] = ladder[rung];
    const dim3 blocks((m + tile - 1) / tile, (n + tile - 1) / tile);
    if (m > 0 && n > 0)
        kernel<<<blocks, threads, 0, current_stream(a)>>>(
            a.const_data_ptr<float>(), b.const_data_ptr<float>(), c.mutable_data_ptr<float>(), m, n, k);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    return c;
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, library) {
    library.impl("matmul", TORCH_BOX(&matmul_cuda));
}
"""
)

MATMUL_CPP_SOURCE = (
    STABLE_HEADERS
    + r"""
STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, library) {
    library.def("matmul(Tensor a, Tensor b, int rung) -> Tensor");
}
"""
)
LARGEST = 2**20  # rows or columns: tiles fit CUDA's grid (65,535 blocks in y), and row indices an int


def check_matrices(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise ValueError, in one line, for matrices that the kernels would misread."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or max(*a.shape, *b.shape) > LARGEST:
        raise ValueError(f"a [m, k] @ b [k, n] with sides of at most {LARGEST}, not {list(a.shape)} @ {list(b.shape)}")
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        raise ValueError("these kernels have no backward: a and b must not require a gradient")
    if any(x.dtype != torch.float32 or x.device.type != "cuda" or not x.is_contiguous() for x in (a, b)):
        raise ValueError("the matrices have to be contiguous float32 on a GPU")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device}, b on {b.device}")


def build_matmul() -> Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return `matmul(name, a, b)`, which runs the kernel of that name, built for this machine's GPU.

    Raises CannotBuild if there is no GPU, compiler, ninja or nvcc.
    """
    operators = build_operators(MATMUL_CPP_SOURCE, MATMUL_CUDA_SOURCE)

    def matmul(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a @ b, computed by the kernel `name`. a: [m, k]; b: [k, n]."""
        if name not in CUDA_LADDER:
            raise ValueError(f"there is no kernel {name!r}: {', '.join(CUDA_LADDER)}")
        check_matrices(a, b)
        return operators.matmul(a, b, list(CUDA_LADDER).index(name))

    return matmul
