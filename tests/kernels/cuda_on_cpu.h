// CUDA C++ kernels on a CPU: enough of the language to run a kernel's own source, one block after the other.
//
// Each thread of a block is a fiber with a stack of its own, and all are one thread of the operating system: a fiber runs
// until it meets __syncthreads() or returns, then the next one does. That order is the worst one for a kernel with a
// missing barrier: thread 0 reads a tile of which nobody else has loaded his part, or overwrites one that all others
// still need. A barrier that only some threads reach ends the launch with an exception.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __global__
#define __device__ static
#define __shared__ static  // blocks run one after the other, so one copy is enough
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(threads)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

static dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace fibers {
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[64 * 1024]};
    bool finished = false;
};
static ucontext_t scheduler;
static Fiber* running;
static std::function<void()> kernel;

static void body() {
    kernel();
    running->finished = true;  // and on to uc_link, the scheduler
}

// One block: rounds in which each fiber runs up to the next barrier.
static void run_block(std::vector<Fiber>& fibers) {
    for (Fiber& fiber : fibers) {
        fiber.finished = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = 64 * 1024;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, body, 0);
    }
    for (size_t finished = 0; finished == 0;) {
        for (size_t i = 0; i < fibers.size(); i++) {
            running = &fibers[i];
            threadIdx = {unsigned(i % blockDim.x), unsigned(i / blockDim.x % blockDim.y),
                         unsigned(i / blockDim.x / blockDim.y)};
            swapcontext(&scheduler, &running->context);
            finished += running->finished;
        }
        if (finished != 0 && finished != fibers.size())
            throw std::runtime_error("some threads of a block returned while others wait at a barrier");
    }
}
}  // namespace fibers

static void __syncthreads() {
    const dim3 mine = threadIdx;
    swapcontext(&fibers::running->context, &fibers::scheduler);
    threadIdx = mine;
}

// kernel<<<grid, block>>>(…) as launch(grid, block, [&] { kernel(…); }); 0, or 1 where a barrier was not met by all.
static int launch(dim3 grid, dim3 block, std::function<void()> call) {
    gridDim = grid;
    blockDim = block;
    fibers::kernel = call;
    std::vector<fibers::Fiber> threads(block.x * block.y * block.z);
    try {
        for (unsigned i = 0; i < grid.x * grid.y * grid.z; i++) {
            blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
            fibers::run_block(threads);
        }
    } catch (const std::runtime_error&) {
        return 1;
    }
    return 0;
}
