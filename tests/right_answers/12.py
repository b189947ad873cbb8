"""Right answers in another style than the solutions, that the checks of notebook 12 must accept."""

# %% 12.1 a limit at a time
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    def outside(value, least, most, what):
        if value < least or value > most:
            raise ValueError(f"{gpu.name}: {what} is {value}, and goes from {least} to {most}")

    outside(threads_per_block, 1, gpu.threads_per_block, "threads_per_block")
    outside(registers_per_thread, 1, gpu.max_registers_per_thread, "registers_per_thread")
    outside(shared_bytes, 0, gpu.shared_bytes_per_block, "shared_bytes")
    warps = (threads_per_block + WARP - 1) // WARP
    shared = round_up(gpu.reserved_shared_bytes + shared_bytes, gpu.shared_granularity)
    limits = dict(
        warps=gpu.warps_per_sm // warps, blocks=gpu.blocks_per_sm,
        registers=blocks_by_registers(gpu, warps, registers_per_thread),
    )
    limits["shared memory"] = gpu.shared_bytes_per_sm // shared
    least = min(limits[name] for name in limits)
    resident = least * warps
    return Occupancy(least, resident, resident / gpu.warps_per_sm, tuple(n for n in limits if limits[n] == least))

# %% 12.2 request by request
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    total = 0
    for row, on in zip(np.asarray(addresses), np.asarray(active)):
        total += len(set((row[on].astype(np.int64) // unit).tolist()))
    return total

# %% 12.3 by where
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    half = block.size // 2
    first = block.block_x * block.size
    place = np.where(block.x < half, 2 * block.x, 2 * (block.x - half) + 1)
    compute(block, x, out, first + place)

# %% 12.4 the mask by name
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    start = tl.program_id(axis=0).to(tl.int64) * BLOCK
    place = start + tl.arange(0, BLOCK)
    mask = place < numel
    value = widen(tl.load(x_pointer + place, mask))
    negative = alpha * expm1(tl.where(value < 0, value, 0.0))
    tl.store(out_pointer + place, cast(tl.where(value >= 0, value, negative), out_pointer.dtype.element_ty), mask)

# %% 12.5 by divmod
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    y, x = np.divmod(block.x, TILE)
    multiply(block, a, b, c, n, TILE * block.block_x + y, TILE * block.block_y + x)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    y, x = np.divmod(block.x, TILE)
    row, column = TILE * block.block_x + y, TILE * block.block_y + x
    of_a, of_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    sums = np.zeros(block.size, np.float32)
    for number in range(-(-n // TILE)):
        bring(block, of_a, (y, x), a, row, number * TILE + x, n)
        bring(block, of_b, (y, x), b, number * TILE + y, column, n)
        block.sync()
        for k in range(TILE):
            sums = sums + of_a[y, k] * of_b[k, x]
        block.sync()
    with block.where((row < n) & (column < n)):
        block.store(c, n * row + column, sums)

# %% 12.6 group, then place
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    in_group = group * tiles_n
    number = program // in_group
    height = tl.minimum(group, tiles_m - number * group)
    place = program - number * in_group
    return number * group + place % height, place // height
